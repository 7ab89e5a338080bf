"""Heads as the columns of tensor products: codes are operand A, queries and weights are operand B.

So no row is idle or counted twice where a KV head has at most four heads (8 columns: 4 heads, high and low part) or where
numbers are not split in two (`fp4`: 8 heads). Scores come out with tokens as rows, and as weights they must change to columns:
`movmatrix` turns 8 x 8 float16 numbers, or pairs of bytes, between the lanes of a warp.

The three functions whose results are other elements than their layouts say, `turn_halves`, `turn_bytes` and `every_second`,
do nothing but that (`tests/gluon_interpreter.py` has them by name).
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from forefetch.kernels.attention.gluon.codes import whole
from forefetch.kernels.attention.gluon.layouts import A8, A16, CHUNK, FLAT, TURNING, by_column, token_words

_TURN = gl.constexpr("movmatrix.sync.aligned.m8n8.trans.b16 $0, $1;")
# The same with the two bytes of each element: afterwards those of two neighbours alternate.
_TURN_BYTES = gl.constexpr("""{
.reg .b32 turned;
movmatrix.sync.aligned.m8n8.trans.b16 turned, $1;
prmt.b32 $0, turned, turned, 0x3120;
}""")
_SHUFFLE = gl.constexpr("shfl.sync.idx.b32 $0, $1, $2, 31, 0xffffffff;")
# One half of each of two words -> two float32 numbers.
_WIDEN = gl.constexpr("""{
.reg .b32 pair;
.reg .b16 low, high;
prmt.b32 pair, $2, $3, $4;
mov.b32 {low, high}, pair;
cvt.f32.f16 $0, low;
cvt.f32.f16 $1, high;
}""")
# Two float16 numbers x of up to +-1 -> bytes: two high parts, two low parts, x 127 = high + low / 254. As `codes._BYTES`.
_PARTS = gl.constexpr("""{
.reg .b32 magic, limit, a, b;
mov.b32 magic, 0x66006600;
mov.b32 limit, 0x57f057f0;
fma.rn.f16x2 a, $1, limit, magic;
sub.rn.f16x2 b, magic, a;
fma.rn.f16x2 b, $1, limit, b;
fma.rn.f16x2 b, b, $3, magic;
prmt.b32 $0, a, b, 0x6420;
}""")
# Four float16 numbers x -> the bytes of the part of x $3 that the lane keeps. For the low part $5 = -1, $7 = 1536, $9 = 254;
# for the high part, which is what is left when nothing has been taken away, 0, 0, 1.
_PART = gl.constexpr("""{
.reg .b32 magic, a, b;
mov.b32 magic, 0x66006600;
fma.rn.f16x2 a, $1, $3, magic;
fma.rn.f16x2 b, $2, $3, magic;
fma.rn.f16x2 a, a, $5, $7;
fma.rn.f16x2 b, b, $5, $7;
fma.rn.f16x2 a, $1, $3, a;
fma.rn.f16x2 b, $2, $3, b;
fma.rn.f16x2 a, a, $9, magic;
fma.rn.f16x2 b, b, $9, magic;
prmt.b32 $0, a, b, 0x6420;
}""")


@gluon.jit
def each_twice(query, LAYOUT: gl.constexpr, TO: gl.constexpr):
    """[4, 128] in shared memory -> [8, 128] in layout TO, every row twice; LAYOUT: the same as [4, 2, 128]."""
    x = gl.expand_dims(query.load(gl.SliceLayout(1, LAYOUT)), 1)
    x, _ = gl.broadcast(x, gl.full([4, 2, 128], 0.0, gl.float16, LAYOUT))
    return gl.convert_layout(gl.reshape(x, (8, 128)), TO, assert_trivial=True)


@gluon.jit
def turn_halves(x):
    """float16 [blocks, 8, 8] -> each block transposed."""
    return gl.inline_asm_elementwise(_TURN, "=r,r", [x], dtype=gl.float16, is_pure=True, pack=2)


@gluon.jit
def turn_bytes(x):
    """int8 [blocks, 8 a, 4 b, 2 c, 2 d] -> the element of a = (j, m), b = i >> 1, c = i & 1, d = l is at [.., i, j, l, m]."""
    return gl.inline_asm_elementwise(_TURN_BYTES, "=r,r", [x], dtype=gl.int8, is_pure=True, pack=4)


@gluon.jit
def every_second(x):
    """[8] by row -> [8, 4] with equal rows: elements 0, 2, 4, 6."""
    TO: gl.constexpr = by_column(8, 4)
    wide, _ = gl.broadcast(
        gl.convert_layout(x, gl.SliceLayout(1, TO), assert_trivial=True)[:, None], gl.zeros([8, 4], x.dtype, TO)
    )
    source, _ = gl.broadcast((gl.arange(0, 4, gl.SliceLayout(0, TO)) * 8)[None, :], gl.full([8, 4], 0, gl.int32, TO))
    return gl.inline_asm_elementwise(_SHUFFLE, "=r,r,r", [wide, source], dtype=x.dtype, is_pure=True, pack=1)


@gluon.jit
def as_rows(operand):
    """Operand B [k, n] -> operand A [n, k], in the same registers."""
    LAYOUT: gl.constexpr = A8 if operand.dtype == gl.int8 else A16
    return gl.convert_layout(gl.permute(operand, (1, 0)), LAYOUT, assert_trivial=True)


@gluon.jit
def parted(acc):
    """[n, 8] whose columns are 4 heads, two parts each -> both [n, 4]."""
    high, low = gl.split(gl.reshape(acc, (acc.shape[0], 4, 2)))
    TO: gl.constexpr = by_column(acc.shape[0], 4)
    return gl.convert_layout(high, TO, assert_trivial=True), gl.convert_layout(low, TO, assert_trivial=True)


@gluon.jit
def joined(acc):
    """int32 accumulator [32, 8] of 4 heads -> float32 [32, 4] in steps of 1 / 254."""
    high, low = parted(acc)
    return whole(high, low)


@gluon.jit
def columns(acc, W: gl.constexpr):
    """Accumulator [n, 8] of float16 products -> [n, W]: 8 heads, or 4 that are there twice."""
    if W == 4:
        x, _ = parted(acc)
    else:
        x = gl.convert_layout(acc, by_column(acc.shape[0], 8), assert_trivial=True)
    return x


@gluon.jit
def down(x):
    """[8, W] with equal rows -> [32, W]."""
    wide = gl.join(gl.join(x, x), gl.join(x, x))
    wide = gl.reshape(gl.permute(wide, (2, 3, 0, 1)), (32, x.shape[1]))
    return gl.convert_layout(wide, by_column(32, x.shape[1]), assert_trivial=True)


@gluon.jit
def part_of_lane(x, factor):
    """float16 [8, k] in the order k of an operand, factor [8] with |x factor| <= 127 -> int8 operand [8, k]: in even rows the
    high parts, in odd ones the low parts, as `codes.high_low` splits them."""
    LAYOUT: gl.constexpr = x.type.layout
    low = gl.arange(0, 8, gl.SliceLayout(1, LAYOUT)) % 2 == 1
    factor = gl.convert_layout(factor.to(gl.float16), gl.SliceLayout(1, LAYOUT), assert_trivial=True)
    factors, _ = gl.broadcast(factor[:, None], x)
    taken, _ = gl.broadcast(gl.where(low, -1.0, 0.0).to(gl.float16)[:, None], x)
    start, _ = gl.broadcast(gl.where(low, 1536.0, 0.0).to(gl.float16)[:, None], x)
    steps, _ = gl.broadcast(gl.where(low, 254.0, 1.0).to(gl.float16)[:, None], x)
    operands = [x, factors, taken, start, steps]
    return gl.inline_asm_elementwise(_PART, "=r,r,r,r,r,r,r,r,r,r,r", operands, dtype=gl.int8, is_pure=True, pack=4)


@gluon.jit
def turned_parts(weights):
    """float16 [32 tokens, 4 heads], at most 1 -> int8 [8, 32]: rows are heads and parts, tokens by k of the stored values."""
    x = gl.permute(gl.reshape(weights, (2, 2, 8, 4)), (0, 2, 3, 1))
    x = gl.expand_dims(gl.convert_layout(x, gl.SliceLayout(3, TURNING), assert_trivial=True), 3)
    x, steps = gl.broadcast(x, gl.full([2, 8, 4, 2, 2], 254.0, gl.float16, TURNING))
    parts = gl.inline_asm_elementwise(_PARTS, "=r,r,r,r,r", [x, steps], dtype=gl.int8, is_pure=True, pack=4)
    return gl.reshape(gl.permute(turn_bytes(parts), (1, 0, 2, 3, 4)), (8, 32))


@gluon.jit
def turned(weights):
    """float16 [n tokens, 8 heads] -> [8, n]."""
    x = turn_halves(gl.reshape(weights, (weights.shape[0] // 8, 8, 8)))
    return gl.reshape(gl.permute(x, (1, 0, 2)), (8, weights.shape[0]))


@gluon.jit
def token_vector(stored):
    """float16 over 128 or 64 tokens as stored, in shared memory -> float32 by token in order, for the rows of `by_column`."""
    T: gl.constexpr = stored.shape[0]
    LAYOUT: gl.constexpr = token_words(T // 2)
    words = stored._reinterpret(gl.int32, [T // 2], FLAT).load(gl.SliceLayout(1, LAYOUT))
    words, _ = gl.broadcast(gl.expand_dims(words, 1), gl.full([T // 2, 2], 0, gl.int32, LAYOUT))
    half = gl.where(gl.arange(0, 2, gl.SliceLayout(0, LAYOUT)) == 0, 0x5410, 0x7632)
    half, _ = gl.broadcast(half[None, :], gl.full([T // 2, 2], 0, gl.int32, LAYOUT))
    lower, upper = _by_bit3(words, T)
    half, _ = _by_bit3(half, T)
    low, high = gl.inline_asm_elementwise(
        _WIDEN, "=r,=r,r,r,r", [lower, upper, half], dtype=(gl.float32, gl.float32), is_pure=True, pack=1
    )
    return gl.reshape(gl.permute(gl.reshape(gl.join(low, high), (T // 16, 8, 2)), (0, 2, 1)), (T,))


@gluon.jit
def _by_bit3(x, T: gl.constexpr):
    """[words, 2], word bits t6 | t2 t1 | t5 | t4 | t3 and t0 -> for both t3 [T / 2] in order of the other bits."""
    x = gl.reshape(x, (T // 64, 2, 2, 2, 2, 2, 2))
    return gl.split(gl.reshape(gl.permute(x, (0, 3, 4, 1, 2, 6, 5)), (T // 2, 2)))


@gluon.jit
def column_chunks(x, W: gl.constexpr):
    """[128] or [64] -> four or two [32, 1] that meet [32, W]."""
    TO: gl.constexpr = gl.SliceLayout(1, by_column(CHUNK, W))
    x = gl.permute(gl.reshape(x, (x.shape[0] // 64, 2, CHUNK)), (2, 0, 1))
    even, odd = gl.split(x)
    chunks = ()
    if even.shape[1] == 2:
        first, third = gl.split(even)
        second, fourth = gl.split(odd)
        for part in gl.static_range(4):
            chunk = (first, second, third, fourth)[part]
            chunks = chunks + (gl.convert_layout(chunk, TO, assert_trivial=True)[:, None],)
    else:
        for part in gl.static_range(2):
            chunk = gl.reshape((even, odd)[part], (CHUNK,))
            chunks = chunks + (gl.convert_layout(chunk, TO, assert_trivial=True)[:, None],)
    return chunks
