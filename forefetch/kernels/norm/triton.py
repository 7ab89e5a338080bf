"""One program per row: a row fits in registers, so it is read once and written twice."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from forefetch.kernels.pdl import early, released


def add_rms_norm(x: Tensor, y: Tensor | None, weight: Tensor, eps: float, alpha: float) -> tuple[Tensor, Tensor]:
    """See the package. ValueError for rows that are not contiguous."""
    rows, hidden = x.shape
    for each in (x, weight, *([] if y is None else [y])):
        if each.stride(-1) != 1 or each.shape[-1] != hidden:
            raise ValueError(f"a tensor {tuple(each.shape)} with strides {each.stride()} is no row of {hidden}")
    if y is not None and y.shape[-2] != rows:
        raise ValueError(f"{tuple(y.shape)} does not fit {rows} rows")
    total = x if y is None else torch.empty((rows, hidden), dtype=x.dtype, device=x.device)
    normed = torch.empty((rows, hidden), dtype=x.dtype, device=x.device)
    block = triton.next_power_of_2(hidden)
    other = x if y is None else y
    _add_rms_norm[(rows,)](
        *(x, other, weight, total, normed, x.stride(0), other.stride(-2), other.stride(0), eps, alpha),
        HIDDEN=hidden,
        BLOCK=block,
        ADD=y is not None,
        SHARES=len(other) if other.ndim == 3 else 1,
        **early(x),
        num_warps=min(8, max(1, block // (512 if other.ndim == 2 else 256))),
    )
    return total, normed


@triton.jit
def _add_rms_norm(
    x, y, weight, total, normed, x_stride, y_stride, y_share, eps, alpha,
    HIDDEN: tl.constexpr, BLOCK: tl.constexpr, ADD: tl.constexpr, SHARES: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, BLOCK)
    inside = at < HIDDEN
    by = tl.load(weight + at, mask=inside, other=0.0).to(tl.float32)  # constant, so before the wait
    released(PDL)
    value = tl.load(x + row * x_stride + at, mask=inside, other=0.0)
    if ADD:
        added = tl.load(y + row * y_stride + at, mask=inside, other=0.0).to(tl.float32)
        for share in tl.static_range(1, SHARES):
            added += tl.load(y + share * y_share + row * y_stride + at, mask=inside, other=0.0)
        value = (value.to(tl.float32) + alpha * added).to(total.dtype.element_ty)
        tl.store(total + row * HIDDEN + at, value, mask=inside)
    wide = value.to(tl.float32)
    scale = tl.rsqrt(tl.sum(wide * wide) / HIDDEN + eps)
    tl.store(normed + row * HIDDEN + at, (wide * scale * by).to(normed.dtype.element_ty), mask=inside)
