"""Which expert has which pairs, found on the device: pairs -> units.

A pair p = token * K + k is one (token, expert). A *unit* is an expert with up to M of its pairs, written as a record of
HEADER + M words: slot, number of pairs, HEADER - 2 unused, the pairs. An expert with more pairs has several units, side by
side. Pairs with an expert < 0, or with one whose slot is < 0, belong to no unit; `live` says so to whoever sums.

Which pairs share a unit, and in what order, may differ from run to run, because atomics hand out the places. Results may not:
no product mixes pairs, and a token's sum runs over its pairs in their own order.
"""

from __future__ import annotations

import triton
import triton.language as tl

from forefetch.kernels.gate.triton import top_k

HEADER = tl.constexpr(8)


@triton.jit
def route(
    x, ids, weights, logits, slot_of, x_half, counts, ranks, live, records, totals, ready,
    tokens, x_row, logits_row,
    E: tl.constexpr, K: tl.constexpr, EP: tl.constexpr, M: tl.constexpr, H: tl.constexpr,
    BLOCK: tl.constexpr, PAIRS: tl.constexpr, READY: tl.constexpr,
    CHOOSE: tl.constexpr, RENORMALISE: tl.constexpr, CONVERT: tl.constexpr, FINISH: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Counts each expert's pairs; with FINISH the last program to arrive also forms the units.

    CHOOSE: a program per token finds its experts from `logits` and writes ids and weights; otherwise programs take BLOCK pairs
    each from `ids`. CONVERT: a program per token also leaves its row of x in float16 as the int4 kernels want it.
    counts [EP] and totals [1] are zero before and, with FINISH, after.
    """
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    program = tl.program_id(0)
    if CONVERT:
        _convert(x + program.to(tl.int64) * x_row, x_half + program * H, H)
    if CHOOSE:
        expert = tl.arange(0, EP)
        chosen, place, weight = top_k(logits + program.to(tl.int64) * logits_row, E, K, EP, RENORMALISE)
        pair = program * K + place
        tl.store(ids + pair, expert, mask=chosen)
        tl.store(weights + pair, weight, mask=chosen)
    else:
        place = tl.arange(0, BLOCK)
        pair = program * (K if CONVERT else BLOCK) + place
        chosen = pair < tokens * K
        if CONVERT:
            chosen = chosen & (place < K)
        expert = tl.load(ids + pair, mask=chosen, other=-1).to(tl.int32)
        chosen = chosen & (expert >= 0) & (expert < E)
    rank = tl.atomic_add(counts + expert, 1, mask=chosen, sem="relaxed")
    tl.store(ranks + pair, rank, mask=chosen)
    if FINISH:
        tl.debug_barrier()
        arrived = tl.atomic_add(totals + 1, 1, sem="acq_rel")
        if arrived == tl.num_programs(0) - 1:
            _group(ids, slot_of, counts, ranks, live, records, totals, tokens * K, 0, True, E, EP, M, PAIRS)
            tl.debug_barrier()
            tl.store(counts + tl.arange(0, EP), tl.zeros([EP], tl.int32))
            tl.store(ready + tl.arange(0, READY), tl.zeros([READY], tl.int32))
            tl.store(totals + 1, 0)


@triton.jit
def group(
    ids, slot_of, counts, ranks, live, records, totals, pairs,
    E: tl.constexpr, EP: tl.constexpr, M: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Forms the units after `route` without FINISH, BLOCK pairs a program."""
    program = tl.program_id(0)
    _group(ids, slot_of, counts, ranks, live, records, totals, pairs, program * BLOCK, program == 0, E, EP, M, BLOCK)


@triton.jit
def _group(
    ids, slot_of, counts, ranks, live, records, totals, pairs, begin, headers,
    E: tl.constexpr, EP: tl.constexpr, M: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Pairs begin .. begin + BLOCK into their units, and, if asked, all units' headers and their number."""
    WORDS: tl.constexpr = HEADER + M
    expert = tl.arange(0, EP)
    count = tl.load(counts + expert, cache_modifier=".cg")
    slot = tl.load(slot_of + expert, mask=expert < E, other=-1)
    units = tl.where(slot >= 0, (count + M - 1) // M, 0)
    first = tl.cumsum(units, 0) - units
    if headers:
        tl.store(totals, tl.sum(units, 0))
        for unit in range(0, tl.max(units, 0)):
            record = records + (first + unit) * WORDS
            tl.store(record, slot, mask=unit < units)
            tl.store(record + 1, tl.minimum(count - unit * M, M), mask=unit < units)
    pair = begin + tl.arange(0, BLOCK)
    mine = tl.load(ids + pair, mask=pair < pairs, other=-1, cache_modifier=".cg").to(tl.int32)
    rank = tl.load(ranks + pair, mask=pair < pairs, other=0, cache_modifier=".cg")
    known = (mine >= 0) & (mine < E)
    safe = tl.where(known, mine, 0)
    held = known & (tl.gather(slot, safe, 0) >= 0)
    unit = tl.gather(first, safe, 0) + rank // M
    tl.store(records + unit * WORDS + HEADER + rank % M, pair, mask=held)
    tl.store(live + pair, held.to(tl.int32), mask=pair < pairs)


@triton.jit
def _convert(x, x_half, H: tl.constexpr):
    """A row in float16; inputs with bit 1 set are divided by 16, as `mma.py` explains. H is a multiple of 128."""
    for begin in range(0, H, 128):
        k = begin + tl.arange(0, 128)
        value = tl.load(x + k).to(tl.float32)
        tl.store(x_half + k, tl.where((k & 2) == 0, value, value * 0.0625).to(tl.float16))


@triton.jit
def combine(y, weights, live, out, out_row, K: tl.constexpr, H: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr):
    """out [T, H] = each token's weighted sum of its pairs' rows of y [T * K, H] float32, in the pairs' order."""
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    token, column = tl.program_id(0), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros([BLOCK], tl.float32)
    for k in tl.static_range(K):
        pair = token * K + k
        held = tl.load(live + pair) != 0
        weight = tl.load(weights + pair)
        row = tl.load(y + pair.to(tl.int64) * H + column, mask=held & (column < H), other=0.0)
        total += tl.where(held, weight * row, 0.0)
    tl.store(out + token.to(tl.int64) * out_row + column, total, mask=column < H)
