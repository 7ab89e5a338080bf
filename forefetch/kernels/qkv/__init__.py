"""Between the QKV product and attention: norm per head, rotation, and K and V to where the cache keeps them.

`ref.py` is the definition and what a CPU runs; `triton.py` does it in one pass, one program per row and head. Letters:
T rows, Hq / Hkv query / KV heads, G = Hq / Hkv, D head dim, N places of the cache.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from forefetch.kernels.qkv import ref
from forefetch.kernels.qkv.ref import rotate

__all__ = ["HeadNorms", "enter", "rotate", "tables"]


@dataclass(frozen=True, slots=True)
class HeadNorms:
    """RMSNorm over each head's D before the rotation: weights [D] of queries and keys."""

    q: Tensor
    k: Tensor
    eps: float


def tables(positions: Tensor, frequencies: Tensor, factor: float, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """positions [T] int64, float32 frequencies [D / 2] -> cos, sin [T, 1, D] of `dtype` times factor, both halves filled, ready
    to broadcast over heads."""
    if positions.is_cuda:
        from forefetch.kernels.qkv import rope

        return rope.tables(positions, frequencies, factor, dtype)
    return ref.tables(positions, frequencies, factor, dtype)


def enter(
    qkv: Tensor,
    cos: Tensor,
    sin: Tensor,
    norms: HeadNorms | None,
    slots: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    limit: float | None = None,
) -> Tensor:
    """qkv [T, (Hq + 2 Hkv) D] -> q [T, Hq, D], normed and rotated; K and V go to caches [Hkv, N, D] at slots [T].

    cos, sin [T, 1, D] with both halves filled. Values saturate at +-limit, by default the cache's largest. Two rows may name
    one slot only if nobody reads it (the scratch page). qkv may be in shares [S, T, ...] (`kernels.few_rows`), which are added
    up first, in their order; queries have the type of the tables. Norms are constant: on a GPU they are read before the kernel
    ahead of this one has ended.
    """
    if qkv.is_cuda:
        from forefetch.kernels.qkv import triton

        return triton.enter(qkv, cos, sin, norms, slots, k_cache, v_cache, limit)
    return ref.enter(qkv, cos, sin, norms, slots, k_cache, v_cache, limit)
