"""A whole decode step in one call: all layers with experts that are in this process, each in its slot, then norm and head."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numba import carray

from forefetch.kernels.compiled.crew import KIND, finish, join, post, rest, shared, take
from forefetch.kernels.compiled.experts import combine, expert, sort_pairs
from forefetch.kernels.compiled.layer import GATE, NOTHING, SHARED, W2, W13, WIDTH, added, attended, gate, laid_out, one_of
from forefetch.kernels.compiled.linear import PRODUCT, product, product_panel
from forefetch.kernels.compiled.maths import exp, rms_norm, silu_times
from forefetch.kernels.compiled.simd import clock_ns, floats_at
from forefetch.kernels.compiled.toolchain import compiled, takes_ns

TIMES = 6
"""Per layer: began, attended, chosen, experts done, end, in nanoseconds of time.perf_counter_ns; distinct experts."""
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
    number: Any  # [MoE layers, E] int64: slots
    load: Any  # [slots] int64: pairs evaluated, counted up
    rows: Any  # [P] int64, as all that follows but the last three
    place: Any
    first: Any  # [E + 1]
    begins: Any  # [T]: T * K
    slots: Any  # [E]
    hidden: Any  # [P, 2I] float32
    active: Any  # [P, I]
    result: Any  # [P, H]


@compiled()
def layers(model, tables, rows, buffers, experts, mlp, load, times, board):
    """Takes buffers.x [T, H] through all layers. tables [L, COLUMNS]; load [L, E] is counted up, times [L, TIMES] filled."""
    count, place = len(rows.slots), 0
    for layer in range(len(tables)):
        table, stamps = tables[layer], times[layer]
        stamps[0] = clock_ns()
        attended(model, table, rows, buffers, board)
        stamps[1] = clock_ns()
        if table[GATE]:
            gate(model, table, buffers, count, board)
            stamps[2] = clock_ns()
            for expert in buffers.ids[:count].ravel():
                load[layer, expert] += 1
            stamps[5] = routed(buffers, experts, place, count, board)
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


@compiled()
def routed(buffers, experts, place, count, board):
    """buffers.product = the routed experts' rows; `place`: the layer among those with experts. Returns how many there were."""
    ids, normed = buffers.ids[:count], buffers.normed[:count]
    found = sort_pairs(ids, experts.number[place], experts.rows, experts.place, experts.first, experts.slots)
    slots, first = experts.slots[:found], experts.first
    for group in range(found):
        experts.load[slots[group]] += first[group + 1] - first[group]
    bytes_each = experts.strides[1] // 2 * 3
    if shared(board, takes_ns(bytes_each * found, 6 * ids.size * normed.shape[1] * experts.active.shape[1])):
        post(board, EXPERT, found)
        group = take(board)
        while group >= 0:
            one_expert(buffers, experts, group)
            finish(board)
            group = take(board)
        join(board, found)
    else:
        for group in range(found):
            one_expert(buffers, experts, group)
    out = buffers.product[:count, : normed.shape[1]]
    combine(experts.result, experts.place[: ids.size], experts.begins[:count], buffers.weights[:count].ravel(), out)
    return found


@compiled()
def one_expert(buffers, experts, group):
    """The pairs of one of the experts that `sort_pairs` found."""
    at, first = experts.pool + experts.slots[group] * experts.strides[0], experts.first
    scratch = experts.hidden, experts.active, experts.result
    w13, w2, pairs = at, at + experts.strides[1], (first[group], first[group + 1])
    expert(buffers.normed, experts.rows, *pairs, w13, w2, experts.kind, *scratch, buffers.order)


@compiled()
def assist(board, number, model, buffers, experts):
    """What a helper does until the crew is dismissed. experts: None where they are not in this process."""
    while rest(board, number):
        item = take(board)
        while item >= 0:
            kind = board[KIND]
            if kind == PRODUCT:
                product_panel(board, item)
            elif kind == EXPERT:
                if experts is not None:
                    one_expert(buffers, experts, item)
            else:
                table, rows = laid_out(board, model)
                one_of(model, table, rows, buffers, kind, item)
            finish(board)
            item = take(board)


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


@compiled()
def head(x, which, norm, matrix, eps, normed, order, logits, vocabulary, board):
    """logits [S, V], in whole panels = final norm (an address) of rows `which` [S] of x, times the packed head."""
    weight = carray(floats_at(norm), x.shape[1])
    for row in range(len(which)):
        rms_norm(x[which[row]], weight, eps, normed[row])
    product(normed[: len(which)], matrix[0], matrix[1], logits, order, vocabulary, NOTHING, board)
