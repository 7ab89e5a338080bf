"""The definition in plain PyTorch, and what a CPU runs."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.nn.functional import rms_norm

from forefetch.kernels.few_rows import shared

if TYPE_CHECKING:
    from forefetch.kernels.qkv import HeadNorms


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
    """See the package."""
    kv_heads, _, dim = k_cache.shape
    qkv = shared(qkv, cos.dtype)
    heads = qkv.view(len(qkv), -1, dim)
    q, k, v = heads[:, : -2 * kv_heads], heads[:, -2 * kv_heads : -kv_heads], heads[:, -kv_heads:]
    if norms is not None:
        q, k = rms_norm(q, (dim,), norms.q, norms.eps), rms_norm(k, (dim,), norms.k, norms.eps)
    q, k = rotate(q, cos, sin), rotate(k, cos, sin)
    for cache, rows in ((k_cache, k), (v_cache, v)):
        most = limit or torch.finfo(cache.dtype).max
        narrow = rows if rows.dtype == cache.dtype and not limit else rows.clamp(-most, most).to(cache.dtype)
        cache.index_copy_(1, slots, narrow.transpose(0, 1))
    return q


def tables(positions: Tensor, frequencies: Tensor, factor: float, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """See the package."""
    angles = positions.to(torch.float32)[:, None] * frequencies  # [T, D/2]
    angles = torch.cat((angles, angles), dim=-1)[:, None, :]
    return (angles.cos() * factor).to(dtype), (angles.sin() * factor).to(dtype)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """x [T, heads, D] rotated by its positions' angles; cos, sin [T, 1, D]."""
    half = x.shape[-1] // 2
    return torch.addcmul(x * cos, torch.cat((-x[..., half:], x[..., :half]), dim=-1), sin)
