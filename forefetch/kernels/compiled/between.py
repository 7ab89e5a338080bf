"""Between two steps: names every layer's experts from the tokens just chosen, and has those copied that are missing.

While one thread hands out tokens and lays out the next batch, helpers have nothing to do. One of them takes what is known then,
through the one product of a foresight (`router_service/lookahead/foresight.py`):

    chances [T, L E] = [unit(embedding of the token), unit(residual behind the last layer)] weight + offset

From `expect` until `collect` or `abandon` the table of slots and the ring of jobs are the helper's, if it has begun: else what
nobody began is taken back. Who is not there to name is not there to copy.

Letters: T rows, H hidden, L layers with experts, E experts of each.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from numba import carray

from forefetch.kernels.compiled.ahead import SURE, begun, mark, returned, sort_likely, wish
from forefetch.kernels.compiled.atomics import add, get, put
from forefetch.kernels.compiled.copier import DONE, FREE, QUEUED, give_up, settle, waiting
from forefetch.kernels.compiled.crew import wake
from forefetch.kernels.compiled.linear import product_alone
from forefetch.kernels.compiled.maths import rms_norm
from forefetch.kernels.compiled.simd import address_of, clock_ns, floats_at
from forefetch.kernels.compiled.toolchain import compiled

WORD, ROWS, POSTED, STOP, PACE = range(5)
"""Of Seen.task: its state, as a copy's; rows; when it was made; 1: no more layers; how long such a time lasts lately, ns."""
NUMBERS = 5
SURELY, MAYBE = 0.5, 0.2
"""Chances from which missing experts are copied: of all layers those as likely as the first, then of all as the second."""
LONGEST_NS = 20_000_000
"""Longer than this nobody asked for a token; that says nothing of the time between two steps."""


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
    missed: Any  # [E] float64: the chance that no row chooses it
    named: Any  # [L] int64: how many were named
    task: Any  # [NUMBERS] int64


# ---- the engine's thread ----


@compiled()
def expect(seen, buffers, count, moving, board):
    """The step that is in `buffers` chose seen.tokens[:count]: has a helper name what the next one will need."""
    seen.behind[:count] = buffers.x[:count]
    seen.task[ROWS], seen.task[POSTED], seen.task[STOP] = count, clock_ns(), 0
    put(address_of(seen.task), QUEUED)
    add(waiting(moving.jobs), 1)
    wake(board)


@compiled()
def collect(seen, moving):
    """A step begins: the table is the engine's thread's again. Copies that nobody began are given up; what was named counts."""
    if get(address_of(seen.task)) == FREE:
        return
    settle_task(seen, moving)
    spent = clock_ns() - seen.task[POSTED]
    if spent < LONGEST_NS:
        seen.task[PACE] += (spent - seen.task[PACE]) // 8 if seen.task[PACE] else spent
    give_up(moving.jobs, moving.copies, moving.table, True)


@compiled()
def abandon(seen, moving):
    """What comes is another kind of step, or none: nothing is under way, nothing is named."""
    if get(address_of(seen.task)) != FREE:
        settle_task(seen, moving)
        give_up(moving.jobs, moving.copies, moving.table, False)
    seen.named[:] = 0
    moving.hinted[:] = False
    moving.table.predicted[:] = False


@compiled()
def settle_task(seen, moving):
    """The task is taken back, or brought to its end before its time."""
    put(address_of(seen.task) + 8 * STOP, 1)
    returned(seen.task, moving.jobs)


# ---- a helper ----


@compiled()
def help_expecting(model, seen, moving, experts, order):
    """Does the task, if nobody has begun it."""
    if seen.any and begun(seen.task, moving.jobs):
        foresee(model, seen, moving, experts, order)
        put(address_of(seen.task), DONE)


@compiled()
def foresee(model, seen, moving, experts, order):
    """Names experts of one layer after the other and offers copies, until there is no time left."""
    rows, hidden = seen.task[ROWS], model.hidden
    for row in range(rows):
        token = min(max(seen.tokens[row], 0), seen.vocabulary - 1)  # -1: a row whose model is broken, and ends
        embedded = carray(floats_at(seen.embedding + 4 * hidden * token), hidden)
        rms_norm(embedded, seen.ones, model.eps, seen.inputs[row, :hidden])
        rms_norm(seen.behind[row], seen.ones, model.eps, seen.inputs[row, hidden:])
    layers, number = experts.number.shape
    known, width = seen.inputs[:rows], layers * number
    product_alone(known, seen.weight, seen.kind, seen.chances, order, width, seen.offset)
    for least in (SURELY, MAYBE):  # all layers' likely ones before anyone's unlikely ones
        for place in range(layers):
            if get(address_of(seen.task) + 8 * STOP):
                return
            seen.missed[:] = 1.0
            for row in range(rows):
                join(seen.missed, seen.chances[row, place * number : (place + 1) * number])
            found = sort_likely(seen.missed, moving.named)
            if least == SURELY:
                seen.named[place] = found
                mark(moving, seen.missed, experts.number[place], found)
            settle(moving.jobs, moving.copies, moving.table)
            until = seen.task[POSTED] + seen.task[PACE]
            wish(moving, seen.missed, experts.number[place], place, found, least, until)


@compiled()
def join(missed, chances):
    """One row's chances [E] join in."""
    for expert in range(len(missed)):
        chance = chances[expert]
        if chance > 0:  # NaN is not
            missed[expert] *= 1.0 - min(chance, SURE)
