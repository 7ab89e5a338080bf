"""8-bit weights multiplied out for products of many rows, whose time is arithmetic: one pass, then cuBLAS."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from forefetch.kernels.few_rows.rounded import Rounded


def dense(weight: Rounded, dtype: torch.dtype) -> Tensor:
    """[K, N] of `dtype`, as `Rounded.dense`."""
    inner, outer = weight.shape
    out = torch.empty((outer, inner), dtype=dtype, device=weight.codes.device)
    grid = triton.cdiv(outer, 64), triton.cdiv(inner, 128)
    _dense[grid](weight.codes, weight.scales, out, K=inner, N=outer, FRAGMENTS=weight.fragments)
    return out.t()


@triton.jit
def _dense(codes, scales, out, K: tl.constexpr, N: tl.constexpr, FRAGMENTS: tl.constexpr):
    """Program (64 outputs, 128 inputs)."""
    tile = tl.program_id(0)
    r, k = tl.arange(0, 64)[:, None], tl.program_id(1) * 128 + tl.arange(0, 128)[None, :]
    n = tile * 64 + r
    inside = (n < N) & (k < K)
    if FRAGMENTS:  # `held.py` says where bits lie
        low = ((r >> 3) & 1) + (k & 1) * 2 + ((k >> 3) & 3) * 4
        place = (k >> 5) * 2048 + low + ((k >> 1) & 3) * 16 + (r & 7) * 64 + (r >> 4) * 512
        at = tile.to(tl.int64) * (64 * K) + place
    else:
        at = n.to(tl.int64) * K + k
    value = tl.load(codes + at, mask=inside, other=0).to(tl.float32) * tl.load(scales + n, mask=n < N, other=0.0)
    tl.store(out + n.to(tl.int64) * K + k, value.to(out.dtype.element_ty), mask=inside)
