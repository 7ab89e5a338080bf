"""Split-K products: of few rows with the whole share of the weight in registers, of more, padded, in steps on tensor cores.

A weight is constant, so a program may load it before it waits for the kernel whose rows it multiplies (programmatic dependent
launch): the copy from memory runs while a norm or a merge still does. That is worth most for one row. Asking for lines of the
L2 cache instead, for the own share or for the weight of a later product, made things slower (benchmarks/LOG.md).

A weight is [K, N] as it is kept, or [N, K] in 8 bits (`rounded.py`), whose codes become x's type in registers, exactly, and
whose scales multiply float32 sums.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from forefetch.kernels.few_rows.plans import Plan
from forefetch.kernels.few_rows.rounded import Rounded
from forefetch.kernels.pdl import early


def product(x: Tensor, weight: Tensor | Rounded, plan: Plan) -> Tensor:
    """See the package. ValueError for what is not contiguous."""
    (rows, inner), outer = x.shape, weight.shape[1]
    shape, whole = (plan.shares, rows, outer), plan.shares == 1 and isinstance(weight, Rounded)
    out = torch.empty(shape, dtype=x.dtype if whole else torch.float32, device=x.device)
    if isinstance(weight, Rounded):
        _check(x, weight.codes, inner, weight.shape[0], x.dtype)
        _launch(x, weight.codes, out, (plan.columns * inner, 1, inner), plan, weight.scales)
    else:
        _check(x, weight, inner, weight.shape[0], weight.dtype)
        _launch(x, weight, out, (plan.columns, outer, 1), plan)
    return out[0] if whole else out


def gate(x: Tensor, weight: Tensor, plan: Plan) -> Tensor:
    """See the package. ValueError for what is not contiguous."""
    (rows, inner), outer = x.shape, weight.shape[0]
    _check(x, weight, inner, weight.shape[1], weight.dtype)
    out = torch.empty((rows, outer), dtype=x.dtype, device=x.device)
    _launch(x, weight, out, (plan.columns * inner, 1, inner), plan)
    return out


def _check(x: Tensor, weight: Tensor, inner: int, found: int, dtype: torch.dtype) -> None:
    if inner != found or x.dtype != dtype or not (x.is_contiguous() and weight.is_contiguous()):
        raise ValueError(f"rows {tuple(x.shape)} {x.dtype} and weight {tuple(weight.shape)} {weight.dtype} do not fit")


def _launch(
    x: Tensor, weight: Tensor, out: Tensor, strides: tuple[int, int, int], plan: Plan, scales: Tensor | None = None
) -> None:
    """`strides` of the weight: from tile to tile of columns, along K, along columns."""
    (rows, inner), outer = x.shape, out.shape[-1]
    form = {"num_warps": plan.warps, "num_stages": plan.stages, **early(x)}
    where = {"BY_TILE": strides[0], "BY_K": strides[1], "BY_COLUMN": strides[2], "COLUMNS": plan.columns}
    sizes = {"K": inner, "N": outer, "EACH": inner // plan.shares, "SCALED": scales is not None}
    each = plan.rows or max(16, triton.next_power_of_2(rows))
    grid = triton.cdiv(outer, plan.columns), plan.shares, triton.cdiv(rows, each)
    tensors = (x, weight, weight if scales is None else scales, out, rows)
    if plan.form == "whole":
        _whole[grid](*tensors, **sizes, **where, ROWS=each, **form)
    elif plan.form == "split":
        # Registers are named, so that the assembler has the whole share on its way and not one line after the other.
        _split[grid](*tensors, **sizes, **where, M=each, DEPTH=plan.depth, maxnreg=128, **form)
    else:
        _steps[grid](*tensors, **sizes, **where, M=each, DEPTH=plan.depth, **form)


@triton.jit
def _block(
    weight, tile, k, n,
    N: tl.constexpr, BY_TILE: tl.constexpr, BY_K: tl.constexpr, BY_COLUMN: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Inputs k of a tile's columns n; zeros behind the last column."""
    at = weight + tile.to(tl.int64) * BY_TILE + k.to(tl.int64)[:, None] * BY_K + n[None, :] * BY_COLUMN
    return tl.load(at) if N % COLUMNS == 0 else tl.load(at, mask=(tile * COLUMNS + n < N)[None, :], other=0)


@triton.jit(do_not_specialize=["rows"])
def _whole(
    x, weight, scales, out, rows,
    K: tl.constexpr, N: tl.constexpr, EACH: tl.constexpr, SCALED: tl.constexpr, BY_TILE: tl.constexpr, BY_K: tl.constexpr,
    BY_COLUMN: tl.constexpr, COLUMNS: tl.constexpr, ROWS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Program (tile of columns, share of K, block of rows): all of its weight is on the way before it waits. Float32 sums."""
    tile, share, first = tl.program_id(0), tl.program_id(1), tl.program_id(2) * ROWS
    n, k = tl.arange(0, COLUMNS), share * EACH + tl.arange(0, EACH)
    column = tile * COLUMNS + n
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    columns = _block(weight, tile, k, n, N, BY_TILE, BY_K, BY_COLUMN, COLUMNS)
    if SCALED:
        scale = tl.load(scales + column, mask=column < N, other=0.0)
    if PDL:
        tl.extra.cuda.gdc_wait()
    for each in tl.static_range(ROWS):
        row = first + each
        values = tl.load(x + row * K + k, mask=(k < K) & (row < rows), other=0.0).to(tl.float32)
        total = tl.sum(columns.to(tl.float32) * values[:, None], 0)
        if SCALED:
            total *= scale
        to = out + (share * rows + row) * N + column
        tl.store(to, total.to(out.dtype.element_ty), mask=(column < N) & (row < rows))


@triton.jit(do_not_specialize=["rows"])
def _split(
    x, weight, scales, out, rows,
    K: tl.constexpr, N: tl.constexpr, EACH: tl.constexpr, SCALED: tl.constexpr, BY_TILE: tl.constexpr, BY_K: tl.constexpr,
    BY_COLUMN: tl.constexpr, COLUMNS: tl.constexpr, M: tl.constexpr, DEPTH: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """The same on tensor cores: pieces of DEPTH of K by different warps, whose sums are added at the end. Columns are the first
    operand, of which there must be 16, so that 8 rows are enough for a program."""
    tile, share, block = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    PIECES: tl.constexpr = EACH // DEPTH
    c, m, n, k = tl.arange(0, PIECES), block * M + tl.arange(0, M), tl.arange(0, COLUMNS), tl.arange(0, DEPTH)
    column = tile * COLUMNS + n
    inner = share * EACH + c[:, None] * DEPTH + k[None, :]  # [C, DEPTH]
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    at = weight + tile.to(tl.int64) * BY_TILE + inner[:, None, :] * BY_K + n[None, :, None] * BY_COLUMN
    columns = tl.load(at, mask=(column < N)[None, :, None], other=0)
    if SCALED:
        scale = tl.load(scales + column, mask=column < N, other=0.0)
    if PDL:
        tl.extra.cuda.gdc_wait()
    values = tl.load(x + m[None, None, :] * K + inner[:, :, None], mask=(m < rows)[None, None, :], other=0.0)
    total = tl.sum(tl.dot(columns.to(x.dtype.element_ty), values, input_precision="ieee"), 0)
    if SCALED:
        total *= scale[:, None]
    to = out + (share * rows + m[None, :]) * N + column[:, None]
    tl.store(to, total.to(out.dtype.element_ty), mask=(m < rows)[None, :] & (column < N)[:, None])


@triton.jit(do_not_specialize=["rows"])
def _steps(
    x, weight, scales, out, rows,
    K: tl.constexpr, N: tl.constexpr, EACH: tl.constexpr, SCALED: tl.constexpr, BY_TILE: tl.constexpr, BY_K: tl.constexpr,
    BY_COLUMN: tl.constexpr, COLUMNS: tl.constexpr, M: tl.constexpr, DEPTH: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Program (tile of columns, share of K, block of rows), in steps on tensor cores."""
    tile, share, block = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    m, n, k = block * M + tl.arange(0, M), tl.arange(0, COLUMNS), tl.arange(0, DEPTH)
    first, column = share * EACH, tile * COLUMNS + n
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    if SCALED:
        scale = tl.load(scales + column, mask=column < N, other=0.0)
    if PDL:
        tl.extra.cuda.gdc_wait()
    acc = tl.zeros([M, COLUMNS], tl.float32)
    seen = (m < rows)[:, None]
    for start in tl.range(first, first + EACH, DEPTH):
        values = tl.load(x + m[:, None] * K + start + k[None, :], mask=seen, other=0.0)
        columns = _block(weight, tile, start + k, n, N, BY_TILE, BY_K, BY_COLUMN, COLUMNS).to(x.dtype.element_ty)
        acc = tl.dot(values, columns, acc, input_precision="ieee")
    if SCALED:
        acc *= scale[None, :]
    to = out + (share * rows + m[:, None]) * N + column[None, :]
    tl.store(to, acc.to(out.dtype.element_ty), mask=seen & (column < N)[None, :])
