"""One sealed page by four warps: as `page.py`, but codes are operand A of `wgmma`, heads and parts its 16 columns.

Each warp has a quarter of the tokens while scores are made and a quarter of the channels while values are added. What all four
need passes through shared memory: queries times the page's scales, the largest score, weights. That is three barriers a page.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import warpgroup_mma, warpgroup_mma_wait

from forefetch.kernels.attention.gluon.codes import LIMIT, STEPS, channels_to_k8, high_low, whole
from forefetch.kernels.attention.gluon.decode import decode_words
from forefetch.kernels.attention.gluon.page import power_of_two, row_max
from forefetch.kernels.attention.gluon.wide_layouts import (
    A8,
    ACC,
    BY,
    LANES,
    MAXIMA,
    PLACES,
    QUERY,
    QUERY_K,
    TOTAL,
    WORDS,
)

# A float16 number x of up to 1 -> its two parts, x 127 = high + low / 254, as the bytes of 16 bits. As `codes._BYTES`.
_PAIR = gl.constexpr("""{
.reg .b32 magic, limit, steps, a, b;
mov.b32 magic, 0x66006600;
mov.b32 limit, 0x57f057f0;
mov.b32 steps, 0x5bf05bf0;
fma.rn.f16x2 a, $1, limit, magic;
sub.rn.f16x2 b, magic, a;
fma.rn.f16x2 b, $1, limit, b;
fma.rn.f16x2 b, b, steps, magic;
prmt.b32 $0, a, b, 0x6240;
}""")
# Pairs of two heads, for a token and the one 8 further on -> high and low parts of one head for four tokens: k1-0 = t3, t0.
_TURN = gl.constexpr("""{
.reg .b32 a, b;
movmatrix.sync.aligned.m8n8.trans.b16 a, $2;
movmatrix.sync.aligned.m8n8.trans.b16 b, $3;
prmt.b32 $0, a, b, 0x6420;
prmt.b32 $1, a, b, 0x7531;
}""")


@gluon.jit
def turn_pairs(x):
    """int16 [128 tokens, 8 heads] in BY -> (high, low) int8 [128, 8]: the element of token t6..t0 and head h2..h0 is then at
    [t6 t5 t4 t3 h2 h1 h0, t2 t1 t0]."""
    return gl.inline_asm_elementwise(_TURN, "=r,=r,r,r", [x], dtype=(gl.int8, gl.int8), is_pure=True, pack=4)


@gluon.jit
def put_queries(q, floats, rest, back, operand, numbers):
    """Queries [8, 128] (float16, and as float32) times K's scale, as parts into `operand` [16, 128]; into `numbers`, two of [8], what a
    page's scores have besides (q . zero), and scores per unit of the products. `back` [8]: scores per unit of q."""
    KS: gl.constexpr = QUERY_K
    base = gl.sum(floats * rest.slice(128, 128).load(gl.SliceLayout(0, QUERY)).to(gl.float32)[None, :], 1)
    scaled = q * rest.slice(0, 128).load(gl.SliceLayout(0, QUERY))[None, :]
    factor = power_of_two(row_max(gl.abs(scaled)).to(gl.float32))
    inverse = ((254 << 23) - factor.to(gl.int32, bitcast=True)).to(gl.float32, bitcast=True)
    numbers[0].store(base * back)
    numbers[1].store(back * inverse * (1.0 / STEPS))
    factor = gl.convert_layout(factor.to(gl.float16), gl.SliceLayout(1, KS), assert_trivial=True)
    scaled = gl.convert_layout(channels_to_k8(scaled), KS, assert_trivial=True)
    factors, _ = gl.broadcast(factor[:, None], scaled)
    high, low = high_low(scaled, factors)
    operand.store(gl.reshape(gl.permute(gl.join(high, low), (2, 0, 1)), (16, 128)))


@gluon.jit
def load_table(levels):
    """int32 [32] in memory -> its element of a lane for each of the lane's words [1024], as `decode.load_table` explains."""
    table = gl.load(levels + gl.arange(0, 32, gl.SliceLayout(0, gl.SliceLayout(2, LANES))))
    table, _ = gl.broadcast(table[None, :][:, :, None], gl.full([8, 32, 4], 0, gl.int32, LANES))
    return gl.convert_layout(gl.reshape(table, (1024,)), gl.SliceLayout(1, WORDS), assert_trivial=True)


@gluon.jit
def levels_by(words, table, one):
    """Words [1024] of codes -> operand A [128, 128]."""
    return gl.convert_layout(decode_words(words, table, one, WORDS), A8, assert_trivial=True)


@gluon.jit
def products(levels, operand):
    """levels [128, 128] times both parts of `operand` [16, 128], under way."""
    start = gl.zeros([128, 16], gl.int32, ACC)
    return warpgroup_mma(levels, operand.permute((1, 0)), start, use_acc=False, is_async=True)


@gluon.jit
def awaited(acc):
    """The products as float32 [128, 8], in steps of 1 / 254."""
    acc = warpgroup_mma_wait(0, [acc])
    high, low = gl.split(gl.permute(gl.reshape(acc, (128, 2, 8)), (0, 2, 1)))
    return whole(gl.convert_layout(high, BY, assert_trivial=True), gl.convert_layout(low, BY, assert_trivial=True))


@gluon.jit
def by_token(stored):
    """A page's vector over tokens in shared memory -> [128], by the rows of BY."""
    x = gl.permute(gl.reshape(stored.load(PLACES), (2, 4, 4, 2, 2)), (0, 2, 3, 1, 4))  # t6 | t2 t1 | t5 t4 | t3 | t0
    return gl.convert_layout(gl.reshape(x, (128,)), gl.SliceLayout(1, BY), assert_trivial=True)


@gluon.jit
def largest(s, maxima):
    """max over the rows of [n, 8], which lie over all warps; `maxima` [4, 8]: shared memory."""
    x = gl.max(gl.reshape(s, (s.shape[0] // 64, 4, 16, 8)), 0)
    maxima.store(gl.max(x, 1))
    return gl.convert_layout(gl.max(maxima.load(MAXIMA), 0), gl.SliceLayout(0, BY), assert_trivial=True)


@gluon.jit
def per_lane(p):
    """[n, 8] -> [4, 8, 8]: sums of the rows that a lane has."""
    x = gl.reshape(p, (p.shape[0] // 64, 4, 2, 8, 8))
    return gl.convert_layout(gl.sum(gl.sum(x, 2), 0), TOTAL, assert_trivial=True)


@gluon.jit
def across(x, LAYOUT: gl.constexpr):
    """[8] by head in the layout of another tensor's heads."""
    return gl.convert_layout(x, gl.SliceLayout(0, LAYOUT), assert_trivial=True)[None, :]


@gluon.jit
def over_total(x):
    """[8] by head -> [1, 1, 8] that meets `per_lane`."""
    LAST: gl.constexpr = gl.SliceLayout(0, gl.SliceLayout(0, TOTAL))
    return gl.convert_layout(x, LAST, assert_trivial=True)[None, :][None, :, :]


@gluon.jit
def put_weights(p, scale, operand):
    """Weights [128, 8] of at most 1, times V's scale [128] and LIMIT, as parts into `operand` [16, 128] by k of the stored values."""
    x = p.to(gl.float16) * scale[:, None]
    pairs = gl.inline_asm_elementwise(_PAIR, "=r,r", [x], dtype=gl.int16, is_pure=True, pack=2)
    high, low = turn_pairs(pairs)
    both = gl.reshape(gl.join(high, low), (8, 2, 8, 4, 2, 2))  # t6 t5 t4 | t3 | head | t2 t1 | t0 | part
    operand.store(gl.reshape(gl.permute(both, (5, 2, 0, 3, 1, 4)), (16, 128)))
