"""A whole decode step in one call: all layers with experts that are in this process, then norm and head."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numba import carray

from forefetch.kernels.compiled.ahead import SECOND, ask, help_naming, learn, returned
from forefetch.kernels.compiled.between import collect, help_expecting
from forefetch.kernels.compiled.copier import help_copying, waiting
from forefetch.kernels.compiled.crew import FIRST_HELPER, KIND, NEVER, TAKEN, finish, join, post, rest, shared, take, wake
from forefetch.kernels.compiled.experts import combine, expert, sort_pairs
from forefetch.kernels.compiled.layer import GATE, NOTHING, SHARED, W2, W13, WIDTH, added, attended, gate, laid_out, one_of
from forefetch.kernels.compiled.linear import PRODUCT, product, product_panel
from forefetch.kernels.compiled.maths import exp, rms_norm, silu_times
from forefetch.kernels.compiled.simd import address_of, clock_ns, floats_at
from forefetch.kernels.compiled.toolchain import compiled, entry, takes_ns
from forefetch.kernels.compiled.visit import (
    NAMED,
    STALL_NS,
    bringing,
    close_call,
    close_step,
    come_in,
    leave,
    line_up,
    open_call,
)

TIMES = 7
"""Per layer: began, attended, chosen, experts done, end, in nanoseconds of time.perf_counter_ns; distinct experts; and when its
experts had been named."""
EXPERT = 3  # beside the kinds of jobs in `layer` and `linear`


class Mlp(NamedTuple):
    """Room for MLPs that every row goes through: of dense layers, or a shared expert beside the routed ones."""

    hidden: Any  # [T, 2I], whole panels
    active: Any  # [T * I]
    out: Any  # [T, H], whole panels


class Experts(NamedTuple):
    """Where the routed experts are, and room for their pairs."""

    pool: int  # address of slot 0
    strides: Any  # [2] int64: bytes between slots, from w13 to w2
    kind: int
    number: Any  # [MoE layers, E] int64: an expert's number, which is its slot where each has one
    load: Any  # [experts] int64: pairs evaluated, counted up
    rows: Any  # [P] int64, as all that follows but the last three
    place: Any
    first: Any  # [E + 1]
    begins: Any  # [T]: T * K
    groups: Any  # [E]: the call's experts in the order of items
    slots: Any  # [E]: theirs
    hidden: Any  # [P, 2I] float32
    active: Any  # [P, I]
    result: Any  # [P, H]


@entry
@compiled()
def layers(model, tables, rows, buffers, experts, mlp, load, times, moving, heads, seen, naming, board):
    """Takes buffers.x [T, H] through all layers. tables [L, COLUMNS]; load [L, E] is counted up, times [L, TIMES] filled.

    Where experts move, `heads` name them ahead if `naming`; if not, `seen` may have done so before.
    """
    count, place = len(rows.slots), 0
    wake(board)  # takes a while, and the first layer is long enough to need them
    if moving.any:
        collect(seen, moving)
    for layer in range(len(tables)):
        table, stamps = tables[layer], times[layer]
        stamps[0] = stamps[6] = clock_ns()
        if naming and heads.tables[layer, SECOND]:
            ask(model, heads, moving, buffers, layer, place, count, board)
            stamps[6] = clock_ns()
        attended(model, table, rows, buffers, board)
        stamps[1] = clock_ns()
        if table[GATE]:
            gate(model, table, buffers, count, board)
            stamps[2] = clock_ns()
            for expert in buffers.ids[:count].ravel():
                load[layer, expert] += 1
            learn(heads, layer, stamps[2] - stamps[6])
            if moving.any:
                returned(heads.task, moving.jobs)
                if not naming:
                    moving.counts[layer, NAMED], seen.named[place] = seen.named[place], 0
            stamps[5] = routed(buffers, experts, moving, layer, place, count, board)
            place += 1
        else:
            stamps[2], stamps[5] = stamps[1], 0
            every_row(buffers, table, mlp, count, board, buffers.product)
        stamps[3] = clock_ns()
        if table[GATE] and table[SHARED]:
            share(buffers, table, mlp, count, board)
        for row in range(count):
            added(buffers.x[row], buffers.product[row], model.residual)
        stamps[4] = clock_ns()
    if moving.any:
        close_step(moving)


@compiled()
def routed(buffers, experts, moving, layer, place, count, board):
    """buffers.product = the routed experts' rows; `place`: the layer among those with experts. Returns how many there were."""
    ids, hidden = buffers.ids[:count], buffers.normed.shape[1]
    found = sort_pairs(ids, experts.number[place], experts.rows, experts.place, experts.first, moving.needs)
    needs, first, counts = moving.needs[:found], experts.first, moving.counts[layer]
    for group in range(found):
        experts.load[needs[group]] += first[group + 1] - first[group]
    if moving.any:
        began = open_call(moving, needs, first, place, count, counts)
        line_up(moving, needs, experts.groups, experts.slots)
        counts[STALL_NS] += clock_ns() - began
        counts[STALL_NS] += run(buffers, experts, moving, found, ids.size, board)
        leave(moving, experts.slots[:found])
        close_call(moving, counts)
    else:
        for group in range(found):
            experts.groups[group], experts.slots[group] = group, needs[group]
        run(buffers, experts, moving, found, ids.size, board)
    out = buffers.product[:count, :hidden]
    combine(experts.result, experts.place[: ids.size], experts.begins[:count], buffers.weights[:count].ravel(), out)
    return found


@compiled()
def run(buffers, experts, moving, items, pairs, board):
    """The first `items` of experts.groups, with so many pairs. Returns how long this thread waited for copies or
    made them."""
    bytes_each, hidden, waited = experts.strides[1] // 2 * 3, buffers.normed.shape[1], 0
    ns = takes_ns(bytes_each * items, 6 * pairs * hidden * experts.active.shape[1]) + bringing(moving, items)
    if shared(board, ns):
        post(board, EXPERT, items)
        item = take(board)
        while item >= 0:
            waited += one_expert(buffers, experts, moving, item, 0)
            finish(board)
            item = take(board)
        join(board, items)
    else:
        for number in range(items):
            waited += one_expert(buffers, experts, moving, items - 1 - number, 0)
    return waited


@compiled()
def one_expert(buffers, experts, moving, item, who):
    """The pairs of one of the experts that run, by thread `who`: 0, or 1 and its number as a helper. Returns how long the
    expert took to come in."""
    waited, first, group = 0, experts.first, experts.groups[item]
    at = experts.pool + experts.slots[item] * experts.strides[0]
    if moving.how[item]:
        at = come_in(moving, item, moving.needs[group], experts.slots[item], who)
        waited = moving.spent[item]
    scratch = experts.hidden, experts.active, experts.result
    w13, w2, pairs = at, at + experts.strides[1], (first[group], first[group + 1])
    expert(buffers.normed, experts.rows, *pairs, w13, w2, experts.kind, *scratch, buffers.order)
    return waited


@entry
@compiled()
def assist(board, number, model, buffers, experts, moving, heads, seen):
    """What a helper does until the crew is dismissed. experts, moving: None where experts are not in this process."""
    more = address_of(board) + 8 * NEVER
    if moving is not None:
        more = waiting(moving.jobs)
    while rest(board, number, more):
        if moving is not None:
            help_naming(model, heads, moving, experts, buffers.order)
            help_expecting(board, model, seen, moving, experts, buffers.order)
        item = take(board)
        while item >= 0:
            kind = board[KIND]
            if kind == PRODUCT:
                product_panel(board, item)
            elif kind == EXPERT:
                if experts is not None:
                    one_expert(buffers, experts, moving, item, 1 + number)
            else:
                table, rows = laid_out(board, model)
                one_of(model, table, rows, buffers, kind, item)
            board[FIRST_HELPER + 8 * number + TAKEN] += 1
            finish(board)
            item = take(board)
        if moving is not None:
            help_copying(moving.jobs, moving.copies)


@compiled()
def every_row(buffers, table, mlp, count, board, out):
    """out [T, H] = the MLP in the table's W13 and W2 of all rows."""
    normed, width = buffers.normed[:count], table[WIDTH]
    product(normed, table[W13], table[W13 + 1], mlp.hidden, buffers.order, 2 * width, NOTHING, board)
    active = mlp.active[: count * width].reshape(count, width)
    for row in range(count):
        silu_times(mlp.hidden[row], active[row])
    product(active, table[W2], table[W2 + 1], out, buffers.order, normed.shape[1], NOTHING, board)


@compiled(reassociate=True)
def dot(x, y):
    """Their product, a number."""
    total = np.float32(0)
    for i in range(len(x)):
        total += x[i] * y[i]
    return total


@compiled()
def share(buffers, table, mlp, count, board):
    """Adds the shared expert's rows, each times sigmoid of its own gate, to buffers.product."""
    normed, hidden, one = buffers.normed[:count], buffers.normed.shape[1], np.float32(1)
    every_row(buffers, table, mlp, count, board, mlp.out)
    weight = carray(floats_at(table[SHARED]), hidden)
    for row in range(count):
        open_by = one / (one + exp(-dot(normed[row], weight)))
        added(buffers.product[row, :hidden], mlp.out[row], open_by)


@entry
@compiled()
def head(x, which, norm, matrix, eps, normed, order, logits, vocabulary, board):
    """logits [S, V], in whole panels = final norm (an address) of rows `which` [S] of x, times the packed head."""
    weight = carray(floats_at(norm), x.shape[1])
    for row in range(len(which)):
        rms_norm(x[which[row]], weight, eps, normed[row])
    product(normed[: len(which)], matrix[0], matrix[1], logits, order, vocabulary, NOTHING, board)
