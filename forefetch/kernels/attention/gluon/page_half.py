"""`page.py` for `fp4`: scales change every 32 tokens of a channel and every 32 channels of a token, so Q and P meet them four
times a page, and as float16, which costs one product each where pairs of int8 would cost six. Levels are float16 as well.
An operand's 16 rows are the 8 heads with one group's scales and with the next one's: each group takes the rows of its own.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import mma_v2

from forefetch.kernels.attention.gluon.codes import channels_to_k16, join_quarters, stack, stored_to_tokens, unstack
from forefetch.kernels.attention.gluon.decode import decode_half, e4m3
from forefetch.kernels.attention.gluon.layouts import (
    A16,
    CHANNEL_BYTES,
    CHUNK,
    MMA,
    QUERY,
    TOKEN_BYTES,
    channels_k16,
    rows_by,
)
from forefetch.kernels.attention.gluon.page import outlier_part

UP = gl.constexpr(6)  # queries and weights are brought below 2^6: their products with scales, at most 448, fit float16


@gluon.jit
def half_scores(q, codes, scales, i: gl.constexpr, base, picked, columns, unit, N: gl.constexpr):
    """Scores (base 2) of tokens 32 i to 32 i + 63 as two [8, 32]. q [8, 128] float16 by channel; `codes`: theirs, in shared
    memory, `scales` the page's; the rest as in `page.outlier_part`; `unit` [8]: scores per unit of q scale level."""
    operand = stack(_scaled_query(q, scales, i), _scaled_query(q, scales, i + 1), A16)
    parts = ()
    for j in gl.static_range(2):
        acc = mma_v2(operand, decode_half(codes, j), gl.zeros([16, CHUNK], gl.float32, MMA))
        part = gl.convert_layout(unstack(acc)[j], rows_by(CHUNK), assert_trivial=True)
        parts = parts + (part * unit[:, None] + outlier_part(base, picked, columns, i + j, N),)
    return parts


@gluon.jit
def add_half_values(sums, weights, codes, scales, i: gl.constexpr, unit):
    """Adds `unit` [8] times the page's weighted values of channels 32 i to 32 i + 63 to two [8, 32] of `sums`; `weights`
    [8, 128] float16 by token, `codes` those channels' in shared memory, `scales` the page's."""
    operand = stack(_scaled_weights(weights, scales, i), _scaled_weights(weights, scales, i + 1), A16)
    added = ()
    for j in gl.static_range(2):
        acc = mma_v2(operand, decode_half(codes, j), gl.zeros([16, CHUNK], gl.float32, MMA))
        part = gl.convert_layout(unstack(acc)[j], rows_by(CHUNK), assert_trivial=True)
        added = added + (sums[i + j] + part * unit[:, None],)
    return added


@gluon.jit
def _scaled_query(q, scales, i: gl.constexpr):
    """Queries times K's scales of tokens 32 i and on, in the order k."""
    group = e4m3(scales.slice(i * 128, 128).load(CHANNEL_BYTES))
    scaled = q * gl.convert_layout(group, gl.SliceLayout(0, QUERY), assert_trivial=True)[None, :]
    return gl.convert_layout(channels_to_k16(scaled), channels_k16(), assert_trivial=True)


@gluon.jit
def _scaled_weights(p, scales, i: gl.constexpr):
    """Weights times V's scales of channels 32 i and on."""
    group = stored_to_tokens(e4m3(scales.slice(i * 128, 128).load(TOKEN_BYTES)))
    return p * gl.convert_layout(group, gl.SliceLayout(0, rows_by(128)), assert_trivial=True)[None, :]


@gluon.jit
def by_token(weights):
    """Four [8, 32] -> [8, 128]."""
    return gl.convert_layout(join_quarters(weights), rows_by(128), assert_trivial=True)
