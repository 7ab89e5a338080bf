"""`page_columns.py` for `fp4`: scales change every 32 tokens of a channel and every 32 channels of a token, so Q and P meet
them four times a page, and as float16, which costs one product each where pairs of int8 would cost six. So are levels.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import mma_v2

from forefetch.kernels.attention.gluon.codes import channels_to_k16, stack, stored_to_tokens, unstack
from forefetch.kernels.attention.gluon.columns import as_rows, columns, turned
from forefetch.kernels.attention.gluon.decode import decode_half, e4m3
from forefetch.kernels.attention.gluon.layouts import (
    A16,
    B16,
    CHANNEL_BYTES,
    CHUNK,
    FLAT,
    MMA,
    QUERY,
    TOKEN_BYTES,
    TOKENS,
    by_column,
    channels_k16,
    rows_by,
)
from forefetch.kernels.attention.gluon.page_columns import outlier_columns

UP = gl.constexpr(6)  # queries and weights are brought below 2^6: their products with scales, at most 448, fit float16


@gluon.jit
def half_scores(q, codes, scales, half, base, picked, outliers, unit, tables, one, N: gl.constexpr):
    """Scores (base 2) of tokens 64 half to 64 half + 63 as two [32, 8]. q [8, 128] float16 by channel; `codes`: these tokens',
    `scales` [4, 128] and `outliers` the page's, in shared memory; `picked`: N of [8], scaled q[outlier]; `base` [32, 8]: the
    score's part that is the same for all tokens; `unit` [8]: scores per unit of q scale level."""
    vectors = ()
    for n in gl.static_range(max(1, N)):
        vectors = vectors + (outliers._reinterpret(gl.float16, [2 * max(1, N), 64], FLAT).index(2 * n + half),)
    others, parts = outlier_columns(picked, vectors, base, 8, N), ()
    for j in gl.static_range(2):
        operand = gl.convert_layout(gl.permute(_scaled_query(q, scales, half * 2 + j), (1, 0)), B16, assert_trivial=True)
        acc = columns(mma_v2(as_rows(decode_half(codes, j, tables, one)), operand, gl.zeros([CHUNK, 8], gl.float32, MMA)), 8)
        parts = parts + (acc * unit[None, :] + others[j],)
    return parts


@gluon.jit
def soft_half(parts, top, zero):
    """Scores and their maximum [8], V's zero in shared memory -> (exp2(score - top) as float16 [8, 128] by token; their sum and
    the sum of them times V's zero, both [8, 8] with equal rows)."""
    even, odd = gl.join(_weight(parts[0], top), _weight(parts[2], top)), gl.join(_weight(parts[1], top), _weight(parts[3], top))
    both = gl.join(even, odd)  # [32, 8, bit 6, bit 5]
    both = gl.convert_layout(gl.reshape(gl.permute(both, (2, 3, 0, 1)), (128, 8)), by_column(128, 8), assert_trivial=True)
    rows = gl.convert_layout(turned(both), rows_by(128), assert_trivial=True)
    zero = gl.convert_layout(stored_to_tokens(zero.load(TOKENS)), gl.SliceLayout(0, rows_by(128)), assert_trivial=True)
    zeros, ones = gl.broadcast(zero[None, :], gl.full([8, 128], 1.0, gl.float16, rows_by(128)))
    operand = gl.convert_layout(gl.permute(rows, (1, 0)), B16, assert_trivial=True)
    upper, lower = unstack(mma_v2(stack(ones, zeros, A16), operand, gl.zeros([16, 8], gl.float32, MMA)))
    return rows, columns(upper, 8), columns(lower, 8)


@gluon.jit
def _weight(score, top):
    return gl.exp2(score - top[None, :]).to(gl.float16)


@gluon.jit
def add_half_values(sums, weights, codes, scales, half, unit, tables, one):
    """Adds `unit` [8] times the page's weighted values of channels 64 half to 64 half + 63 to the first two of `sums`, [32, 8]
    each; `weights` [8, 128] float16 by token, `codes`: these channels', in shared memory, `scales` [4, 128] the page's."""
    added = ()
    for j in gl.static_range(2):
        operand = gl.convert_layout(
            gl.permute(_scaled_weights(weights, scales, half * 2 + j), (1, 0)), B16, assert_trivial=True
        )
        acc = columns(mma_v2(as_rows(decode_half(codes, j, tables, one)), operand, gl.zeros([CHUNK, 8], gl.float32, MMA)), 8)
        added = added + (sums[j] + acc * unit[None, :],)
    return added


@gluon.jit
def _scaled_query(q, scales, i):
    """Queries times K's scales of tokens 32 i and on, in the order k."""
    group = e4m3(scales.index(i).load(CHANNEL_BYTES))
    scaled = q * gl.convert_layout(group, gl.SliceLayout(0, QUERY), assert_trivial=True)[None, :]
    return gl.convert_layout(channels_to_k16(scaled), channels_k16(), assert_trivial=True)


@gluon.jit
def _scaled_weights(p, scales, i):
    """Weights times V's scales of channels 32 i and on."""
    group = stored_to_tokens(e4m3(scales.index(i).load(TOKEN_BYTES)))
    return p * gl.convert_layout(group, gl.SliceLayout(0, rows_by(128)), assert_trivial=True)[None, :]
