"""`sealed_plan.py` in one launch."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from forefetch.kernels.attention.sealed import SealedPlan
from forefetch.kernels.attention.sealed_plan import Placed
from forefetch.kernels.kv_codec.formats import KvFormat
from forefetch.kernels.pdl import early, released

BLOCK = 64


def place_sealed(table: Tensor, lengths: Tensor, held: Tensor, format: KvFormat, lanes: int, rows: int) -> Placed:
    """See `sealed_plan`. ValueError for lists that are not contiguous."""
    count, device = len(lengths), lengths.device
    if lengths.stride(0) != 1 or held.stride(1) != 1:
        raise ValueError(f"lengths {lengths.stride()} and held {held.stride()} must lie row by row")
    numbers = torch.empty((4, triton.cdiv(count, 4) * 4), dtype=torch.int32, device=device)[:, :count]  # lists at 16 bytes
    places = torch.empty(rows, dtype=torch.int64, device=device)
    sizes = {"RECENT": format.recent, "PAGE": format.page, "TAIL": format.tail_tokens, "BLOCK": BLOCK, **early(lengths)}
    _place[(triton.cdiv(rows, BLOCK),)](
        lengths, held, numbers, places, count, rows, lanes, held.stride(0), numbers.stride(0), **sizes, num_warps=2
    )
    return Placed(SealedPlan(table, numbers[0], numbers[1], numbers[2]), places, numbers[3])


@triton.jit
def _place(
    lengths, held, numbers, places, count, rows, lanes, held_row, row,
    RECENT: tl.constexpr, PAGE: tl.constexpr, TAIL: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    released(PDL)
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mine = at < count
    length = tl.load(lengths + at, mask=mine, other=0)
    lane = tl.load(held + at, mask=mine, other=0)
    loaded = tl.load(held + held_row + at, mask=mine, other=0)
    position = tl.maximum(length - 1, 0)
    sealed = tl.maximum(tl.maximum(position - RECENT, 0) // PAGE, loaded)
    tail = tl.where(length > 0, lane, lanes)
    tl.store(numbers + at, sealed, mask=mine)
    tl.store(numbers + row + at, tl.maximum(length, 1), mask=mine)
    tl.store(numbers + 2 * row + at, tail, mask=mine)
    tl.store(numbers + 3 * row + at, position, mask=mine)
    decoding = tail.to(tl.int64) * TAIL + position - sealed * PAGE
    behind = (lanes + 1).to(tl.int64) * TAIL + at - count
    tl.store(places + at, tl.where(mine, decoding, behind), mask=at < rows)
