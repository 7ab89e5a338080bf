"""One sealed page of 128 tokens: scores of 8 heads, their weights, and the weighted values.

Nothing of K or V is ever dequantised: a key is scale * level + zero per channel and a value the same per token, so

    q . k = sum (q scale) level + q . zero + q[outlier] * outlier          p v = sum (p scale) level + sum p zero

and only integers meet the levels: `q scale` and `p scale` as whole numbers of 15 bits, split into a high and a low int8 row.
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
    decode,
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
from forefetch.kernels.attention.gluon.layouts import (
    A8,
    A16,
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

WORDS = gl.constexpr(256)  # decoded at a time: 32 tokens or channels


@gluon.jit
def row_max(x):
    """max over the columns of [8, n]."""
    return gl.max(x, 1)


@gluon.jit
def scores(query, k_codes, k_scale_zero, outliers, picked, table, one, scale, N: gl.constexpr):
    """Scores (base 2) of a page as four [8, 32]. `query` [8, 128] float16 in shared memory, scores per unit of it `scale` [8];
    `picked`: N of [8], scaled q[outlier]."""
    PART: gl.constexpr = rows_by(CHUNK)
    q = query.load(QUERY)
    rest = _zero_part(q, k_scale_zero.slice(128, 128).load(CHANNELS)) * scale
    scaled = q * k_scale_zero.slice(0, 128).load(gl.SliceLayout(0, QUERY))[None, :]
    factor = _power_of_two(row_max(gl.abs(scaled)).to(gl.float32))
    factors, _ = gl.broadcast(factor.to(gl.float16)[:, None], scaled)
    high, low = high_low(_to_operand(scaled), _to_operand(factors))
    operand = stack(high, low, A8)
    unit = scale / (STEPS * gl.convert_layout(factor, gl.SliceLayout(1, PART), assert_trivial=True))
    columns = ()
    for n in gl.static_range(N):
        columns = columns + (quarters(outliers.slice(n * 128, 128).load(TOKENS)),)
    parts = ()
    for i in gl.static_range(4):
        levels = decode(k_codes, i, WORDS, table, one)
        upper, lower = unstack(mma_v2(operand, levels, gl.zeros([16, CHUNK], gl.int32, MMA)))
        part = rest[:, None]
        for n in gl.static_range(N):
            column = gl.convert_layout(columns[n][i], gl.SliceLayout(0, PART), assert_trivial=True).to(gl.float32)
            part = picked[n][:, None] * column[None, :] + part
        parts = parts + (gl.convert_layout(whole(upper, lower), PART, assert_trivial=True) * unit[:, None] + part,)
    return parts


@gluon.jit
def _to_operand(x):
    """[8, 128] by channel -> by k of the stored keys, in registers."""
    return gl.convert_layout(channels_to_k8(x), QUERY_K, assert_trivial=True)


@gluon.jit
def _power_of_two(largest):
    """The power of two up to 2^15 (float16 holds it) that brings `largest` to between LIMIT / 2 and LIMIT."""
    exponent = (largest * (128.0 / LIMIT)).to(gl.int32, bitcast=True) >> 23
    return (gl.minimum(260 - exponent, 142) << 23).to(gl.float32, bitcast=True)


@gluon.jit
def _zero_part(q, zero):
    """q . zero of each head [8]. Half of the channels are in the operand's lower rows, which would be idle."""
    operand, none = fold_channels(q), gl.zeros([16, 8], gl.float32, MMA)
    first, second = fold_vector(zero)
    upper, _ = unstack(mma_v2(operand, first, none))
    _, lower = unstack(mma_v2(operand, second, none))
    sums = row_max(gl.convert_layout(upper + lower, rows_by(8), assert_trivial=True))
    return gl.convert_layout(sums, gl.SliceLayout(1, rows_by(CHUNK)), assert_trivial=True)


@gluon.jit
def weights(parts, top, v_scale_zero):
    """Scores and their maximum [8] -> (int8 operand A of LIMIT exp2(score - top) times V's scale; sum of exp2; sum of exp2
    times V's zero), the sums [8, 8] with equal columns."""
    scales, zeros = quarters(v_scale_zero.slice(0, 128).load(TOKENS)), quarters(v_scale_zero.slice(128, 128).load(TOKENS))
    total, first, second = _nothing(), _nothing(), _nothing()
    highs, lows = (), ()
    for i in gl.static_range(0, 4, 2):
        p, r = gl.exp2(parts[i] - top[:, None]).to(gl.float16), gl.exp2(parts[i + 1] - top[:, None]).to(gl.float16)
        operand = stack(p, r, A16)  # two quarters at once: each has its sums in its own rows
        total = mma_v2(operand, gl.full([CHUNK, 8], 1.0, gl.float16, B16), total)
        first, second = (
            mma_v2(operand, columns_of(zeros[i], CHUNK), first),
            mma_v2(operand, columns_of(zeros[i + 1], CHUNK), second),
        )
        high, low = _scaled(p, scales[i])
        highs, lows = highs + (high,), lows + (low,)
        high, low = _scaled(r, scales[i + 1])
        highs, lows = highs + (high,), lows + (low,)
    upper, lower = unstack(total)
    total = gl.convert_layout(upper + lower, rows_by(8), assert_trivial=True)
    upper, _ = unstack(first)
    _, lower = unstack(second)
    return (
        stack(join_quarters(highs), join_quarters(lows), A8),
        total,
        gl.convert_layout(upper + lower, rows_by(8), assert_trivial=True),
    )


@gluon.jit
def _nothing():
    return gl.zeros([16, 8], gl.float32, MMA)


@gluon.jit
def _scaled(p, scale):
    """Weights of a quarter [8, 32] times V's scale, as high and low int8 in the order of the stored values."""
    KS: gl.constexpr = tokens_k(CHUNK)
    p = p * gl.convert_layout(scale, gl.SliceLayout(0, rows_by(CHUNK)), assert_trivial=True)[None, :]
    p = gl.convert_layout(tokens_to_k8(p, CHUNK), KS, assert_trivial=True)
    return high_low(p, gl.full([8, CHUNK], LIMIT, gl.float16, KS))


@gluon.jit
def add_values(sums, operand, v_codes, factor, table, one):
    """Adds `factor` [8] times the page's weighted levels to `sums`, four [8, 32] of 32 channels each."""
    PART: gl.constexpr = rows_by(CHUNK)
    unit = factor * (1.0 / (LIMIT * STEPS))
    added = ()
    for i in gl.static_range(4):
        levels = decode(v_codes, i, WORDS, table, one)
        upper, lower = unstack(mma_v2(operand, levels, gl.zeros([16, CHUNK], gl.int32, MMA)))
        part = gl.convert_layout(whole(upper, lower), PART, assert_trivial=True)
        added = added + (sums[i] + part * unit[:, None],)
    return added
