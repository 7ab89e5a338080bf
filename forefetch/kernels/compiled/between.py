"""Between two steps: names every layer's experts from the tokens just chosen, and has those copied that are missing.

While one thread hands out tokens and lays out the next batch, helpers have nothing to do. One of them takes what is known then,
through the one product of a foresight (`router_service/lookahead/foresight.py`):

    chances [T, L E] = [unit(embedding of the token), unit(residual behind the last layer)] weight + offset

All experts of all layers then stand in one order, by how likely some row of the next step chooses them. From its top missing
ones come in, from its bottom others go, until the two are as good as each other or the step begins. A victim goes when its copy
is next, so what there was no time for has cost nobody a slot.

From `expect` until `collect` or `abandon` the table of slots and the ring of jobs are the helper's, if it has begun: else what
nobody began is taken back. Who is not there to name is not there to copy. The task is given back for the length of each copy,
so that the engine's thread waits for none.

Letters: T rows, H hidden, L layers with experts, E experts of each.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numba import carray

from forefetch.kernels.compiled.ahead import FLOOR, SURE, begun, returned
from forefetch.kernels.compiled.atomics import add, get, put
from forefetch.kernels.compiled.copier import DONE, FREE, QUEUED, WAITING, give_up, offer, pending, settle, waiting
from forefetch.kernels.compiled.crew import HELPERS, wake
from forefetch.kernels.compiled.linear import product_alone
from forefetch.kernels.compiled.maths import assign, rms_norm
from forefetch.kernels.compiled.simd import address_of, floats_at
from forefetch.kernels.compiled.slots import FREE as EMPTY
from forefetch.kernels.compiled.slots import NOWHERE, evict, gap_of, place, seat, usually
from forefetch.kernels.compiled.toolchain import compiled, entry

WORD, ROWS, STOP, RANKED, LIKELY, UNLIKELY = range(6)
"""Of Seen.task: its state, as a copy's; rows; 1: no more; whether the order is known; how far its two ends have been used."""
NUMBERS = 6
USUAL = 0.3
"""How much of an expert's worth is how often it is needed, beside its chance in the next step."""
GAIN = 0.3
"""By so much an expert must be worth more than another to come in its place (both chosen on recorded traces)."""
BUCKETS = 128


class Seen(NamedTuple):
    """A foresight, and room. `any` False: there is none, and all else is empty."""

    any: bool
    weight: int  # address of the packed matrix [2H, L E]
    kind: Any  # of its elements
    offset: int  # address, as the next
    embedding: int  # [V, H] float32
    vocabulary: int  # V
    ones: Any  # [H] float32
    tokens: Any  # [T] int64
    behind: Any  # [T, H] float32: residuals behind the last layer
    inputs: Any  # [T, 2H]
    chances: Any  # [T, L E], whole panels
    worth: Any  # [L E] float64, of experts by number
    order: Any  # [L E] int64: experts, the least worth first
    named: Any  # [L] int64: how many were named
    task: Any  # [NUMBERS] int64


# ---- the engine's thread ----


@entry
@compiled()
def expect(task, behind, x, count, copies, board):
    """The step that left residuals x [count, H] chose Seen.tokens: has a helper name what the next one will need.

    Few arguments, since each array takes its time to be handed over. task, behind: Seen's; copies: the numbers of Jobs.
    """
    for row in range(count):
        assign(behind[row], x[row])
    task[ROWS], task[STOP], task[RANKED] = count, 0, 0
    put(address_of(task), QUEUED)
    add(address_of(copies) + 8 * WAITING, 1)
    wake(board)


@compiled()
def collect(seen, moving):
    """A step begins: the table is the engine's thread's again. Copies that nobody began are given up; what was named counts."""
    if get(address_of(seen.task)) == FREE:
        return
    settle_task(seen, moving)
    give_up(moving.jobs, moving.copies, moving.table, True)


@entry
@compiled()
def abandon(seen, moving):
    """What comes is another kind of step, or none: nothing is under way, nothing is named."""
    if get(address_of(seen.task)) != FREE:
        settle_task(seen, moving)
        give_up(moving.jobs, moving.copies, moving.table, False)
        for expert in range(len(moving.hinted)):
            moving.table.gap[expert] = gap_of(moving.table, usually(moving.table, expert))
    seen.named[:] = 0
    moving.hinted[:] = False


@compiled()
def settle_task(seen, moving):
    """The task is taken back, or brought to its end before its time."""
    put(address_of(seen.task) + 8 * STOP, 1)
    returned(seen.task, moving.jobs)


# ---- a helper ----


@compiled()
def help_expecting(board, model, seen, moving, experts, order):
    """Does the next piece of the task, if nobody is at it: the naming, then a copy for each helper."""
    if not (seen.any and begun(seen.task, moving.jobs)):
        return
    if not seen.task[RANKED]:
        foresee(model, seen, moving, experts, order)
    settle(moving.jobs, moving.copies, moving.table)
    more, stop = True, address_of(seen.task) + 8 * STOP
    while more and not get(stop) and pending(moving.jobs) < board[HELPERS]:
        more = exchange(seen, moving)
    if more and not get(stop):
        add(waiting(moving.jobs), 1)
        put(address_of(seen.task), QUEUED)
    else:
        put(address_of(seen.task), DONE)


@compiled()
def foresee(model, seen, moving, experts, order):
    """Names experts of all layers and puts them in order."""
    rows, hidden, task = seen.task[ROWS], model.hidden, seen.task
    for row in range(rows):
        token = min(max(seen.tokens[row], 0), seen.vocabulary - 1)  # -1: a row whose model is broken, and ends
        embedded = carray(floats_at(seen.embedding + 4 * hidden * token), hidden)
        rms_norm(embedded, seen.ones, model.eps, seen.inputs[row, :hidden])
        rms_norm(seen.behind[row], seen.ones, model.eps, seen.inputs[row, hidden:])
    layers, number = experts.number.shape
    product_alone(seen.inputs[:rows], seen.weight, seen.kind, seen.chances, order, layers * number, seen.offset)
    for layer in range(layers):
        seen.named[layer] = 0
        for one in range(number):
            chance = chance_of(seen.chances[:rows, layer * number + one])
            expert = experts.number[layer, one]
            value(seen, moving, expert, chance)
            if chance >= FLOOR:
                moving.hinted[expert] = True
                seen.named[layer] += 1
    sort(seen.worth, seen.order)
    task[RANKED], task[LIKELY], task[UNLIKELY] = 1, len(seen.order), 0


@compiled()
def chance_of(chances):
    """That any row chooses an expert, of each row's chance [T]."""
    missed = 1.0
    for chance in chances:
        if chance > 0:  # NaN is not
            missed *= 1.0 - min(chance, SURE)
    return 1.0 - missed


@compiled()
def value(seen, moving, expert, chance):
    """An expert's worth, and until its layer is called when it is expected to be needed: by its chance then, or as usual."""
    usual = usually(moving.table, expert)
    seen.worth[expert] = chance + USUAL * usual
    moving.table.gap[expert] = (1.0 - chance) * (moving.table.layers + gap_of(moving.table, usual))


@compiled()
def sort(worth, order):
    """order [n] = places of worth [n], from 0 to 1 + USUAL, the least first; equals of a bucket as they stand."""
    begins = np.zeros(BUCKETS + 1, np.int64)
    for one in range(len(worth)):
        begins[bucket(worth[one]) + 1] += 1
    for at in range(BUCKETS):
        begins[at + 1] += begins[at]
    for one in range(len(worth)):
        at = bucket(worth[one])
        order[begins[at]] = one
        begins[at] += 1


@compiled()
def bucket(worth):
    """Which one of BUCKETS."""
    return min(int(worth * (BUCKETS / (1.0 + USUAL))), BUCKETS - 1)


@compiled()
def exchange(seen, moving):
    """Offers a copy of the missing expert that is worth most, in place of the one worth least. False: none is worth it."""
    table, order, task = moving.table, seen.order, seen.task
    while task[LIKELY] > 0 and table.slot_of[order[task[LIKELY] - 1]] != NOWHERE:
        task[LIKELY] -= 1
    if task[LIKELY] == 0:
        return False
    expert = order[task[LIKELY] - 1]
    if table.numbers[EMPTY]:
        slot = place(table, expert, 0.0, False)
    else:
        slot = least_worth(seen, table, expert)
        if slot == NOWHERE:
            return False
        evict(table, slot)
        seat(table, expert, slot)
    offer(moving.jobs, expert, slot)
    return True


@compiled()
def least_worth(seen, table, expert):
    """The slot of the expert whose place this one may take; NOWHERE: there is none."""
    order, task, own = seen.order, seen.task, table.layer_of[expert]
    while task[UNLIKELY] < task[LIKELY]:
        other = order[task[UNLIKELY]]
        if seen.worth[expert] - seen.worth[other] < GAIN:
            return NOWHERE
        task[UNLIKELY] += 1
        slot, layer = table.slot_of[other], table.layer_of[other]
        if slot != NOWHERE and table.ready[slot] and not table.pins[slot] and (table.held[layer] > table.floor or layer == own):
            return slot
    return NOWHERE
