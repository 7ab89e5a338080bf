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
    along,
    channels_to_k8,
    crossed,
    fold_channels,
    fold_vector,
    high_low,
    join_quarters,
    quarters,
    stack,
    summed_vectors,
    tokens_to_k8,
    unstack,
    whole,
)
from forefetch.kernels.attention.gluon.decode import decode, decode_bits, third_words
from forefetch.kernels.attention.gluon.layouts import (
    A8,
    A16,
    B8,
    CHUNK,
    FOLDED,
    MMA,
    PAIRS,
    QUERY,
    QUERY_K,
    SUMMED,
    TOKENS,
    rows_by,
    tokens_k,
)


@gluon.jit
def row_max(x):
    """max over the columns of [8, n]."""
    return gl.max(x, 1)


@gluon.jit
def scores(query, buffers, picked, third, table, one, scale, top, N: gl.constexpr, NAME: gl.constexpr):
    """Scores (base 2) of a page less `top` [8], as four [8, 32]. `query` [8, 128] float16 in shared memory, scores per unit of
    it `scale` [8]; `buffers`: K codes, scale and zero, outliers, third bits; `picked`: N of [8], scaled q[outlier]; `third`:
    float16 [8, 32], scaled queries of the channels with a third bit (`mixed`)."""
    PART: gl.constexpr = rows_by(CHUNK)
    codes, rest, outliers, thirds = buffers
    q = query.load(QUERY)
    base = along(zero_part(q, rest.slice(128, 128).load(FOLDED)) * _by_pairs(scale) - _by_pairs(top))
    scaled = q * rest.slice(0, 128).load(gl.SliceLayout(0, QUERY))[None, :]
    factor = power_of_two(_largest(gl.abs(scaled)))
    operand = _split(_to_operand(scaled), factor)
    unit = scale * (inverse(gl.convert_layout(factor, gl.SliceLayout(1, PART), assert_trivial=True)) * (1.0 / STEPS))
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
def _by_pairs(x):
    """[8] -> [8, 1] that meets PAIRS."""
    return gl.convert_layout(x, gl.SliceLayout(1, PAIRS), assert_trivial=True)[:, None]


@gluon.jit
def outlier_columns(outliers, N: gl.constexpr):
    """N outlier channels as quarters of 32 tokens."""
    columns = ()
    for n in gl.static_range(N):
        columns = columns + (quarters(outliers.slice(n * 128, 128).load(TOKENS)),)
    return columns


@gluon.jit
def outlier_part(base, picked, columns, i: gl.constexpr, N: gl.constexpr):
    """What a quarter's scores have besides the codes: `base` [8, 32] and the outliers' share."""
    part = base
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
def inverse(power):
    """1 / a power of two."""
    return ((254 << 23) - power.to(gl.int32, bitcast=True)).to(gl.float32, bitcast=True)


@gluon.jit
def reciprocal(x):
    """1 / x, within 1 ulp; 1 / 0 is infinite."""
    return gl.inline_asm_elementwise("rcp.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=gl.float32, is_pure=True, pack=1)


@gluon.jit
def to_limit(largest):
    """(A float16 number, at most 2^15, that brings `largest` to just below LIMIT; its inverse), float32."""
    factor = gl.minimum(reciprocal(largest * (1.0 / (LIMIT - 0.1))), 32768.0).to(gl.float16).to(gl.float32)
    return factor, reciprocal(factor)


@gluon.jit
def zero_part(q, zero):
    """q . zero of each head [8, 4] with equal columns. Half of the channels are in the operand's lower rows, which would be
    idle; their zeros are in the odd columns."""
    return crossed(mma_v2(fold_channels(q), fold_vector(zero), gl.zeros([16, 8], gl.float32, MMA)))


@gluon.jit
def weigh(parts):
    """Scores less the reference -> (weights as four float16 [8, 32]; the largest of each head [8]; of all, the bits of a
    float32)."""
    weights = _weight(parts[0]), _weight(parts[1]), _weight(parts[2]), _weight(parts[3])
    most = gl.maximum(gl.maximum(weights[0], weights[1]), gl.maximum(weights[2], weights[3]))
    most = gl.permute(gl.reshape(most, (8, 4, 4, 2)), (0, 2, 1, 3))
    most = gl.convert_layout(_halved(_halved(_halved(gl.reshape(most, (8, 4, 8))))), PAIRS, assert_trivial=True).to(gl.float32)
    largest = gl.convert_layout(row_max(most), gl.SliceLayout(1, rows_by(CHUNK)), assert_trivial=True)
    return weights, largest, gl.max(gl.reshape(most.to(gl.int32, bitcast=True), (32,)), 0)


@gluon.jit
def _weight(score):
    return gl.exp2(score).to(gl.float16)


@gluon.jit
def _halved(x):
    """Maxima of neighbours in the last dimension, which registers hold: a tree where a reduction would be a chain."""
    n: gl.constexpr = x.shape[len(x.shape) - 1]
    if n == 2:
        a, b = gl.split(x)
    else:
        a, b = gl.split(gl.permute(gl.reshape(x, (x.shape[0], x.shape[1], 2, n // 2)), (0, 1, 3, 2)))
    return gl.maximum(a, b)


@gluon.jit
def _largest(x):
    """[8, 128] in QUERY -> maxima of the rows, float32."""
    x = _halved(_halved(_halved(_halved(gl.reshape(x, (8, 4, 32))))))  # [8, 4, 2]
    return row_max(gl.reshape(x, (8, 8))).to(gl.float32)


@gluon.jit
def add_weights(sums, weights, zeros):
    """Adds weights times V's zero (even columns) and weights (odd ones) to `sums` [8, 4]; `zeros` [256] in shared memory: V's
    zero and ones."""
    total = gl.zeros([16, 8], gl.float32, MMA)
    lower, upper = summed_vectors(zeros.load(SUMMED))
    total = mma_v2(stack(weights[0], weights[1], A16), lower, total)  # two quarters at once: each has its own rows
    return sums + crossed(mma_v2(stack(weights[2], weights[3], A16), upper, total))


@gluon.jit
def weights_operand(weights, scale, factor):
    """Weights of the quarters times V's scale (in shared memory) times `factor` [8] -> int8 operand A."""
    scales = quarters(scale.load(TOKENS))
    highs, lows = (), ()
    for i in gl.static_range(4):
        high, low = _scaled(weights[i], scales[i], factor)
        highs, lows = highs + (high,), lows + (low,)
    return stack(join_quarters(highs), join_quarters(lows), A8)


@gluon.jit
def _scaled(p, scale, factor):
    """Weights of a quarter [8, 32] times V's scale and `factor` [8], as high and low int8 in the order of the stored values."""
    KS: gl.constexpr = tokens_k(CHUNK)
    p = p * gl.convert_layout(scale, gl.SliceLayout(0, rows_by(CHUNK)), assert_trivial=True)[None, :]
    p = gl.convert_layout(tokens_to_k8(p, CHUNK), KS, assert_trivial=True)
    factor = gl.convert_layout(factor.to(gl.float16), gl.SliceLayout(1, KS), assert_trivial=True)
    factors, _ = gl.broadcast(factor[:, None], p)
    return high_low(p, factors)


@gluon.jit
def add_values(sums, operand, codes, thirds, factor, table, one, PLANE: gl.constexpr):
    """Adds `factor` [8] times the page's weighted levels to `sums`, four [8, 32] of 32 channels each."""
    PART: gl.constexpr = rows_by(CHUNK)
    unit = factor * (1.0 / STEPS)
    added = ()
    for i in gl.static_range(4):
        levels = decode(codes, thirds, i, table, one, PLANE)
        upper, lower = unstack(mma_v2(operand, levels, gl.zeros([16, CHUNK], gl.int32, MMA)))
        part = gl.convert_layout(whole(upper, lower), PART, assert_trivial=True)
        added = added + (sums[i] + part * unit[:, None],)
    return added
