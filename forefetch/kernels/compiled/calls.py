"""A worker's whole call in one call from Python: pairs are checked and sorted, experts evaluated, rows summed.

Between two layers a worker sleeps, and whatever it runs next finds cold caches: a dozen small numpy calls took longer there
than the products. The sums are those of `experts.combine`: a row's pairs in the order in which they came.

Letters: N rows, H hidden, P pairs, E experts of the model, S slots.
"""

from __future__ import annotations

import numpy as np

from forefetch.kernels.compiled.experts import evaluate
from forefetch.kernels.compiled.toolchain import compiled, entry

NONSENSE = -1
"""Some pair names a row or an expert that is not here, or has a weight that is not finite. Nothing was done."""


@compiled()
def _slots_of(row, expert, weight, number, rows, which):
    """Fills which [P] with the slots that pairs need. False for NONSENSE."""
    for pair in range(len(row)):
        slot = number[min(max(np.int64(expert[pair]) + 1, 0), len(number) - 1)]
        if slot < 0 or row[pair] < 0 or row[pair] >= rows or not np.isfinite(weight[pair]):
            return False
        which[pair] = slot
    return True


@entry
@compiled()
def answer(x, row, expert, weight, number, load, pool, strides, kind, width, threads, out):
    """Fills out [N, H] from x [N, H], both float32; returns how many experts were needed, or NONSENSE.

    row, expert int32 and weight float32 [P]; number [E + 2] int32: expert e's slot at e + 1, negative for what is not here;
    load [S] int64 counts pairs by slot; pool, strides, kind, threads: see `evaluate`; width: the experts'.
    """
    pairs = len(row)
    which = np.empty(pairs, np.int64)
    if not _slots_of(row, expert, weight, number, len(x), which):
        return NONSENSE
    out[:] = 0
    if pairs == 0:
        return 0
    base = which.min()
    at = np.zeros(which.max() - base + 1, np.int64)  # pairs of a slot, then where its next pair goes
    for slot in which:
        at[slot - base] += 1
    slots, first = np.empty(pairs, np.int64), np.empty(pairs + 1, np.int64)
    found = begun = 0
    for index in range(len(at)):
        size = at[index]
        at[index] = begun
        if size:
            slots[found], first[found] = base + index, begun
            load[base + index] += size
            found, begun = found + 1, begun + size
    first[found] = begun
    rows, place = np.empty(pairs, np.int64), np.empty(pairs, np.int64)
    for pair in range(pairs):
        slot = which[pair] - base
        rows[at[slot]], place[pair] = row[pair], at[slot]
        at[slot] += 1
    hidden, active = np.empty((pairs, 2 * width), np.float32), np.empty((pairs, width), np.float32)
    result, count = np.empty((pairs, x.shape[1]), np.float32), np.arange(pairs)
    evaluate(x, rows, first, np.arange(found), slots[:found], pool, strides, kind, hidden, active, result, count, threads)
    for pair in range(pairs):
        factor, part, total = weight[pair], result[place[pair]], out[row[pair]]
        for i in range(len(total)):
            total[i] += factor * part[i]
    return found
