"""Two pages at a time, where a KV head has at most four query heads: they fill rows 0-3 of every tile for the one page and rows
4-7 for the other, so that all that is done per row (queries, softmax, weights, sums) is done once for both.

What belongs to a page, scales for example, is read per row. Products meet one page's codes at a time; the other page's rows
come out as nonsense and count with a factor of 0. Rows 4-7 are a running softmax of their own until `fold_rows`.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import mma_v2

from forefetch.kernels.attention.gluon.codes import (
    LIMIT,
    STEPS,
    both_rows,
    channels_to_k8,
    fold_channels,
    high_low,
    join_quarters,
    row_quarters,
    stack,
    tokens_to_k8,
    unstack,
    whole,
)
from forefetch.kernels.attention.gluon.decode import decode
from forefetch.kernels.attention.gluon.half import LOWEST
from forefetch.kernels.attention.gluon.layouts import (
    A8,
    A16,
    B16,
    CHUNK,
    MMA,
    PAIR_QUERY,
    PAIR_TOKENS,
    QUERY,
    QUERY_K,
    rows_by,
    tokens_k,
)
from forefetch.kernels.attention.gluon.page import nothing, power_of_two, row_max


@gluon.jit
def per_row(vectors, LAYOUT: gl.constexpr):
    """[2, 128] in shared memory, a page each -> [8, 128]: each row's page's."""
    x = gl.expand_dims(vectors.load(gl.SliceLayout(1, LAYOUT)), 1)
    x, _ = gl.broadcast(x, gl.full([2, 4, 128], 0.0, x.dtype, LAYOUT))
    return gl.reshape(x, (8, 128))


@gluon.jit
def own_column(x):
    """[8, 8] of each row with the first page's column in columns 0-3 and the second's in 4-7 -> [8]: the row's own."""
    LAYOUT: gl.constexpr = x.type.layout
    row, column = gl.arange(0, 8, gl.SliceLayout(1, LAYOUT)), gl.arange(0, 8, gl.SliceLayout(0, LAYOUT))
    return row_max(gl.where((row // 4)[:, None] == (column // 4)[None, :], x, float("-inf")))


@gluon.jit
def _zero_part(q, zero):
    """q . zero of each row [8], both [8, 128] by channel."""
    operand, none = fold_channels(q), gl.zeros([16, 8], gl.float32, MMA)
    even, odd = gl.split(gl.permute(gl.reshape(gl.permute(zero, (1, 0)), (4, 2, 8, 2, 8)), (2, 0, 3, 4, 1)))
    first = gl.convert_layout(gl.reshape(even, (64, 8)), B16, assert_trivial=True)
    second = gl.convert_layout(gl.reshape(odd, (64, 8)), B16, assert_trivial=True)
    upper, _ = unstack(mma_v2(operand, first, none))
    _, lower = unstack(mma_v2(operand, second, none))
    sums = own_column(gl.convert_layout(upper + lower, rows_by(8), assert_trivial=True))
    return gl.convert_layout(sums, gl.SliceLayout(1, rows_by(CHUNK)), assert_trivial=True)


@gluon.jit
def pair_queries(query, rest, outliers, picked, scale, N: gl.constexpr):
    """Of two pages, K's scales and zeros [2, 256] and outliers [2, N 128] in shared memory: (scores besides the codes' part,
    four [8, 32]; operand A of the codes' part; what its products count [8])."""
    PART: gl.constexpr = rows_by(CHUNK)
    q = gl.convert_layout(both_rows(query, PAIR_QUERY), QUERY, assert_trivial=True)
    zero = gl.convert_layout(per_row(rest.slice(128, 128, dim=1), PAIR_QUERY), QUERY, assert_trivial=True)
    base = _zero_part(q, zero) * scale
    scaled = q * gl.convert_layout(per_row(rest.slice(0, 128, dim=1), PAIR_QUERY), QUERY, assert_trivial=True)
    factor = power_of_two(row_max(gl.abs(scaled)).to(gl.float32))
    factors, _ = gl.broadcast(factor.to(gl.float16)[:, None], scaled)
    high, low = high_low(_to_operand(scaled), _to_operand(factors))
    operand = stack(high, low, A8)
    unit = scale / (STEPS * gl.convert_layout(factor, gl.SliceLayout(1, PART), assert_trivial=True))
    columns = ()
    for n in gl.static_range(N):
        columns = columns + (row_quarters(per_row(outliers.slice(n * 128, 128, dim=1), PAIR_TOKENS)),)
    parts = ()
    for i in gl.static_range(4):
        part = base[:, None] + gl.zeros([8, CHUNK], gl.float32, PART)
        for n in gl.static_range(N):
            part += picked[n][:, None] * gl.convert_layout(columns[n][i], PART, assert_trivial=True).to(gl.float32)
        parts = parts + (part,)
    return parts, operand, unit


@gluon.jit
def with_products(parts, operand, codes, page, unit, table, one):
    """Four [8, 32] with `unit` [8] times the operand's products with a page's codes added, in the rows of that page."""
    PART: gl.constexpr = rows_by(CHUNK)
    own = gl.where(gl.arange(0, 8, gl.SliceLayout(1, PART)) // 4 == page, unit, 0.0)[:, None]
    added = ()
    for i in gl.static_range(4):
        levels = decode(codes, codes, i, table, one, False)
        upper, lower = unstack(mma_v2(operand, levels, gl.zeros([16, CHUNK], gl.int32, MMA)))
        added = added + (parts[i] + gl.convert_layout(whole(upper, lower), PART, assert_trivial=True) * own,)
    return added


@gluon.jit
def _to_operand(x):
    return gl.convert_layout(channels_to_k8(x), QUERY_K, assert_trivial=True)


@gluon.jit
def pair_soft(parts, top, zero):
    """`page.soft`; `zero` [2, 128] in shared memory. The sums of weights times zero [8, 8] are by column as in `own_column`."""
    zeros = row_quarters(per_row(zero, PAIR_TOKENS))
    total, first, second = nothing(), nothing(), nothing()
    weights = ()
    for i in gl.static_range(0, 4, 2):
        p, r = gl.exp2(parts[i] - top[:, None]).to(gl.float16), gl.exp2(parts[i + 1] - top[:, None]).to(gl.float16)
        operand = stack(p, r, A16)
        total = mma_v2(operand, gl.full([CHUNK, 8], 1.0, gl.float16, B16), total)
        first = mma_v2(operand, gl.convert_layout(gl.permute(zeros[i], (1, 0)), B16, assert_trivial=True), first)
        second = mma_v2(operand, gl.convert_layout(gl.permute(zeros[i + 1], (1, 0)), B16, assert_trivial=True), second)
        weights = weights + (p, r)
    upper, lower = unstack(total)
    total = gl.convert_layout(upper + lower, rows_by(8), assert_trivial=True)
    upper, _ = unstack(first)
    _, lower = unstack(second)
    return weights, total, gl.convert_layout(upper + lower, rows_by(8), assert_trivial=True)


@gluon.jit
def pair_weights(weights, scale):
    """`page.weights_operand` of both pages; `scale` [2, 128] in shared memory."""
    KS: gl.constexpr = tokens_k(CHUNK)
    scales = row_quarters(per_row(scale, PAIR_TOKENS))
    highs, lows = (), ()
    for i in gl.static_range(4):
        p = weights[i] * gl.convert_layout(scales[i], rows_by(CHUNK), assert_trivial=True)
        p = gl.convert_layout(tokens_to_k8(p, CHUNK), KS, assert_trivial=True)
        high, low = high_low(p, gl.full([8, CHUNK], LIMIT, gl.float16, KS))
        highs, lows = highs + (high,), lows + (low,)
    return stack(join_quarters(highs), join_quarters(lows), A8)


@gluon.jit
def empty_second(state):
    """The state after float16 tokens, which both halves of the rows went through: they count once."""
    top, total, sums = state
    kept = gl.arange(0, 8, gl.SliceLayout(1, rows_by(CHUNK))) < 4
    wide = gl.convert_layout(kept, gl.SliceLayout(1, rows_by(8)), assert_trivial=True)[:, None]
    emptied = ()
    for i in gl.static_range(4):
        emptied = emptied + (gl.where(kept[:, None], sums[i], 0.0),)
    return gl.where(kept, top, LOWEST), gl.where(wide, total, 0.0), emptied


@gluon.jit
def hide_second(parts):
    """Scores without those of the second page, which is not there."""
    kept = gl.arange(0, 8, gl.SliceLayout(1, rows_by(CHUNK))) < 4
    hidden = ()
    for i in gl.static_range(4):
        hidden = hidden + (gl.where(kept[:, None], parts[i], float("-inf")),)
    return hidden


@gluon.jit
def fold_rows(top, total, zero, sums):
    """Per row [8] maximum, sum of weights, sum of weights times zero, and four sums [8, 32] -> the same of both halves of the
    rows together, in every row."""
    best = _other(top, True)
    share = gl.exp2(top - best)
    folded = ()
    for i in gl.static_range(4):
        folded = folded + (_other((sums[i] + zero[:, None]) * share[:, None], False),)
    return best, _other(total * share, False), folded


@gluon.jit
def _other(x, MAX: gl.constexpr):
    """[8, ...] -> maximum or sum of rows g and g + 4, in both."""
    LAYOUT: gl.constexpr = x.type.layout
    y = gl.reshape(x, [2, 4] + x.shape[1:])
    reduced = gl.max(y, 0) if MAX else gl.sum(y, 0)
    y, _ = gl.broadcast(gl.expand_dims(reduced, 0), y)
    return gl.convert_layout(gl.reshape(y, x.shape), LAYOUT, assert_trivial=True)
