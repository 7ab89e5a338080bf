"""What a decode step does in a layer before the experts: norm, QKV, rotation, cache, attention, output projection, gate.

Every row has a request of its own. Letters: T rows, H hidden, Hq / Hkv query / KV heads, G = Hq / Hkv, D head dim, E experts, K
top-k, L visible positions, R tokens of a page.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numba import carray

from forefetch.kernels.compiled.crew import STEP, finish, join, post, shared, take
from forefetch.kernels.compiled.linear import FLOAT32, matrix_times, product
from forefetch.kernels.compiled.maths import assign, exp, rms_norm, softmax
from forefetch.kernels.compiled.simd import LANES, address_of, dots, floats_at, longs_at
from forefetch.kernels.compiled.toolchain import compiled, entry, takes_ns

_dots14, _dots24, _dots11, _dots21 = dots(1, 4), dots(2, 4), dots(1, 1), dots(2, 1)

# Columns of a layer's row in the table of addresses; 0 where there is nothing; WIDTH is a number. A packed matrix has its kind
# in the next column.
INPUT_NORM, POST_NORM, Q_NORM, K_NORM, QKV_BIAS, O_BIAS, K_POOL, V_POOL, SHARED, WIDTH = range(10)
QKV, OUTPUT, GATE, W13, W2 = range(10, 20, 2)
COLUMNS = 20
NOTHING = np.int64(0)
ENTER, ATTEND = 1, 2  # kinds of a crew's jobs
NO_NORM, HEAD_NORM, FULL_NORM = 0, 1, 2


class Model(NamedTuple):
    """Sizes and rules."""

    hidden: int
    heads: int
    kv_heads: int
    dim: int
    experts: int
    top_k: int
    page: int
    pages: int  # of a layer's pool
    norm: int
    over_chosen: bool  # gate weights sum to one over the chosen experts
    eps: Any  # np.float32, as all that follows
    scale: Any
    residual: Any
    clip: Any  # infinite: none


class Rows(NamedTuple):
    """The step's rows."""

    slots: Any  # [T] int64: page * R + offset
    lengths: Any  # [T] int64
    pages: Any  # [T, P] int64
    cos: Any  # [T, D] float32
    sin: Any


class Buffers(NamedTuple):
    """Room for T rows; columns of products are whole panels."""

    x: Any  # [T, H]
    normed: Any  # [T, H]
    qkv: Any
    attended: Any  # [T, Hq D]
    product: Any  # [T, H]
    logits: Any  # [T, E]
    ids: Any  # [T, K] int64
    weights: Any  # [T, K] float32
    order: Any  # 0, 1, 2, ...: rows in order


@compiled()
def lay_out(board, table, rows):
    """Tells helpers of a layer's addresses and the step's rows."""
    words = board[STEP:]
    words[0], words[1], words[2], words[3] = (
        address_of(table),
        len(rows.slots),
        address_of(rows.slots),
        address_of(rows.lengths),
    )
    words[4], words[5], words[6], words[7] = (
        address_of(rows.pages),
        rows.pages.shape[1],
        address_of(rows.cos),
        address_of(rows.sin),
    )


@compiled()
def laid_out(board, model):
    """(table, rows) as `lay_out` told them."""
    words = board[STEP:]
    count, dim = words[1], model.dim
    rows = Rows(
        carray(longs_at(words[2]), count),
        carray(longs_at(words[3]), count),
        carray(longs_at(words[4]), (count, words[5])),
        carray(floats_at(words[6]), (count, dim)),
        carray(floats_at(words[7]), (count, dim)),
    )
    return carray(longs_at(words[0]), COLUMNS), rows


@compiled()
def attended(model, table, rows, buffers, board):
    """buffers.x = the residual behind attention, buffers.normed = what comes next reads."""
    hidden, inner = model.hidden, model.heads * model.dim
    count = len(rows.slots)
    x, normed = buffers.x[:count], buffers.normed[:count]
    weight = carray(floats_at(table[INPUT_NORM]), hidden)
    for row in range(count):
        rms_norm(x[row], weight, model.eps, normed[row])
    wide = inner + 2 * model.kv_heads * model.dim
    product(normed, table[QKV], table[QKV + 1], buffers.qkv, buffers.order, wide, table[QKV_BIAS], board)
    lay_out(board, table, rows)
    in_turn(model, table, rows, buffers, board, ENTER, count, 2000 * count)
    seen = 0
    for length in rows.lengths:
        seen += length
    ns = takes_ns(8 * seen * model.kv_heads * model.dim, 4 * seen * model.heads * model.dim)
    in_turn(model, table, rows, buffers, board, ATTEND, count * model.kv_heads, ns)
    matrix, kind, bias = table[OUTPUT], table[OUTPUT + 1], table[O_BIAS]
    product(buffers.attended[:count], matrix, kind, buffers.product, buffers.order, hidden, bias, board)
    weight = carray(floats_at(table[POST_NORM]), hidden)
    for row in range(count):
        added(x[row], buffers.product[row], model.residual)
        rms_norm(x[row], weight, model.eps, normed[row])


attended_call = entry(attended)


@compiled()
def added(x, y, factor):
    """x += factor * y, as long as x is."""
    for i in range(len(x)):
        x[i] += factor * y[i]


@compiled()
def enter(model, table, qkv, slot, cos, sin):
    """One row of the QKV product: norms, rotation, K and V to the cache."""
    dim, inner, kept = model.dim, model.heads * model.dim, model.kv_heads * model.dim
    if model.norm == FULL_NORM:
        rms_norm(qkv[:inner], carray(floats_at(table[Q_NORM]), inner), model.eps, qkv[:inner])
        rms_norm(qkv[inner : inner + kept], carray(floats_at(table[K_NORM]), kept), model.eps, qkv[inner : inner + kept])
    if np.isfinite(model.clip):
        for i in range(inner + 2 * kept):
            value = qkv[i]
            value = -model.clip if value < -model.clip else value
            qkv[i] = model.clip if value > model.clip else value
    for head in range(model.heads + model.kv_heads):
        part = qkv[head * dim : (head + 1) * dim]
        if model.norm == HEAD_NORM:
            rms_norm(part, carray(floats_at(table[Q_NORM if head < model.heads else K_NORM]), dim), model.eps, part)
        rotate(part, cos, sin)
    for head in range(model.kv_heads):
        at = 4 * dim * (head * model.pages * model.page + slot)
        begin = inner + head * dim
        assign(carray(floats_at(table[K_POOL] + at), dim), qkv[begin : begin + dim])
        assign(carray(floats_at(table[V_POOL] + at), dim), qkv[begin + kept : begin + kept + dim])


@compiled()
def rotate(x, cos, sin):
    """One head [D], in place."""
    half = len(x) // 2
    for i in range(half):
        low, high = x[i], x[i + half]
        x[i] = low * cos[i] - high * sin[i]
        x[i + half] = high * cos[i + half] + low * sin[i + half]


@compiled()
def in_turn(model, table, rows, buffers, board, kind, items, ns):
    """ENTER or ATTEND of all rows, alone or with helpers; `ns`: what it takes one thread, about."""
    if shared(board, ns):
        post(board, kind, items)
        item = take(board)
        while item >= 0:
            one_of(model, table, rows, buffers, kind, item)
            finish(board)
            item = take(board)
        join(board, items)
    else:
        for item in range(items):
            one_of(model, table, rows, buffers, kind, item)


@compiled()
def one_of(model, table, rows, buffers, kind, item):
    """A row that enters the cache, or the queries of one that read one KV head."""
    if kind == ENTER:
        enter(model, table, buffers.qkv[item], rows.slots[item], rows.cos[item], rows.sin[item])
    else:
        attend(model, table, rows, buffers, item)


@compiled()
def attend(model, table, rows, buffers, item):
    """The queries of one row that read one KV head."""
    row, head, group, dim = item // model.kv_heads, item % model.kv_heads, model.heads // model.kv_heads, model.dim
    length, stride = rows.lengths[row], 4 * model.dim
    begin, page_bytes = head * group * dim, model.page * stride
    q, out = address_of(buffers.qkv[row, begin:]), address_of(buffers.attended[row, begin:])
    scores, order = np.empty((group, length), np.float32), buffers.order[:group]
    at = 4 * dim * head * model.pages * model.page
    for first in range(0, length, model.page):
        keys = table[K_POOL] + at + rows.pages[row, first // model.page] * page_bytes
        score(q, keys, stride, dim, group, min(model.page, length - first), scores, first)
    for g in range(group):
        line = scores[g]
        for i in range(length):
            line[i] *= model.scale
        factor = softmax(line)
        for i in range(length):
            line[i] *= factor
    buffers.attended[row, begin : begin + group * dim] = 0
    for first in range(0, length, model.page):
        values = table[V_POOL] + at + rows.pages[row, first // model.page] * page_bytes
        count, weights = min(model.page, length - first), address_of(scores) + 4 * first
        matrix_times(weights, 4 * length, order, values, stride, FLOAT32, count, dim, out, stride)


@compiled()
def score(q, keys, stride, dim, group, count, scores, first):
    """scores [G, first .. first + count] = each query's product with each key of one page."""
    vectors, base, line = dim // LANES, address_of(scores), 4 * scores.shape[1]
    for g in range(0, group, 2):
        to, query = base + g * line + 4 * first, q + g * stride
        pair, key = g + 1 < group, 0
        while key < count:
            k, o = keys + key * stride, to + 4 * key
            if key + 4 <= count:
                if pair:
                    _dots24((query, query + stride), k, stride, vectors, (o, o + line))
                else:
                    _dots14((query,), k, stride, vectors, (o,))
                key += 4
            else:
                if pair:
                    _dots21((query, query + stride), k, stride, vectors, (o, o + line))
                else:
                    _dots11((query,), k, stride, vectors, (o,))
                key += 1
    if vectors * LANES < dim:
        for g in range(group):
            query = carray(floats_at(q + g * stride), dim)
            for j in range(count):
                key_row = carray(floats_at(keys + j * stride), dim)
                for d in range(vectors * LANES, dim):
                    scores[g, first + j] += query[d] * key_row[d]


@compiled()
def gate(model, table, buffers, count, board):
    """buffers.ids and weights of the first `count` rows, from buffers.normed."""
    x, out = buffers.normed[:count], buffers.logits
    product(x, table[GATE], table[GATE + 1], out, buffers.order, model.experts, NOTHING, board)
    taken = np.empty(model.experts, np.bool_)
    for row in range(count):
        choose(out[row, : model.experts], taken, model.over_chosen, buffers.ids[row], buffers.weights[row])


gate_call = entry(gate)


@compiled()
def choose(logits, taken, over_chosen, ids, weights):
    """The best K of a row's logits [E], best first, ties by lower index; ids stay distinct whatever the logits are."""
    taken[:] = False
    for k in range(len(ids)):
        best = -1
        for expert in range(len(logits)):
            if not taken[expert] and (best < 0 or logits[expert] > logits[best]):
                best = expert
        taken[best] = True
        ids[k] = best
    top, total = logits[ids[0]], np.float32(0)
    for expert in range(len(logits)):
        if taken[expert] or not over_chosen:
            total += exp(logits[expert] - top)
    for k in range(len(ids)):
        weights[k] = exp(logits[ids[k]] - top) / total
