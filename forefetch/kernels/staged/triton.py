"""One program per block of rows. What the host staged is there when the kernel is launched, so it is asked for before the wait:
the trip over the bus is hidden behind the kernel ahead."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from forefetch.kernels.pdl import early, released

BLOCK = 64


def bring(staged: Tensor, chosen: Tensor, rows: Tensor, placed: Tensor, count: int) -> None:
    """See the package."""
    width, decodes = rows.shape[1], placed.shape[1]
    sizes = {"BLOCK": BLOCK, **early(rows)}
    _bring[(triton.cdiv(count, BLOCK),)](
        staged, chosen, rows, placed, count, staged.stride(0), width, decodes, **sizes, num_warps=2
    )


@triton.jit(do_not_specialize=["count"])
def _bring(staged, chosen, rows, placed, count, staged_row, width, decodes, BLOCK: tl.constexpr, PDL: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = at < count
    decoding = inside & (at < decodes)
    token = tl.load(staged + at, mask=inside)
    position = tl.load(staged + staged_row + at, mask=inside)
    slot = tl.load(staged + 2 * staged_row + at, mask=inside)
    logit = tl.load(staged + 3 * staged_row + at, mask=inside)
    source = tl.load(staged + 4 * staged_row + at, mask=inside, other=-1)
    length = tl.load(staged + 5 * staged_row + at, mask=decoding)
    lane = tl.load(staged + 6 * staged_row + at, mask=decoding)
    loaded = tl.load(staged + 7 * staged_row + at, mask=decoding)
    released(PDL)
    token = tl.where(source >= 0, tl.load(chosen + source, mask=source >= 0, other=0), token)
    tl.store(rows + at, token, mask=inside)
    tl.store(rows + width + at, position, mask=inside)
    tl.store(rows + 2 * width + at, slot, mask=inside)
    tl.store(rows + 3 * width + at, logit, mask=inside)
    tl.store(placed + at, length.to(tl.int32), mask=decoding)
    tl.store(placed + decodes + at, lane.to(tl.int32), mask=decoding)
    tl.store(placed + 2 * decodes + at, loaded.to(tl.int32), mask=decoding)
