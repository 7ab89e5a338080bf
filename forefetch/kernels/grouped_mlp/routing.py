"""Which expert has which pairs, found on the device.

A pair p = token * K + k is one (token, expert). `place` writes each pair into its expert's row of a table, and the kernels that
follow cut those rows into *units*: an expert and up to M of its pairs. A unit has no record; whoever works on it finds it from
the experts' counts (`unit_of`), which is cheaper than waiting for somebody to write it down. Pairs with an expert < 0, or
with one whose slot is < 0, are in no row, and `live` says so to `combine`.

Atomics hand out the places in a row, so which pairs share a unit may differ from run to run. Results do not: no product mixes
pairs, and a token's sum runs over its pairs in their own order.
"""

from __future__ import annotations

import triton
import triton.language as tl

from forefetch.kernels.gate.triton import top_k


@triton.jit
def place(
    x, ids, weights, logits, slot_of, x_half, counts, table, live, pairs, room, x_row, logits_row,
    E: tl.constexpr, K: tl.constexpr, EP: tl.constexpr, H: tl.constexpr, HP: tl.constexpr, BLOCK: tl.constexpr,
    CHOOSE: tl.constexpr, RENORMALISE: tl.constexpr, CONVERT: tl.constexpr, DIVIDE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """table [E, room] gets each expert's pairs, counts [E] (zero before) how many; live [P] whether a pair is in it.

    CHOOSE: a program per token finds its experts from `logits` and writes ids and weights; else programs take BLOCK pairs each
    from `ids`, which are a token's own with CONVERT. CONVERT leaves x in float16; DIVIDE, as the int4 kernels want it: inputs
    with bit 1 set divided by 16 (`mma.py`).
    """
    if PDL:
        tl.extra.cuda.gdc_wait()
    program = tl.program_id(0)
    k = tl.arange(0, HP)
    if CONVERT:  # on its way while experts are chosen
        value = tl.load(x + program.to(tl.int64) * x_row + k, mask=k < H, other=0.0)
    if CHOOSE:
        expert = tl.arange(0, EP)
        chosen, rank, weight = top_k(logits + program.to(tl.int64) * logits_row, E, K, EP, RENORMALISE)
        pair = program * K + rank
        tl.store(ids + pair, expert, mask=chosen)
        tl.store(weights + pair, weight, mask=chosen)
    else:
        lane = tl.arange(0, BLOCK)
        pair = program * (K if CONVERT else BLOCK) + lane
        chosen = (pair < pairs) & ((lane < K) | (not CONVERT))
        expert = tl.load(ids + pair, mask=chosen, other=-1).to(tl.int32)
    known = chosen & (expert >= 0) & (expert < E)
    slot = tl.load(slot_of + expert, mask=known, other=-1)
    held = known & (slot >= 0)
    at = tl.atomic_add(counts + expert, 1, mask=held, sem="relaxed")
    if CONVERT:
        value = value.to(tl.float32)
        if DIVIDE:
            value = tl.where((k & 2) == 0, value, value * 0.0625)
        tl.store(x_half + program * H + k, value.to(tl.float16), mask=k < H)
    tl.store(live + pair, held.to(tl.int32), mask=chosen)
    tl.store(table + expert * room + at, pair, mask=held)
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()


@triton.jit
def unit_of(number, counts, table, room, E: tl.constexpr, EP: tl.constexpr, M: tl.constexpr):
    """Unit `number`, counted through the experts -> its expert (E if there are fewer), its pairs [M], which are filled."""
    e = tl.arange(0, EP)
    count = tl.load(counts + e, mask=e < E, other=0)
    units = (count + M - 1) // M
    first = tl.cumsum(units, 0) - units
    mine = (first <= number) & (number < first + units)
    expert = tl.min(tl.where(mine, e, E), 0)
    begin = (number - tl.sum(tl.where(mine, first, 0), 0)) * M
    lane = tl.arange(0, M)
    filled = begin + lane < tl.sum(tl.where(mine, count, 0), 0)
    return expert, tl.load(table + expert * room + begin + lane, mask=filled, other=0), filled


@triton.jit
def combine(
    y, weights, live, out, counts, ready, out_row,
    K: tl.constexpr, H: tl.constexpr, BLOCK: tl.constexpr, CLEAR: tl.constexpr, READY: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """out [T, H] = each token's weighted sum of its pairs' rows of y [T * K, H] float32, in the pairs' order.

    The last kernel of a layer, so it also leaves the counters (CLEAR and READY of them) at zero for the next. `live` and
    `weights` were there before the kernel that this one depends on let it start.
    """
    token, column = tl.program_id(0), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    scales = ()
    for k in tl.static_range(K):
        scales += ((tl.load(live + token * K + k) != 0, tl.load(weights + token * K + k)),)  # type: ignore[assignment]
    if PDL:
        tl.extra.cuda.gdc_wait()
    if (token == 0) & (tl.program_id(1) == 0):
        tl.store(counts + tl.arange(0, CLEAR), tl.zeros([CLEAR], tl.int32))
        tl.store(ready + tl.arange(0, READY), tl.zeros([READY], tl.int32))
    total = tl.zeros([BLOCK], tl.float32)
    for k in tl.static_range(K):
        held, weight = scales[k]  # type: ignore[var-annotated]
        row = tl.load(y + (token * K + k).to(tl.int64) * H + column, mask=(column < H) & held, other=0.0)
        total += tl.where(held, weight * row, 0.0)
    tl.store(out + token.to(tl.int64) * out_row + column, total, mask=column < H)
