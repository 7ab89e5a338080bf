"""Rotation tables in one launch, a program per row."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from forefetch.kernels.pdl import early, released


def tables(positions: Tensor, frequencies: Tensor, factor: float, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """See the package."""
    rows, half = len(positions), len(frequencies)
    both = torch.empty((2, rows, 1, 2 * half), dtype=dtype, device=positions.device)
    block = triton.next_power_of_2(half)
    if rows:
        _tables[(rows,)](positions, frequencies, both, factor, HALF=half, BLOCK=block, **early(both), num_warps=1)
    return both[0], both[1]


@triton.jit
def _tables(positions, frequencies, both, factor, HALF: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr):
    row, at = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK)
    inside = at < HALF
    by = tl.load(frequencies + at, mask=inside, other=0.0)  # constant, so before the wait
    released(PDL)
    angle = tl.load(positions + row).to(tl.float32) * by
    kind = both.dtype.element_ty
    cos, sin = (tl.cos(angle) * factor).to(kind), (tl.sin(angle) * factor).to(kind)
    to = both + row * (2 * HALF) + at
    behind = tl.num_programs(0).to(tl.int64) * (2 * HALF)
    tl.store(to, cos, mask=inside)
    tl.store(to + HALF, cos, mask=inside)
    tl.store(to + behind, sin, mask=inside)
    tl.store(to + behind + HALF, sin, mask=inside)
