"""One sealed page of 128 tokens: scores of 8 heads, their weights, and the weighted values.

Nothing of K or V is ever dequantised: a key is scale * level + zero per channel and a value the same per token, so

    q . k = sum (q scale) level + q . zero + q[outlier] * outlier          p v = sum (p scale) level + sum p zero

and only integers meet the levels: `q scale` and `p scale` as whole numbers of 15 bits, split into a high and a low int8 row.
A third bit is part of the look-up in `asym3`; in `mixed` it is a product of its own over the channels that have one. `fp4`,
whose scales are finer, is in `page_half.py`.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import mma_v2

from forefetch.kernels.attention.gluon.codes import (
    LIMIT,
    STEPS,
    channels_to_k8,
    columns_of,
    fold_channels,
    fold_vector,
    high_low,
    join_quarters,
    quarters,
    stack,
    tokens_to_k8,
    unstack,
    whole,
)
from forefetch.kernels.attention.gluon.decode import decode, decode_bits, third_words
from forefetch.kernels.attention.gluon.layouts import (
    A8,
    A16,
    B8,
    B16,
    CHANNELS,
    CHUNK,
    MMA,
    QUERY,
    QUERY_K,
    TOKENS,
    rows_by,
    tokens_k,
)


@gluon.jit
def row_max(x):
    """max over the columns of [8, n]."""
    return gl.max(x, 1)


@gluon.jit
def scores(query, buffers, picked, third, table, one, scale, N: gl.constexpr, NAME: gl.constexpr):
    """Scores (base 2) of a page as four [8, 32]. `query` [8, 128] float16 in shared memory, scores per unit of it `scale` [8];
    `buffers`: K codes, scale and zero, outliers, third bits; `picked`: N of [8], scaled q[outlier]; `third`: float16 [8, 32],
    scaled queries of the channels with a third bit (`mixed`)."""
    PART: gl.constexpr = rows_by(CHUNK)
    codes, rest, outliers, thirds = buffers
    q = query.load(QUERY)
    base = zero_part(q, rest.slice(128, 128).load(CHANNELS)) * scale
    scaled = q * rest.slice(0, 128).load(gl.SliceLayout(0, QUERY))[None, :]
    factor = power_of_two(row_max(gl.abs(scaled)).to(gl.float32))
    operand = _split(_to_operand(scaled), factor)
    unit = scale / (STEPS * gl.convert_layout(factor, gl.SliceLayout(1, PART), assert_trivial=True))
    start = gl.zeros([16, CHUNK], gl.int32, MMA)
    if NAME == "mixed":
        extra, words = _split(third, factor), third_words(thirds)
        start = _lowered(extra)
    columns = outlier_columns(outliers, N)
    parts = ()
    for i in gl.static_range(4):
        acc = mma_v2(operand, decode(codes, thirds, i, table, one, NAME == "asym3"), start)
        if NAME == "mixed":
            acc = mma_v2(extra, decode_bits(words[i]), acc)
        upper, lower = unstack(acc)
        part = outlier_part(base, picked, columns, i, N)
        parts = parts + (gl.convert_layout(whole(upper, lower), PART, assert_trivial=True) * unit[:, None] + part,)
    return parts


@gluon.jit
def outlier_columns(outliers, N: gl.constexpr):
    """N outlier channels as quarters of 32 tokens."""
    columns = ()
    for n in gl.static_range(N):
        columns = columns + (quarters(outliers.slice(n * 128, 128).load(TOKENS)),)
    return columns


@gluon.jit
def outlier_part(base, picked, columns, i: gl.constexpr, N: gl.constexpr):
    """What a quarter's scores have besides the codes: `base` [8] and the outliers' share."""
    part = base[:, None]
    for n in gl.static_range(N):
        column = gl.convert_layout(columns[n][i], gl.SliceLayout(0, rows_by(CHUNK)), assert_trivial=True).to(gl.float32)
        part = picked[n][:, None] * column[None, :] + part
    return part


@gluon.jit
def _to_operand(x):
    """[8, 128] by channel -> by k of the stored keys, in registers."""
    return gl.convert_layout(channels_to_k8(x), QUERY_K, assert_trivial=True)


@gluon.jit
def _split(x, factor):
    """float16 [8, k] in the order k of an operand, times `factor` [8] at most LIMIT -> int8 operand A."""
    factor = gl.convert_layout(factor.to(gl.float16), gl.SliceLayout(1, x.type.layout), assert_trivial=True)
    factors, _ = gl.broadcast(factor[:, None], x)
    high, low = high_low(x, factors)
    return stack(high, low, A8)


@gluon.jit
def _lowered(extra):
    """Where sums start so that third bits of 0 and 2 count as -1 and +1: int32 [16, 32] with equal columns."""
    minus = mma_v2(extra, gl.full([32, 8], -1, gl.int8, B8), gl.zeros([16, 8], gl.int32, MMA))
    wide = gl.join(gl.join(minus, minus), gl.join(minus, minus))  # [16, 8, 2, 2]
    return gl.convert_layout(gl.reshape(gl.permute(wide, (0, 2, 3, 1)), (16, CHUNK)), MMA, assert_trivial=True)


@gluon.jit
def power_of_two(largest):
    """The power of two up to 2^15 (float16 holds it) that brings `largest` to between LIMIT / 2 and LIMIT."""
    exponent = (largest * (128.0 / LIMIT)).to(gl.int32, bitcast=True) >> 23
    return (gl.minimum(260 - exponent, 142) << 23).to(gl.float32, bitcast=True)


@gluon.jit
def zero_part(q, zero):
    """q . zero of each head [8]. Half of the channels are in the operand's lower rows, which would be idle."""
    operand, none = fold_channels(q), gl.zeros([16, 8], gl.float32, MMA)
    first, second = fold_vector(zero)
    upper, _ = unstack(mma_v2(operand, first, none))
    _, lower = unstack(mma_v2(operand, second, none))
    sums = row_max(gl.convert_layout(upper + lower, rows_by(8), assert_trivial=True))
    return gl.convert_layout(sums, gl.SliceLayout(1, rows_by(CHUNK)), assert_trivial=True)


@gluon.jit
def soft(parts, top, zero):
    """Scores and their maximum [8], V's zero in shared memory -> (exp2(score - top) as four float16 [8, 32]; their sum; the sum
    of them times V's zero), the sums [8, 8] with equal columns."""
    zeros = quarters(zero.load(TOKENS))
    total, first, second = nothing(), nothing(), nothing()
    weights = ()
    for i in gl.static_range(0, 4, 2):
        p, r = gl.exp2(parts[i] - top[:, None]).to(gl.float16), gl.exp2(parts[i + 1] - top[:, None]).to(gl.float16)
        operand = stack(p, r, A16)  # two quarters at once: each has its sums in its own rows
        total = mma_v2(operand, gl.full([CHUNK, 8], 1.0, gl.float16, B16), total)
        first, second = (
            mma_v2(operand, columns_of(zeros[i], CHUNK), first),
            mma_v2(operand, columns_of(zeros[i + 1], CHUNK), second),
        )
        weights = weights + (p, r)
    upper, lower = unstack(total)
    total = gl.convert_layout(upper + lower, rows_by(8), assert_trivial=True)
    upper, _ = unstack(first)
    _, lower = unstack(second)
    return weights, total, gl.convert_layout(upper + lower, rows_by(8), assert_trivial=True)


@gluon.jit
def weights_operand(weights, scale):
    """Weights of the quarters times V's scale (in shared memory) times LIMIT -> int8 operand A."""
    scales = quarters(scale.load(TOKENS))
    highs, lows = (), ()
    for i in gl.static_range(4):
        high, low = _scaled(weights[i], scales[i])
        highs, lows = highs + (high,), lows + (low,)
    return stack(join_quarters(highs), join_quarters(lows), A8)


@gluon.jit
def nothing():
    """Sums [16, 8] before anything was added."""
    return gl.zeros([16, 8], gl.float32, MMA)


@gluon.jit
def _scaled(p, scale):
    """Weights of a quarter [8, 32] times V's scale, as high and low int8 in the order of the stored values."""
    KS: gl.constexpr = tokens_k(CHUNK)
    p = p * gl.convert_layout(scale, gl.SliceLayout(0, rows_by(CHUNK)), assert_trivial=True)[None, :]
    p = gl.convert_layout(tokens_to_k8(p, CHUNK), KS, assert_trivial=True)
    return high_low(p, gl.full([8, CHUNK], LIMIT, gl.float16, KS))


@gluon.jit
def add_values(sums, operand, codes, thirds, factor, table, one, PLANE: gl.constexpr):
    """Adds `factor` [8] times the page's weighted levels to `sums`, four [8, 32] of 32 channels each."""
    PART: gl.constexpr = rows_by(CHUNK)
    unit = factor * (1.0 / (LIMIT * STEPS))
    added = ()
    for i in gl.static_range(4):
        levels = decode(codes, thirds, i, table, one, PLANE)
        upper, lower = unstack(mma_v2(operand, levels, gl.zeros([16, CHUNK], gl.int32, MMA)))
        part = gl.convert_layout(whole(upper, lower), PART, assert_trivial=True)
        added = added + (sums[i] + part * unit[:, None],)
    return added
