"""`tally.py` on a GPU: a program per layer and block of pairs."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from forefetch.kernels.pdl import early, released

BLOCK = 256


def tally(load: Tensor, chosen: Tensor, idle: Tensor) -> None:
    """See `tally`. ValueError for pairs that do not lie row by row."""
    layers, tokens, top_k = chosen.shape
    if chosen.stride(2) != 1 or chosen.stride(1) != top_k or load.stride(1) != 1:
        raise ValueError(f"pairs of strides {chosen.stride()} and counts of strides {load.stride()}")
    grid = layers, triton.cdiv(tokens * top_k, BLOCK)
    sizes = {"K": top_k, "BLOCK": BLOCK, **early(load)}
    _tally[grid](load, chosen, idle, tokens * top_k, load.stride(0), chosen.stride(0), idle.stride(0), **sizes, num_warps=4)


@triton.jit
def _tally(
    load, chosen, idle, pairs, load_row, chosen_layer, idle_row, K: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr
):  # fmt: skip
    released(PDL)
    layer, pair = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = pair < pairs
    expert = tl.load(chosen + layer * chosen_layer + pair, mask=inside, other=-1)
    counts = inside & (expert >= 0) & (tl.load(idle + pair // K * idle_row, mask=inside, other=1) == 0)
    tl.atomic_add(load + layer * load_row + expert, tl.full([BLOCK], 1, tl.int64), mask=counts, sem="relaxed")
