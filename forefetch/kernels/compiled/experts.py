"""The routed experts' MLP over (row, expert) pairs, compiled: see `kernels/grouped_mlp` for what it means.

Each weight is read once per call. A pair's result lies in a place that follows from the call and nothing computes across pairs,
so it has the same bits in whichever slot its expert sits, beside whichever pairs, in whichever wave.

Letters: N rows, H hidden, P pairs, I expert width, G experts with pairs.
"""

from __future__ import annotations

import numpy as np
from numba import prange

from forefetch.kernels.compiled.linear import BFLOAT16, matrix_times
from forefetch.kernels.compiled.maths import silu_times
from forefetch.kernels.compiled.simd import address_of
from forefetch.kernels.compiled.toolchain import compiled, entry, worth_splitting


@compiled()
def expert(x, rows, begin, end, w13, w2, kind, hidden, active, result, count):
    """The pairs begin .. end of one expert, whose matrices are at the addresses w13 [H, 2I] and w2 [I, H]."""
    size, inputs, width = 2 if kind == BFLOAT16 else 4, x.shape[1], active.shape[1]
    hidden[begin:end] = 0
    result[begin:end] = 0
    columns = 2 * width
    ldx, to = 4 * inputs, address_of(hidden[begin:])
    matrix_times(address_of(x), ldx, rows[begin:end], w13, size * columns, kind, inputs, columns, to, 4 * columns)
    for pair in range(begin, end):
        silu_times(hidden[pair], active[pair])
    ldx, to = 4 * width, address_of(result[begin:])
    matrix_times(address_of(active[begin:]), ldx, count[: end - begin], w2, size * inputs, kind, width, inputs, to, 4 * inputs)


@compiled(parallel=True)
def _split(x, rows, first, groups, slots, pool, strides, kind, hidden, active, result, count):
    for index in prange(len(groups)):
        i = np.int64(index)
        group, at = groups[i], pool + slots[i] * strides[0]
        expert(x, rows, first[group], first[group + 1], at, at + strides[1], kind, hidden, active, result, count)


@compiled()
def evaluate(x, rows, first, groups, slots, pool, strides, kind, hidden, active, result, count, threads):
    """result [P, H] of the pairs first[g] .. first[g + 1] for g in `groups`, with the experts in the `slots` beside them.

    x [N, H] float32; rows [P] int64 of x; pool: address of slot 0; strides: bytes between slots and from w13 to w2; hidden
    [P, 2I], active [P, I]: scratch; count: 0, 1, 2, ... as long as the largest group. threads: None if there is never more than
    one; then the loop for several is not compiled.
    """
    bytes_each = strides[1] // 2 * 3
    pairs = 0
    for group in groups:
        pairs += first[group + 1] - first[group]
    if (
        threads is not None
        and threads > 1
        and worth_splitting(bytes_each * len(groups), 6 * pairs * x.shape[1] * active.shape[1])
    ):
        _split(x, rows, first, groups, slots, pool, strides, kind, hidden, active, result, count)
        return
    for i in range(len(groups)):
        group, at = groups[i], pool + slots[i] * strides[0]
        expert(x, rows, first[group], first[group + 1], at, at + strides[1], kind, hidden, active, result, count)


evaluate_call = entry(evaluate)


@compiled()
def combine(result, place, first, weight, out):
    """out [N, H] = each row's weighted sum of result over its pairs place[first[n]] .. place[first[n + 1]], in that order."""
    for row in range(len(out)):
        total = out[row]
        total[:] = 0
        end = first[row + 1] if row + 1 < len(first) else len(place)
        for pair in range(first[row], end):
            factor, part = weight[pair], result[place[pair]]
            for i in range(len(total)):
                total[i] += factor * part[i]


combine_call = entry(combine)


@compiled()
def sort_pairs(ids, number, rows, place, first, numbers):
    """ids [N, K] of experts -> pairs in ascending order of experts, within one in row order. Returns the experts with pairs, G.

    number [E]: an expert's number. Fills rows [P], place [P] (row after row: where a pair has come to lie), first [E + 1] (of
    each of the G: where its pairs begin; then P) and numbers [E] (of the G).
    """
    columns, counts = ids.shape[1], np.zeros(len(number), np.int64)
    for one in ids.ravel():
        counts[one] += 1
    found, begun = 0, 0
    for one in range(len(number)):
        size = counts[one]
        counts[one] = begun  # from here on: where its next pair goes
        if size:
            first[found], numbers[found] = begun, number[one]
            found += 1
            begun += size
    first[found] = begun
    for pair in range(ids.size):
        row = pair // columns
        at = counts[ids[row, pair - row * columns]]
        counts[ids[row, pair - row * columns]] = at + 1
        rows[at], place[pair] = row, at
    return found
