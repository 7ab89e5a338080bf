"""Split-K products on tensor cores, rows padded to 16, 32 or 64.

A weight is constant, so a program asks for its part of it before it waits for the kernel whose rows it multiplies: the copy
from memory runs while a norm or a merge still does (programmatic dependent launch). What comes later, a program can ask for at
its end: attention over few rows leaves the memory idle.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from forefetch.kernels.pdl import early

MOST_ROWS = 64
FEW = 4  # rows at which attention leaves memory idle
LINE = 128  # bytes that a prefetch asks for


@dataclass(frozen=True, slots=True)
class Plan:
    """`shares` of K, each in steps of `depth`; `columns` per program."""

    shares: int
    columns: int
    depth: int
    stages: int
    warps: int = 4


def plan(rows: int, inner: int, outer: int) -> Plan | None:
    """How [rows, inner] x [inner, outer] is cut; None: not for these. About three programs a multiprocessor."""
    found = Plan(max(1, inner // 512), 64, 64, 4 if rows <= 32 else 3)
    fits = 0 < rows <= MOST_ROWS and inner % (found.shares * found.depth) == 0 and outer % found.columns == 0
    return found if fits and inner >= 1024 else None


def gate_plan(rows: int, outer: int, inner: int) -> Plan | None:
    """The same for a gate, in one share: its programs have all of their weight in flight at once."""
    found = Plan(1, 16, 512 if rows <= 16 else 256, 4 if rows <= 16 else 3)
    fits = 0 < rows <= MOST_ROWS and inner % found.depth == 0 and outer % found.columns == 0
    return found if fits and inner >= 1024 else None


def product(x: Tensor, weight: Tensor, plan: Plan, ahead: Tensor | None = None) -> Tensor:
    """See the package. ValueError for what is not contiguous."""
    (rows, inner), outer = x.shape, weight.shape[1]
    _check(x, weight, inner, weight.shape[0])
    out = torch.empty((plan.shares, rows, outer), dtype=torch.float32, device=x.device)
    lines = ahead.numel() * ahead.element_size() // LINE if ahead is not None and rows <= FEW else 0
    _launch(x, weight, out, weight if ahead is None else ahead, lines, rows, inner, outer, (outer, 1), plan)
    return out


def gate(x: Tensor, weight: Tensor, plan: Plan) -> Tensor:
    """See the package. ValueError for what is not contiguous."""
    (rows, inner), outer = x.shape, weight.shape[0]
    _check(x, weight, inner, weight.shape[1])
    out = torch.empty((rows, outer), dtype=x.dtype, device=x.device)
    _launch(x, weight, out, weight, 0, rows, inner, outer, (1, inner), plan)
    return out


def _check(x: Tensor, weight: Tensor, inner: int, found: int) -> None:
    if inner != found or x.dtype != weight.dtype or not (x.is_contiguous() and weight.is_contiguous()):
        raise ValueError(f"rows {tuple(x.shape)} {x.dtype} and weight {tuple(weight.shape)} {weight.dtype} do not fit")


def _launch(
    x: Tensor, weight: Tensor, out: Tensor, ahead: Tensor, lines: int, rows: int, inner: int, outer: int,
    strides: tuple[int, int], plan: Plan,
) -> None:  # fmt: skip
    programs = outer // plan.columns * plan.shares
    _product[(outer // plan.columns, plan.shares)](
        *(x, weight, out, ahead, rows, lines),
        K=inner,
        N=outer,
        BY_K=strides[0],
        BY_N=strides[1],
        M=max(16, triton.next_power_of_2(rows)),
        COLUMNS=plan.columns,
        DEPTH=plan.depth,
        EACH=inner // plan.shares,
        AHEAD=triton.next_power_of_2(triton.cdiv(lines, programs)) if lines else 0,
        ESIZE=x.element_size(),
        **early(x),
        num_warps=plan.warps,
        num_stages=plan.stages,
    )


@triton.jit
def _ask(pointers):
    """Lines into the L2 cache; nothing waits for them."""
    tl.inline_asm_elementwise(
        "prefetch.global.L2 [$1]; mov.u32 $0, 0;", "=r,l", [pointers], dtype=tl.int32, is_pure=False, pack=1
    )


@triton.jit(do_not_specialize=["rows", "lines"])
def _product(
    x, weight, out, ahead, rows, lines,
    K: tl.constexpr, N: tl.constexpr, BY_K: tl.constexpr, BY_N: tl.constexpr, M: tl.constexpr, COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr, EACH: tl.constexpr, AHEAD: tl.constexpr, ESIZE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Program (tile of columns, share of K)."""
    tile, share = tl.program_id(0), tl.program_id(1)
    m, n, k = tl.arange(0, M), tile * COLUMNS + tl.arange(0, COLUMNS), tl.arange(0, DEPTH)
    first = share * EACH
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        if BY_N == 1:  # a line holds 128 bytes of a row's columns
            at = first + tl.arange(0, EACH)
            for line in tl.static_range(0, COLUMNS * ESIZE, 128):
                _ask(weight + at.to(tl.int64) * BY_K + tile * COLUMNS + line // ESIZE)
        tl.extra.cuda.gdc_wait()
    acc = tl.zeros([M, COLUMNS], tl.float32)
    seen = (m < rows)[:, None]
    for start in tl.range(first, first + EACH, DEPTH):
        values = tl.load(x + m[:, None] * K + start + k[None, :], mask=seen, other=0.0)
        columns = tl.load(weight + (start + k).to(tl.int64)[:, None] * BY_K + n[None, :] * BY_N)
        acc = tl.dot(values, columns, acc, input_precision="ieee")
    at = (share * rows + m[:, None]) * N + n[None, :]
    tl.store(out + at, acc.to(out.dtype.element_ty), mask=seen)
    if PDL and AHEAD > 0:
        programs = tl.num_programs(0) * tl.num_programs(1)
        line = (tile * tl.num_programs(1) + share) * tl.cdiv(lines, programs) + tl.arange(0, AHEAD)
        _ask(ahead + tl.minimum(line, lines - 1).to(tl.int64) * (128 // ESIZE))
