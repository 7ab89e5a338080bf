"""Register arithmetic: numbers -> pairs of int8 and back, and the orders of the summed index."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from forefetch.kernels.attention.gluon.layouts import A16, B16, CHUNK, FOLDED_B, PAIRS, SUMMED_B, rows_by

# Four float16 numbers of up to +-127 -> four high and four low bytes: x = high + low / 254, both signed. Adding 1,536 leaves
# the nearest whole number in the lowest byte; what that leaves over is exact in float16.
_BYTES = gl.constexpr("""{
.reg .b32 magic, steps, a, b, rest;
mov.b32 magic, 0x66006600;
mov.b32 steps, 0x5bf05bf0;
fma.rn.f16x2 a, $2, $4, magic;
fma.rn.f16x2 b, $3, $5, magic;
prmt.b32 $0, a, b, 0x6420;
sub.rn.f16x2 a, magic, a;
sub.rn.f16x2 b, magic, b;
fma.rn.f16x2 rest, $2, $4, a;
fma.rn.f16x2 a, rest, steps, magic;
fma.rn.f16x2 rest, $3, $5, b;
fma.rn.f16x2 b, rest, steps, magic;
prmt.b32 $1, a, b, 0x6420;
}""")
STEPS = gl.constexpr(254.0)
LIMIT = gl.constexpr(127.0)  # the most that a number split in two may be
_JOIN = gl.constexpr("mad.lo.s32 $0, $1, 254, $2;")


@gluon.jit
def high_low(x, factor):
    """float16 x, factor [8, k] with |x factor| <= 127 -> (high, low) int8: x factor = high + low / 254."""
    return gl.inline_asm_elementwise(_BYTES, "=r,=r,r,r,r,r", [x, factor], dtype=(gl.int8, gl.int8), is_pure=True, pack=4)


@gluon.jit
def whole(high, low):
    """int32 sums of products with high and low parts -> float32 sums of the products in steps of 1 / 254."""
    return gl.inline_asm_elementwise(_JOIN, "=r,r,r", [high, low], dtype=gl.int32, is_pure=True, pack=1).to(gl.float32)


@gluon.jit
def stack(upper, lower, LAYOUT: gl.constexpr):
    """Two [8, k] -> the 16 rows of an operand A."""
    both = gl.reshape(gl.permute(gl.join(upper, lower), (2, 0, 1)), (16, upper.shape[1]))
    return gl.convert_layout(both, LAYOUT, assert_trivial=True)


@gluon.jit
def unstack(acc):
    """Accumulator [16, n] -> its upper and lower rows [8, n]."""
    return gl.split(gl.permute(gl.reshape(acc, (2, 8, acc.shape[1])), (1, 2, 0)))


@gluon.jit
def channels_to_k8(x):
    """[8, 128] by channel -> by k of the stored keys: k6..k0 = c4 c3 | c0 | c6 c5 | c2 c1."""
    x = gl.permute(gl.reshape(x, (8, 4, 4, 4, 2)), (0, 2, 4, 1, 3))
    return gl.reshape(x, (8, 128))


@gluon.jit
def channels_to_k16(x):
    """[8, 128] by channel -> by k of `fp4`'s stored keys: k6..k0 = c4 c3 | c2 | c1 | c6 c5 | c0."""
    x = gl.permute(gl.reshape(x, (8, 4, 4, 2, 2, 2)), (0, 2, 3, 4, 1, 5))
    return gl.reshape(x, (8, 128))


@gluon.jit
def fold_channels(x):
    """Float16 [8, 128] by channel -> operand A [16, 64]: channels with c4 = 0 in the upper rows, the others in the lower ones;
    k5..k0 = c3 c2 c1 | c6 c5 | c0, so that registers stay as QUERY has them."""
    even, odd = gl.split(gl.permute(gl.reshape(x, (8, 4, 2, 8, 2)), (0, 3, 1, 4, 2)))
    return stack(gl.reshape(even, (8, 64)), gl.reshape(odd, (8, 64)), A16)


@gluon.jit
def fold_vector(x):
    """The same of a vector [128] in FOLDED: operand B [64, 8] whose even columns meet the upper rows, odd ones the lower."""
    x = gl.reshape(gl.permute(gl.reshape(x, (4, 2, 8, 2)), (2, 0, 3, 1)), (64, 2))
    return _repeat_columns(gl.convert_layout(x, gl.SliceLayout(1, FOLDED_B), assert_trivial=True), FOLDED_B, 64, 4, 2)


@gluon.jit
def summed_vectors(x):
    """[256] in SUMMED, a vector over tokens as stored and ones -> operands B [32, 8] for tokens 0 to 63 and 64 to 127: columns
    0, 1 and 4, 5 have the first and the second 32 of these, the others ones."""
    x = gl.reshape(x, (2, 2, 4, 2, 4, 2))  # ones? | t6 | t2 t1 | t5 | t4 t3 | t0
    lower, upper = gl.split(gl.reshape(gl.permute(x, (4, 2, 5, 0, 3, 1)), (32, 4, 2)))
    LAYOUT: gl.constexpr = gl.SliceLayout(1, SUMMED_B)
    lower, upper = gl.convert_layout(lower, LAYOUT, assert_trivial=True), gl.convert_layout(upper, LAYOUT, assert_trivial=True)
    return _repeat_columns(lower, SUMMED_B, 32, 2, 4), _repeat_columns(upper, SUMMED_B, 32, 2, 4)


@gluon.jit
def _repeat_columns(x, LAYOUT: gl.constexpr, K: gl.constexpr, TIMES: gl.constexpr, OWN: gl.constexpr):
    """[K, OWN] -> operand B [K, 8]: TIMES after one another."""
    x, _ = gl.broadcast(gl.expand_dims(x, 1), gl.full([K, TIMES, OWN], 0.0, gl.float16, LAYOUT))
    return gl.convert_layout(gl.reshape(x, (K, 8)), B16, assert_trivial=True)


@gluon.jit
def crossed(acc):
    """Accumulator [16, 8] -> [8, 4]: upper rows of even columns and lower rows of odd ones, added."""
    x = gl.permute(gl.reshape(acc, (2, 8, 4, 2)), (1, 2, 0, 3))
    even, odd = gl.split(x)
    upper, _ = gl.split(even)
    _, lower = gl.split(odd)
    return gl.convert_layout(upper + lower, PAIRS, assert_trivial=True)


@gluon.jit
def along(x):
    """[8, 4] with equal columns -> [8, 32]."""
    wide = gl.join(gl.join(x, x), gl.join(x, x))  # [8, 4, 2, 2]
    wide = gl.reshape(gl.permute(gl.join(wide, wide), (0, 2, 3, 1, 4)), (8, CHUNK))
    return gl.convert_layout(wide, rows_by(CHUNK), assert_trivial=True)


@gluon.jit
def tokens_to_k8(x, COLUMNS: gl.constexpr):
    """[8, COLUMNS] by token -> by k of the stored values: k4..k0 = t4 | t2 t1 | t3 | t0."""
    x = gl.permute(gl.reshape(x, (8, COLUMNS // 16, 2, 4, 2)), (0, 1, 3, 2, 4))
    return gl.reshape(x, (8, COLUMNS))


@gluon.jit
def quarters(x):
    """[128] over tokens as stored, position bits t6 | t2 t1 | t5 | t4 t3 | t0 -> four vectors of 32 tokens in order."""
    x = gl.permute(gl.reshape(x, (2, 4, 2, 4, 2)), (3, 1, 4, 0, 2))  # t4 t3 | t2 t1 | t0 | t6 | t5
    even, odd = gl.split(gl.reshape(x, (32, 2, 2)))
    first, third = gl.split(even)
    second, fourth = gl.split(odd)
    return first, second, third, fourth


@gluon.jit
def stored_to_tokens(x):
    """[128] over tokens as stored -> in order."""
    return gl.reshape(gl.permute(gl.reshape(x, (2, 4, 8, 2)), (0, 2, 1, 3)), (128,))


@gluon.jit
def join_quarters(parts):
    """Four [8, 32] -> [8, 128]."""
    x = gl.join(gl.join(parts[0], parts[2]), gl.join(parts[1], parts[3]))
    return gl.reshape(gl.permute(x, (0, 2, 3, 1)), (8, 128))
