"""One program per row: a row fits in registers, so it is read once and written twice."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from forefetch.kernels.grouped_mlp.unsummed import Unsummed
from forefetch.kernels.pdl import early, released

REGISTERS = 128
"""A thread's at most where pairs are added up. Named, so that the assembler uses them: left to itself it takes 40 and loads one
pair after the other. Shares of K are few enough, and with more registers their kernel finds no room beside the product's."""


def add_rms_norm(x: Tensor, y: Tensor | Unsummed | None, weight: Tensor, eps: float, alpha: float) -> tuple[Tensor, Tensor]:
    """See the package. ValueError for rows that are not contiguous."""
    rows, hidden = x.shape
    added = y.rows if isinstance(y, Unsummed) else y
    for each in (x, weight, *([] if added is None else [added])):
        if each.stride(-1) != 1 or each.shape[-1] != hidden:
            raise ValueError(f"a tensor {tuple(each.shape)} with strides {each.stride()} is no row of {hidden}")
    total = x if y is None else torch.empty((rows, hidden), dtype=x.dtype, device=x.device)
    normed = torch.empty((rows, hidden), dtype=x.dtype, device=x.device)
    block = triton.next_power_of_2(hidden)
    form: dict[str, Any] = {"HIDDEN": hidden, "BLOCK": block, **early(x)}
    form["num_warps"] = min(8, max(1, block // 256))  # whatever y is: the sum of squares is ordered by it
    if isinstance(y, Unsummed):
        form |= _sizes(y, rows)
        _weigh_rms_norm[(rows,)](x, *_parts(y, rows), weight, total, normed, x.stride(0), eps, alpha, maxnreg=REGISTERS, **form)
    else:
        _check(y, rows)
        other = x if y is None else y
        strides, shares = (x.stride(0), other.stride(-2), other.stride(0)), len(other) if other.ndim == 3 else 1
        _add_rms_norm[(rows,)](x, other, weight, total, normed, *strides, eps, alpha, ADD=y is not None, SHARES=shares, **form)
    return total, normed


def _check(y: Tensor | None, rows: int) -> None:
    if y is not None and y.shape[-2] != rows:
        raise ValueError(f"{tuple(y.shape)} does not fit {rows} rows")


def _parts(y: Unsummed, rows: int) -> tuple[Tensor, ...]:
    if len(y.rows) % rows or not (len(y.rows) == len(y.weights) == len(y.live)) or not y.rows.is_contiguous():
        raise ValueError(f"pairs {tuple(y.rows.shape)}, {len(y.weights)} weights do not fit {rows} rows")
    return y.rows, y.weights, y.live, *y.counters


def _sizes(y: Unsummed, rows: int) -> dict[str, int]:
    return {"K": len(y.rows) // rows, "CLEAR": len(y.counters[0]), "READY": len(y.counters[1])}


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
    _store_normed(value.to(tl.float32), by, normed + row * HIDDEN + at, inside, eps, HIDDEN)


@triton.jit
def _store_normed(wide, by, to, inside, eps, HIDDEN: tl.constexpr):
    scale = tl.rsqrt(tl.sum(wide * wide) / HIDDEN + eps)
    tl.store(to, (wide * scale * by).to(to.dtype.element_ty), mask=inside)


@triton.jit
def _weigh_rms_norm(
    x, y, weights, live, counts, ready, weight, total, normed, x_stride, eps, alpha,
    HIDDEN: tl.constexpr, BLOCK: tl.constexpr, K: tl.constexpr, CLEAR: tl.constexpr, READY: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """The same for pairs: their sum is rounded as `grouped_mlp.routing.combine` rounds it, so that bits are equal."""
    row = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, BLOCK)
    inside = at < HIDDEN
    by = tl.load(weight + at, mask=inside, other=0.0).to(tl.float32)  # constant, so before the wait
    released(PDL)
    if row == 0:
        tl.store(counts + tl.arange(0, CLEAR), tl.zeros([CLEAR], tl.int32))
        tl.store(ready + tl.arange(0, READY), tl.zeros([READY], tl.int32))
    value = tl.load(x + row * x_stride + at, mask=inside, other=0.0)
    added = tl.zeros([BLOCK], tl.float32)
    for k in tl.static_range(K):
        pair = row * K + k
        held = tl.load(live + pair) != 0
        by_gate = tl.load(weights + pair)
        each = tl.load(y + pair * HIDDEN + at, mask=inside, other=0.0)  # not masked by `held`, which is on its way itself
        added += tl.where(held, by_gate * each, 0.0)
    added = added.to(value.dtype).to(tl.float32)
    value = (value.to(tl.float32) + alpha * added).to(total.dtype.element_ty)
    tl.store(total + row * HIDDEN + at, value, mask=inside)
    _store_normed(value.to(tl.float32), by, normed + row * HIDDEN + at, inside, eps, HIDDEN)
