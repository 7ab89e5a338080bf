"""`page.py` for `fp4`: scales change every 32 tokens of a channel and every 32 channels of a token, so Q and P meet them four
times a page, and as float16, which costs one product each where pairs of int8 would cost six. Levels are float16 as well.
An operand's 16 rows are the 8 heads with one group's scales and with the next one's: each group takes the rows of its own.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import mma_v2

from forefetch.kernels.attention.gluon.codes import channels_to_k16, join_quarters, stack, stored_to_tokens, unstack
from forefetch.kernels.attention.gluon.decode import LEVEL, SCALE4, decode_half, e4m3
from forefetch.kernels.attention.gluon.layouts import (
    A16,
    CHANNEL_BYTES,
    CHANNELS,
    CHUNK,
    MMA,
    QUERY,
    TOKEN_BYTES,
    channels_k16,
    rows_by,
)
from forefetch.kernels.attention.gluon.page import outlier_columns, outlier_part, zero_part

UP = gl.constexpr(14)  # queries and weights are brought below 2^14: products with small scales keep their bits in float16


@gluon.jit
def half_scores(query, buffers, picked, factor, scale, N: gl.constexpr):
    """As `page.scores`; `buffers`: K codes, scales, zeros, outliers; `factor`: the page's, of K's scales."""
    PART: gl.constexpr = rows_by(CHUNK)
    codes, scales, zero, outliers = buffers
    q = query.load(QUERY)
    base = zero_part(q, zero.load(CHANNELS)) * scale
    unit = scale * (factor * (LEVEL * SCALE4))
    columns = outlier_columns(outliers, N)
    parts = ()
    for i in gl.static_range(0, 4, 2):
        operand = stack(_scaled_query(q, scales, i), _scaled_query(q, scales, i + 1), A16)
        for j in gl.static_range(2):
            acc = mma_v2(operand, decode_half(codes, i + j), gl.zeros([16, CHUNK], gl.float32, MMA))
            part = outlier_part(base, picked, columns, i + j, N)
            parts = parts + (gl.convert_layout(unstack(acc)[j], PART, assert_trivial=True) * unit[:, None] + part,)
    return parts


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
def add_half_values(sums, weights, codes, scales, factor):
    """Adds `factor` [8] times the page's weighted values to `sums`, four [8, 32]; `weights`: four float16 [8, 32]."""
    PART: gl.constexpr = rows_by(CHUNK)
    p = gl.convert_layout(join_quarters(weights), rows_by(128), assert_trivial=True)
    unit = factor * (LEVEL * SCALE4)
    added = ()
    for i in gl.static_range(0, 4, 2):
        operand = stack(_scaled_weights(p, scales, i), _scaled_weights(p, scales, i + 1), A16)
        for j in gl.static_range(2):
            acc = mma_v2(operand, decode_half(codes, i + j), gl.zeros([16, CHUNK], gl.float32, MMA))
            part = gl.convert_layout(unstack(acc)[j], PART, assert_trivial=True)
            added = added + (sums[i + j] + part * unit[:, None],)
    return added
