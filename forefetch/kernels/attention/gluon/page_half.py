"""`page.py` for `fp4`: scales change every 32 tokens of a channel and every 32 channels of a token, so Q and P meet them four
times a page, and as float16, which costs one product each where pairs of int8 would cost six. Levels are float16 as well.
An operand's 16 rows are the 8 heads with one group's scales and with the next one's: each group takes the rows of its own.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import mma_v2

from forefetch.kernels.attention.gluon.codes import channels_to_k16, halves_of, join_quarters, stack, stored_to_tokens, unstack
from forefetch.kernels.attention.gluon.decode import decode_half, e4m3
from forefetch.kernels.attention.gluon.layouts import (
    A16,
    CHANNEL_BYTES,
    CHUNK,
    FLAT,
    HALF_TOKENS,
    MMA,
    QUERY,
    TOKEN_BYTES,
    channels_k16,
    rows_by,
)
from forefetch.kernels.attention.gluon.page import outlier_part

UP = gl.constexpr(6)  # queries and weights are brought below 2^6: their products with scales, at most 448, fit float16


@gluon.jit
def half_scores(q, codes, scales, half, base, picked, outliers, unit, N: gl.constexpr):
    """Scores (base 2) of tokens 64 half to 64 half + 63 as two [8, 32]. q [8, 128] float16 by channel; `codes`: these tokens',
    `scales` [4, 128] and `outliers` the page's, in shared memory; `picked` as in `page.scores`; `base` [8]: the score's part
    that is the same for all tokens; `unit` [8]: scores per unit of q scale level."""
    PART: gl.constexpr = rows_by(CHUNK)
    columns = ()
    for n in gl.static_range(N):
        stored = outliers._reinterpret(gl.float16, [2 * N, 64], FLAT).index(2 * n + half)
        columns = columns + (halves_of(stored.load(HALF_TOKENS)),)
    operand = stack(_scaled_query(q, scales, half * 2), _scaled_query(q, scales, half * 2 + 1), A16)
    parts = ()
    for j in gl.static_range(2):
        acc = mma_v2(operand, decode_half(codes, j), gl.zeros([16, CHUNK], gl.float32, MMA))
        part = gl.convert_layout(unstack(acc)[j], PART, assert_trivial=True)
        parts = parts + (part * unit[:, None] + outlier_part(base, picked, columns, j, N),)
    return parts


@gluon.jit
def add_half_values(sums, weights, codes, scales, half, unit):
    """Adds `unit` [8] times the page's weighted values of channels 64 half to 64 half + 63 to the first two of `sums`, [8, 32]
    each; `weights` [8, 128] float16 by token, `codes`: these channels', in shared memory, `scales` [4, 128] the page's."""
    operand = stack(_scaled_weights(weights, scales, half * 2), _scaled_weights(weights, scales, half * 2 + 1), A16)
    added = ()
    for j in gl.static_range(2):
        acc = mma_v2(operand, decode_half(codes, j), gl.zeros([16, CHUNK], gl.float32, MMA))
        part = gl.convert_layout(unstack(acc)[j], rows_by(CHUNK), assert_trivial=True)
        added = added + (sums[j] + part * unit[:, None],)
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


@gluon.jit
def by_token(weights):
    """Four [8, 32] -> [8, 128]."""
    return gl.convert_layout(join_quarters(weights), rows_by(128), assert_trivial=True)
