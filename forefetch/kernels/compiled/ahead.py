"""Names a layer's experts from the residual that enters it, and has those copied that are missing while its attention runs.

That is a helper's to do, beside the attention. Until the engine's thread asks for the outcome, the table of slots and the ring
of jobs are the helper's. A task that none has begun by then is taken back: who is not there to name is not there to copy.

A refining head (`router_service/lookahead/heads.py`) is one product, and with a correction a second, small one:

    both = unit(x) second + offset                [T, E + C]    the layer's own gate; what the correction sees
    logits = both[E part] + silu(both[C part]) up

Letters: T rows, H hidden, E experts, C columns of the correction, M named experts of a row.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from forefetch.kernels.compiled.atomics import add, get, give_way, put, replace
from forefetch.kernels.compiled.copier import DONE, EACH_NS, FREE, QUEUED, TAKEN, offer, pending, waiting
from forefetch.kernels.compiled.crew import YIELD_NS, wake
from forefetch.kernels.compiled.layer import NOTHING
from forefetch.kernels.compiled.linear import product_alone
from forefetch.kernels.compiled.maths import assign, exp, rms_norm
from forefetch.kernels.compiled.simd import address_of, clock_ns
from forefetch.kernels.compiled.slots import NOWHERE, calls_until, place
from forefetch.kernels.compiled.toolchain import compiled
from forefetch.kernels.compiled.visit import NAMED

SECOND, SECOND_KIND, UP, UP_KIND, OFFSET, WIDTH = range(6)
"""Columns of Heads.tables: two packed matrices, the offset's address, C; a layer without a head has zeros."""
COLUMNS = 6
FLOOR, PREDICTED, SURE = 0.1, 0.5, 1.0 - 1e-9  # as router_service/forecast.py and expert_worker/prefetch.py have them
MOST_ROWS = 64
NEWEST = 0.25  # share of the newest attention in its mean time
WORD, LAYER, PLACE, ROWS, POSTED = range(5)
"""Of Heads.task: its state, as a copy's; the layer, its place among those with experts; rows; when it was made."""
NUMBERS = 5


class Heads(NamedTuple):
    """Refining heads of all layers, and room."""

    tables: Any  # [L, COLUMNS] int64
    scale: Any  # [L] float32: what makes probabilities of leads, as shift
    shift: Any
    pace: Any  # [L] float64: ns of the layer's attention lately, 0: not known
    named: int  # M
    ones: Any  # [H] float32
    normed: Any  # [T, H]
    both: Any  # [T, E + C], whole panels
    seen: Any  # [T * C]
    logits: Any  # [T, E], whole panels
    missed: Any  # [E] float64: the chance that no row chooses it
    best: Any  # [M] int64
    taken: Any  # [E] bool
    task: Any  # [NUMBERS] int64


@compiled()
def ask(model, heads, moving, buffers, layer, place_of_layer, count, board):
    """Has a helper name what `layer` will probably choose for the `count` rows in buffers.x."""
    rows, task, jobs = min(count, MOST_ROWS), heads.task, moving.jobs
    for row in range(rows):  # buffers.x changes under who names
        rms_norm(buffers.x[row], heads.ones, model.eps, heads.normed[row])
    task[LAYER], task[PLACE], task[ROWS], task[POSTED] = layer, place_of_layer, rows, clock_ns()
    put(address_of(task), QUEUED)
    add(waiting(jobs), 1)
    wake(board)


@compiled()
def begun(task, jobs):
    """Whether a task, whose first word is its state, is the caller's to do now."""
    if not replace(address_of(task), QUEUED, TAKEN):
        return False
    add(waiting(jobs), -1)
    return True


@compiled()
def returned(task, jobs):
    """Takes a task back, or waits until its piece under way is done: who made it has it again."""
    at = address_of(task)
    if get(at) != FREE:
        began = clock_ns()
        while get(at) != DONE and not begun(task, jobs):
            if clock_ns() - began > YIELD_NS:
                give_way()
    put(at, FREE)


@compiled()
def help_naming(model, heads, moving, experts, order):
    """A helper's: does the task, if nobody has begun it."""
    if begun(heads.task, moving.jobs):
        name(model, heads, moving, experts, order)
        put(address_of(heads.task), DONE)


@compiled()
def name(model, heads, moving, experts, order):
    """Does the task: names experts and offers copies."""
    layer, place_of_layer, rows = heads.task[LAYER], heads.task[PLACE], heads.task[ROWS]
    rank(model, heads, order, layer, rows)
    heads.missed[:] = 1.0
    for row in range(rows):
        add_row(heads, heads.logits[row, : model.experts], model.top_k, heads.scale[layer], heads.shift[layer])
    found = sort_likely(heads.missed, moving.named)
    moving.counts[layer, NAMED] = found
    number, until = experts.number[place_of_layer], heads.task[POSTED] + heads.pace[layer]
    mark(moving, heads.missed, number, found)
    wish(moving, heads.missed, number, place_of_layer, found, until)


@compiled()
def rank(model, heads, order, layer, rows):
    """heads.logits of the layer's gate, estimated from heads.normed."""
    table, experts = heads.tables[layer], model.experts
    normed, width = heads.normed[:rows], table[WIDTH]
    product_alone(normed, table[SECOND], table[SECOND_KIND], heads.both, order, experts + width, table[OFFSET])
    if not width:
        for row in range(rows):
            assign(heads.logits[row, :experts], heads.both[row, :experts])
        return
    seen = heads.seen[: rows * width].reshape(rows, width)
    for row in range(rows):
        for i in range(width):
            value = heads.both[row, experts + i]
            seen[row, i] = value / (np.float32(1) + exp(-value))
    product_alone(seen, table[UP], table[UP_KIND], heads.logits, order, experts, NOTHING)
    for row in range(rows):
        for i in range(experts):
            heads.logits[row, i] += heads.both[row, i]


@compiled()
def add_row(heads, logits, top_k, scale, shift):
    """One row's best experts, each with a probability by its lead over the row's threshold, join in heads.missed."""
    best, taken = heads.best, heads.taken
    taken[:] = False
    for m in range(len(best)):
        leader = -1
        for expert in range(len(logits)):
            if not taken[expert] and (leader < 0 or logits[expert] > logits[leader]):
                leader = expert
        taken[leader], best[m] = True, leader
    last = min(top_k, len(best) - 1)
    edge = np.float32(0.5) * (logits[best[top_k - 1]] + logits[best[last]])
    for m in range(len(best)):
        chance = 1.0 / (1.0 + exp(-((logits[best[m]] - edge) * scale + shift)))
        if chance > 0:  # NaN is not
            heads.missed[best[m]] *= 1.0 - min(chance, SURE)


@compiled()
def sort_likely(missed, names):
    """names = experts that some row chooses with FLOOR or more, likeliest first; how many there are."""
    found = 0
    for expert in range(len(missed)):
        if 1.0 - missed[expert] >= FLOOR:
            at = found
            while at and missed[names[at - 1]] > missed[expert]:
                names[at] = names[at - 1]
                at -= 1
            names[at] = expert
            found += 1
    return found


@compiled()
def mark(moving, missed, number, found):
    """Keeps in mind which of a layer's experts, of these numbers, were named, and which are needed more likely than not."""
    for i in range(found):
        expert = number[moving.named[i]]
        moving.hinted[expert] = True
        moving.table.predicted[expert] = 1.0 - missed[moving.named[i]] >= PREDICTED


@compiled()
def wish(moving, missed, number, place_of_layer, found, until):
    """Has missing ones of those named copied: as many as there is time for until then, none in place of what is needed
    sooner."""
    table, jobs = moving.table, moving.jobs
    each, left = jobs.numbers[EACH_NS], until - clock_ns()
    for i in range(found):
        expert, chance = number[moving.named[i]], 1.0 - missed[moving.named[i]]
        if table.slot_of[expert] != NOWHERE:
            continue
        before = pending(jobs)
        if (before + 1) * each > left or before == len(jobs.word):
            break
        slot = place(table, expert, calls_until(table, place_of_layer, chance), False)
        if slot != NOWHERE:
            offer(jobs, expert, slot)


@compiled()
def learn(heads, layer, ns):
    """The layer's attention took so long."""
    before = heads.pace[layer]
    heads.pace[layer] = before + NEWEST * (ns - before) if before else ns
