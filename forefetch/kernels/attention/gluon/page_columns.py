"""`page.py` with heads as columns, for at most four heads per KV head: a product's 8 columns are 4 heads, high and low part."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import mma_v2

from forefetch.kernels.attention.gluon.codes import LIMIT, STEPS, channels_to_k8, channels_to_k16, join_quarters, unstack
from forefetch.kernels.attention.gluon.columns import (
    as_rows,
    column_chunks,
    columns,
    down,
    each_twice,
    every_second,
    joined,
    part_of_lane,
    token_vector,
    turned_parts,
)
from forefetch.kernels.attention.gluon.decode import decode, decode_bits, third_words
from forefetch.kernels.attention.gluon.half_columns import per_row
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
    TWICE_QUERY,
    by_column,
    channels_k16,
)
from forefetch.kernels.attention.gluon.page import power_of_two, row_max


@gluon.jit
def column_max(x):
    """max over the rows of [n, W]."""
    return gl.max(x, 0)


@gluon.jit
def zero_columns(q, zero, W: gl.constexpr):
    """q . zero of each head [32, W] with equal rows; q [8, 128] and zero [128] by channel."""
    operand = gl.permute(gl.convert_layout(channels_to_k16(q), channels_k16(), assert_trivial=True), (1, 0))
    row = gl.reshape(gl.permute(gl.reshape(zero, (4, 4, 2, 2, 2)), (1, 2, 3, 0, 4)), (128,))  # as `channels_to_k16`
    row = gl.expand_dims(gl.convert_layout(row, gl.SliceLayout(0, A16), assert_trivial=True), 0)
    rows, _ = gl.broadcast(row, gl.full([16, 128], 0.0, gl.float16, A16))
    acc = mma_v2(rows, gl.convert_layout(operand, B16, assert_trivial=True), gl.zeros([16, 8], gl.float32, MMA))
    upper, _ = unstack(acc)
    return down(columns(upper, W))


@gluon.jit
def outlier_columns(picked, outliers, base, W: gl.constexpr, N: gl.constexpr):
    """Scores besides the codes' part, a [32, W] for every 32 tokens: `base` [32, W] and the outliers' share. `outliers`: N
    vectors over 128 or 64 tokens; `picked`: N of [W]."""
    parts = (base, base, base, base)
    for n in gl.static_range(N):
        vectors, added = column_chunks(token_vector(outliers[n]), W), ()
        for i in gl.static_range(outliers[0].shape[0] // CHUNK):
            added = added + (parts[i] + picked[n][None, :] * vectors[i],)
        parts = added
    return parts


@gluon.jit
def scores(query, buffers, picked, third, table, one, scale, N: gl.constexpr, NAME: gl.constexpr):
    """Scores (base 2) of a page as four [32, 4]. As `page.scores`; rows 2 h and 2 h + 1 of Q and `third` are head h."""
    codes, rest, outliers, thirds = buffers
    q = each_twice(query, TWICE_QUERY, QUERY)
    base = zero_columns(q, rest.slice(128, 128).load(CHANNELS), 4) * scale[None, :]
    scaled = q * rest.slice(0, 128).load(gl.SliceLayout(0, QUERY))[None, :]
    factor = power_of_two(row_max(gl.abs(scaled)).to(gl.float32))
    operand = _operand(gl.convert_layout(channels_to_k8(scaled), QUERY_K, assert_trivial=True), factor)
    inverse = ((254 << 23) - every_second(factor).to(gl.int32, bitcast=True)).to(gl.float32, bitcast=True)
    unit = down(inverse) * (scale * (1.0 / STEPS))[None, :]
    start = gl.zeros([CHUNK, 8], gl.int32, MMA)
    if NAME == "mixed":
        extra, words = _operand(third, factor), third_words(thirds)
        start = _lowered(extra)
    vectors = ()
    for n in gl.static_range(max(1, N)):
        vectors = vectors + (outliers.slice(n * 128, 128),)
    others, parts = outlier_columns(picked, vectors, base, 4, N), ()
    for i in gl.static_range(4):
        acc = mma_v2(as_rows(decode(codes, thirds, i, table, one, NAME == "asym3")), operand, start)
        if NAME == "mixed":
            acc = mma_v2(as_rows(decode_bits(words[i])), extra, acc)
        parts = parts + (joined(acc) * unit + others[i],)
    return parts


@gluon.jit
def _operand(x, factor):
    """float16 [8, k] in the order k times `factor` [8] at most LIMIT -> operand B."""
    return gl.convert_layout(gl.permute(part_of_lane(x, factor), (1, 0)), B8, assert_trivial=True)


@gluon.jit
def _lowered(extra):
    """Where sums start so that third bits of 0 and 2 count as -1 and +1: int32 [32, 8] with equal rows."""
    minus = mma_v2(gl.full([16, CHUNK], -1, gl.int8, A8), extra, gl.zeros([16, 8], gl.int32, MMA))
    wide = gl.reshape(gl.permute(gl.join(minus, minus), (2, 0, 1)), (CHUNK, 8))
    return gl.convert_layout(wide, MMA, assert_trivial=True)


@gluon.jit
def soft(parts, top, scale, zero):
    """Scores and their maximum [4], V's scale and zero in shared memory -> (int8 operand B of exp2(score - top) times V's scale
    times LIMIT; sums of the weights, and of them times V's zero, over the 8 rows of [8, 4])."""
    scales = column_chunks(token_vector(scale), 4)
    zeros = column_chunks(token_vector(zero), 4)
    total, weighted = gl.zeros([8, 4], gl.float32, by_column(8, 4)), gl.zeros([8, 4], gl.float32, by_column(8, 4))
    turned = ()
    for i in gl.static_range(4):
        p = gl.exp2(parts[i] - top[None, :])
        total, weighted = total + per_row(p), weighted + per_row(p * zeros[i])
        turned = turned + (turned_parts((p * scales[i]).to(gl.float16)),)
    return gl.convert_layout(gl.permute(join_quarters(turned), (1, 0)), B8, assert_trivial=True), total, weighted


@gluon.jit
def add_values(sums, operand, codes, thirds, factor, table, one, PLANE: gl.constexpr):
    """Adds `factor` [4] times the page's weighted levels to `sums`, four [32, 4] of 32 channels each."""
    unit, added = (factor * (1.0 / (LIMIT * STEPS)))[None, :], ()
    for i in gl.static_range(4):
        acc = mma_v2(as_rows(decode(codes, thirds, i, table, one, PLANE)), operand, gl.zeros([CHUNK, 8], gl.int32, MMA))
        added = added + (sums[i] + joined(acc) * unit,)
    return added
