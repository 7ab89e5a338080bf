"""How products are cut, as measured on an H200 (benchmarks/LOG.md) for the sizes of Qwen3-30B-A3B: 2,048 x 5,120, 4,096 x
2,048, 2,048 x 151,936, and a gate of 128 experts. None: there is no kernel for these sizes, or cuBLAS is as fast.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

MOST_ROWS = 64
MOST_WAITING = 32
"""Rows up to which a weight that waits in shared memory is worth its early start: with more, reading x takes longer."""
MOST_UNDIVIDED = 128
"""Rows up to which 8-bit codes are read again for each 64 of them; with more, multiplying them out first costs less."""


LEAST_STREAMED = 16384
"""Columns from which on a weight fills the machine without being cut along K, and lies so."""


@dataclass(frozen=True, slots=True)
class Plan:
    """`shares` of K; `columns` and `rows` per program (rows 0: all of them). `whole`: the share's weight at once, before
    waiting for x, its products added up one by one. `split`: the same on tensor cores, a piece of `depth` for each warp.
    `steps`: on tensor cores, `depth` after `depth`, `stages` of them on their way."""

    form: Literal["whole", "split", "steps"]
    shares: int
    columns: int
    depth: int
    stages: int = 1
    warps: int = 4
    rows: int = 0


@dataclass(frozen=True, slots=True)
class HeldPlan:
    """`each` inputs and 16 outputs for each of `warps`; `registers` at most for a thread, 0: as many as it takes."""

    each: int
    warps: int
    registers: int = 0


@dataclass(frozen=True, slots=True)
class StreamedPlan:
    """Two or more `tiles` of 128 outputs a program, `ring` steps of 128 inputs of x on their way."""

    tiles: int
    ring: int = 4


@dataclass(frozen=True, slots=True)
class WaitingPlan:
    """`each` inputs and 16 outputs for each of `warps`; `ring` steps of `depth` inputs of x on their way."""

    each: int
    warps: int
    ring: int
    depth: int = 128


def waiting(rows: int, inner: int, outer: int) -> WaitingPlan | None:
    """[rows, inner] x [inner, outer] in 16 bits, for a reader that adds shares up."""
    found = WaitingPlan(256, 4, 2) if inner < 4096 else WaitingPlan(512, 4, 4)
    fits = inner >= 1024 and inner % found.each == 0 and outer % (16 * found.warps) == 0
    return found if fits and 1 < rows <= MOST_WAITING else None


def plain(rows: int, inner: int, outer: int) -> Plan | None:
    """[rows, inner] x [inner, outer] in 16 bits."""
    if rows == 1 and inner >= 4096:
        found = Plan("whole", inner // 512, 64, 512, warps=8, rows=1)
    elif rows == 1:
        found = Plan("whole", inner // 256, 64, 256, rows=1)
    elif rows <= 16:
        found = Plan("steps", inner // 512, 128, 128, 3, 8)
    else:
        found = Plan("steps", inner // 1024, 64, 128, 3)
    least = 1024 if rows == 1 else 4096
    return found if inner >= least and outer % found.columns == 0 and _fits(found, rows, inner) else None


def rounded(rows: int, inner: int, outer: int) -> Plan | None:
    """[rows, inner] x [inner, outer] with codes of 8 bits, for a reader that adds shares up."""
    if rows == 1 and inner == 4096:
        found = Plan("whole", 1, 8, inner, warps=8, rows=1)
    elif rows == 1:
        found = Plan("whole", inner // 256, 64, 256, rows=1)
    else:
        found = Plan("steps", 4, 64, 128, 4 if rows <= 32 else 3)
    return found if inner >= 1024 and outer >= 1024 and _fits(found, rows, inner) else undivided(rows, inner, outer)


def undivided(rows: int, inner: int, outer: int) -> Plan | None:
    """The same in one share."""
    depth = next((depth for depth in (128, 64, 32) if inner % depth == 0), 0)
    if rows <= 32:
        found = Plan("steps", 1, 64 if outer >= 4096 else 16, depth, 4)
    else:
        found = Plan("steps", 1, 128 if outer >= 4096 else 32, min(depth, 64), 4, rows=64)
    return found if depth and 0 < rows <= MOST_UNDIVIDED else None


def held(rows: int, inner: int, outer: int) -> HeldPlan | None:
    """[rows, inner] x [inner, outer] with codes in fragment order."""
    found = HeldPlan(256, 8, 96) if rows > 8 and inner < 4096 and outer % 128 == 0 else HeldPlan(512, 4)
    return found if 0 < rows <= MOST_ROWS else None


def streamed(rows: int, inner: int, outer: int) -> StreamedPlan | None:
    """[rows, inner] x [inner, outer], a head's, with codes in fragment order and in one share."""
    fits = inner % 128 == 0 and inner >= 1024 and outer % 64 == 0 and outer >= LEAST_STREAMED
    return StreamedPlan(3, 3 if rows > 32 else 4) if fits and 0 < rows <= MOST_UNDIVIDED else None


def gate(rows: int, outer: int, inner: int) -> Plan | None:
    """[rows, inner] x [outer, inner]: few columns, in one share."""
    if rows <= 16 and inner & (inner - 1) == 0 and inner <= 4096:
        found = Plan("whole", 1, 4, inner, rows=min(4, 1 << (max(1, rows) - 1).bit_length()))
    elif inner == 2048:
        found = Plan("split", 1, 16, inner // 8, warps=8, rows=8)
    else:
        found = Plan("steps", 1, 16, 256, 4)
    return found if inner >= 1024 and outer % found.columns == 0 and _fits(found, rows, inner) else None


def _fits(plan: Plan, rows: int, inner: int) -> bool:
    return 0 < rows <= MOST_ROWS and plan.shares > 0 and inner % (plan.shares * plan.depth) == 0
