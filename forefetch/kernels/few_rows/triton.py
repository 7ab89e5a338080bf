"""Split-K products: of one row by plain arithmetic on registers, of up to 64, padded, on tensor cores.

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
    """`shares` of K, each in steps of `depth`; `columns` per program. `stages` 0: the whole share at once, in registers.
    `ask`: lines are brought into the L2 cache before the program waits."""

    shares: int
    columns: int
    depth: int
    stages: int
    warps: int = 4
    ask: bool = True


def plan(rows: int, inner: int, outer: int) -> Plan | None:
    """How [rows, inner] x [inner, outer] is cut; None: not for these."""
    found = Plan(max(1, inner // 256), 64, 256, 0) if rows == 1 else Plan(max(1, inner // 512), 64, 128, 3)
    fits = 0 < rows <= MOST_ROWS and inner % (found.shares * found.depth) == 0 and outer % found.columns == 0
    return found if fits and inner >= 1024 else None


def gate_plan(rows: int, outer: int, inner: int) -> Plan | None:
    """The same for a gate, in one share: its programs have all of their weight in flight at once."""
    if rows <= FEW and inner & (inner - 1) == 0 and inner <= 4096:
        found = Plan(1, 4, inner, 0)
    else:
        found = Plan(1, 16, 512, 4) if rows <= 16 else Plan(1, 16, 256, 3)
    fits = 0 < rows <= MOST_ROWS and inner % found.depth == 0 and outer % found.columns == 0
    return found if fits and inner >= 1024 else None


def product(x: Tensor, weight: Tensor, plan: Plan, ahead: Tensor | None = None) -> Tensor:
    """See the package. ValueError for what is not contiguous."""
    (rows, inner), outer = x.shape, weight.shape[1]
    _check(x, weight, inner, weight.shape[0])
    out = torch.empty((plan.shares, rows, outer), dtype=torch.float32, device=x.device)
    _launch(x, weight, out, ahead, (plan.columns, outer, 1), plan)
    return out


def gate(x: Tensor, weight: Tensor, plan: Plan) -> Tensor:
    """See the package. ValueError for what is not contiguous."""
    (rows, inner), outer = x.shape, weight.shape[0]
    _check(x, weight, inner, weight.shape[1])
    out = torch.empty((rows, outer), dtype=x.dtype, device=x.device)
    _launch(x, weight, out, None, (plan.columns * inner, 1, inner), plan)
    return out


def _check(x: Tensor, weight: Tensor, inner: int, found: int) -> None:
    if inner != found or x.dtype != weight.dtype or not (x.is_contiguous() and weight.is_contiguous()):
        raise ValueError(f"rows {tuple(x.shape)} {x.dtype} and weight {tuple(weight.shape)} {weight.dtype} do not fit")


def _launch(x: Tensor, weight: Tensor, out: Tensor, ahead: Tensor | None, strides: tuple[int, int, int], plan: Plan) -> None:
    """`strides` of the weight: from tile to tile of columns, along K, along columns."""
    (rows, inner), outer, whole = x.shape, out.shape[-1], plan.stages == 0
    lines = ahead.numel() * ahead.element_size() // LINE if ahead is not None and rows <= FEW else 0
    programs = outer // plan.columns * plan.shares
    kernel = _whole if whole else _steps
    form = (
        {"ROWS": triton.next_power_of_2(rows)} if whole else {"M": max(16, triton.next_power_of_2(rows)), "DEPTH": plan.depth}
    )
    kernel[(outer // plan.columns, plan.shares)](
        *(x, weight, out, weight if ahead is None else ahead, rows, lines),
        K=inner,
        N=outer,
        BY_TILE=strides[0],
        BY_K=strides[1],
        BY_COLUMN=strides[2],
        COLUMNS=plan.columns,
        EACH=inner // plan.shares,
        AHEAD=triton.next_power_of_2(triton.cdiv(lines, programs)) if lines else 0,
        ESIZE=x.element_size(),
        **form,
        **({} if whole else {"ASK": plan.ask and strides[2] == 1}),
        **early(x),
        num_warps=plan.warps,
        num_stages=max(1, plan.stages),
    )


@triton.jit
def _ask(pointers):
    """Lines into the L2 cache; nothing waits for them."""
    tl.inline_asm_elementwise(
        "prefetch.global.L2 [$1]; mov.u32 $0, 0;", "=r,l", [pointers], dtype=tl.int32, is_pure=False, pack=1
    )


@triton.jit
def _ask_ahead(ahead, lines, AHEAD: tl.constexpr, ESIZE: tl.constexpr):
    """This program's part of a weight that will be read soon."""
    program = tl.program_id(0) * tl.num_programs(1) + tl.program_id(1)
    each = tl.cdiv(lines, tl.num_programs(0) * tl.num_programs(1))
    line = program * each + tl.arange(0, AHEAD)
    _ask(ahead + tl.minimum(line, lines - 1).to(tl.int64) * (128 // ESIZE))


@triton.jit(do_not_specialize=["rows", "lines"])
def _whole(
    x, weight, out, ahead, rows, lines,
    K: tl.constexpr, N: tl.constexpr, BY_TILE: tl.constexpr, BY_K: tl.constexpr, BY_COLUMN: tl.constexpr,
    COLUMNS: tl.constexpr, EACH: tl.constexpr, AHEAD: tl.constexpr, ESIZE: tl.constexpr, ROWS: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """Program (tile of columns, share of K): all of its weight is on the way before it waits. Sums of products in float32."""
    tile, share = tl.program_id(0), tl.program_id(1)
    n, k = tl.arange(0, COLUMNS), share * EACH + tl.arange(0, EACH)
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    columns = tl.load(weight + tile.to(tl.int64) * BY_TILE + k.to(tl.int64)[:, None] * BY_K + n[None, :] * BY_COLUMN)
    if PDL:
        tl.extra.cuda.gdc_wait()
    for row in tl.static_range(ROWS):
        values = tl.load(x + row * K + k, mask=(k < K) & (row < rows), other=0.0).to(tl.float32)
        total = tl.sum(columns.to(tl.float32) * values[:, None], 0)
        to = out + (share * rows + row) * N + tile * COLUMNS + n
        tl.store(to, total.to(out.dtype.element_ty), mask=(n < COLUMNS) & (row < rows))
    if PDL and AHEAD > 0:
        _ask_ahead(ahead, lines, AHEAD, ESIZE)


@triton.jit(do_not_specialize=["rows", "lines"])
def _steps(
    x, weight, out, ahead, rows, lines,
    K: tl.constexpr, N: tl.constexpr, BY_TILE: tl.constexpr, BY_K: tl.constexpr, BY_COLUMN: tl.constexpr,
    COLUMNS: tl.constexpr, EACH: tl.constexpr, AHEAD: tl.constexpr, ESIZE: tl.constexpr, M: tl.constexpr,
    DEPTH: tl.constexpr, ASK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Program (tile of columns, share of K), in steps on tensor cores."""
    tile, share = tl.program_id(0), tl.program_id(1)
    m, n, k = tl.arange(0, M), tl.arange(0, COLUMNS), tl.arange(0, DEPTH)
    first, base = share * EACH, weight + tile.to(tl.int64) * BY_TILE
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        if ASK:  # a line holds 128 bytes of a row's columns
            at = first + tl.arange(0, EACH)
            for line in tl.static_range(0, COLUMNS * ESIZE, 128):
                _ask(base + at.to(tl.int64) * BY_K + line // ESIZE)
        tl.extra.cuda.gdc_wait()
    acc = tl.zeros([M, COLUMNS], tl.float32)
    seen = (m < rows)[:, None]
    for start in tl.range(first, first + EACH, DEPTH):
        values = tl.load(x + m[:, None] * K + start + k[None, :], mask=seen, other=0.0)
        columns = tl.load(base + (start + k).to(tl.int64)[:, None] * BY_K + n[None, :] * BY_COLUMN)
        acc = tl.dot(values, columns, acc, input_precision="ieee")
    at = (share * rows + m[:, None]) * N + tile * COLUMNS + n[None, :]
    tl.store(out + at, acc.to(out.dtype.element_ty), mask=seen)
    if PDL and AHEAD > 0:
        _ask_ahead(ahead, lines, AHEAD, ESIZE)
