"""Codes in shared memory -> operands B of tensor cores, in registers: no element changes its thread."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from forefetch.kernels.attention.gluon.layouts import B8, B16, BITS, LANES, THIRDS, halves_by, thirds_by, words_by

# 16 codes of 2 bits -> 16 bytes in 4 registers. Two codes share a nibble, `prmt` looks up the four nibbles of a selector's
# lower half: even codes, odd codes, and the upper halves of both. The shift by 16 is a float16 product with an opaque 1.0: that
# occupies the FMA pipe, which has room, instead of the ALU pipe, which has not; masked bits cannot make a NaN and subnormals
# are kept. Table ($20) and 1.0 ($36) are arguments of the kernel because ptxas would rebuild an immediate before every use.
_DECODE = gl.constexpr("""{
.reg .b32 even, odd, even_up, odd_up;
.reg .b16 low, high, unit, unused;
mov.b32 {unit, unused}, $36;
and.b32 even, $4, 0x33333333;
shr.u32 odd, $4, 2;
and.b32 odd, odd, 0x33333333;
mov.b32 {low, high}, even;
mul.rn.f16 high, high, unit;
mov.b32 even_up, {high, high};
mov.b32 {low, high}, odd;
mul.rn.f16 high, high, unit;
mov.b32 odd_up, {high, high};
prmt.b32 $0, $20, $20, even;
prmt.b32 $1, $20, $20, odd;
prmt.b32 $2, $20, $20, even_up;
prmt.b32 $3, $20, $20, odd_up;
}""")
_DECODE_PINS = gl.constexpr("=r,=r,=r,=r," + ",".join(["r"] * 48))

# The same with a third bit in each selector nibble, from a word ($20) whose bits 2 belong to even codes and bits 3 to odd ones;
# it chooses between two tables ($36, $52). 1.0 is $68.
_DECODE3 = gl.constexpr("""{
.reg .b32 even, odd, third, even_up, odd_up;
.reg .b16 low, high, unit, unused;
mov.b32 {unit, unused}, $68;
and.b32 even, $4, 0x33333333;
lop3.b32 even, $20, 0x44444444, even, 0xea;
shr.u32 odd, $4, 2;
and.b32 odd, odd, 0x33333333;
shr.u32 third, $20, 1;
lop3.b32 odd, third, 0x44444444, odd, 0xea;
mov.b32 {low, high}, even;
mul.rn.f16 high, high, unit;
mov.b32 even_up, {high, high};
mov.b32 {low, high}, odd;
mul.rn.f16 high, high, unit;
mov.b32 odd_up, {high, high};
prmt.b32 $0, $36, $52, even;
prmt.b32 $1, $36, $52, odd;
prmt.b32 $2, $36, $52, even_up;
prmt.b32 $3, $36, $52, odd_up;
}""")
_DECODE3_PINS = gl.constexpr("=r,=r,=r,=r," + ",".join(["r"] * 80))

# 8 codes of 4 bits -> 8 float16 numbers. A level is a float16 whose upper byte says everything; `prmt` looks four up in two
# tables ($12, $20) of four magnitudes each, and brings their signs' bits to where these bytes have theirs. 1.0 is $28.
_DECODE4 = gl.constexpr("""{
.reg .b32 chosen, chosen_up, lower, upper, signs;
.reg .b16 low, high, unit, unused;
mov.b32 {unit, unused}, $28;
and.b32 chosen, $4, 0x77777777;
mov.b32 {low, high}, chosen;
mul.rn.f16 high, high, unit;
mov.b32 chosen_up, {high, high};
prmt.b32 lower, $12, $20, chosen;
prmt.b32 upper, $12, $20, chosen_up;
lop3.b32 lower, $4, 0x80808080, lower, 0xea;
shl.b32 signs, $4, 4;
lop3.b32 upper, signs, 0x80808080, upper, 0xea;
prmt.b32 $0, lower, 0, 0x2404;
and.b32 $1, lower, 0xff00ff00;
prmt.b32 $2, upper, 0, 0x2404;
and.b32 $3, upper, 0xff00ff00;
}""")
_DECODE4_PINS = gl.constexpr("=r,=r,=r,=r," + ",".join(["r"] * 32))

# 32 bits -> 32 bytes of 0 or 2.
_BITS = gl.constexpr("""{
.reg .b32 part;
shl.b32 part, $8, 1;
and.b32 $0, part, 0x02020202;
and.b32 $1, $8, 0x02020202;
shr.u32 part, $8, 1;
and.b32 $2, part, 0x02020202;
shr.u32 part, $8, 2;
and.b32 $3, part, 0x02020202;
shr.u32 part, $8, 3;
and.b32 $4, part, 0x02020202;
shr.u32 part, $8, 4;
and.b32 $5, part, 0x02020202;
shr.u32 part, $8, 5;
and.b32 $6, part, 0x02020202;
shr.u32 part, $8, 6;
and.b32 $7, part, 0x02020202;
}""")
_BITS_PINS = gl.constexpr(",".join(["=r"] * 8 + ["r"] * 32))

# Four numbers of E4M3 -> float16.
_E4M3 = gl.constexpr("""{
.reg .b16 low, high;
mov.b32 {low, high}, $2;
cvt.rn.f16x2.e4m3x2 $0, low;
cvt.rn.f16x2.e4m3x2 $1, high;
}""")


@gluon.jit
def decode(buffer, thirds, chunk: gl.constexpr, table, one, PLANE: gl.constexpr):
    """Words [chunk * 256, chunk * 256 + 256) of shared memory -> int8 operand B [128 summed, 32].

    `table`: two of four levels each, int32 [32] with equal elements. `PLANE`: words of `thirds` hold the code's third bit."""
    W: gl.constexpr = 256
    LAYOUT: gl.constexpr = words_by(W)
    WORDS: gl.constexpr = gl.SliceLayout(1, LAYOUT)
    words = _repeated(buffer.slice(chunk * W, W).load(WORDS), W, 16, LAYOUT)
    tables, ones = _repeated(_per_word(table[0], W, WORDS), W, 16, LAYOUT), gl.full([W, 16], one, gl.int32, LAYOUT)
    if PLANE:
        third = thirds.slice(chunk * (W // 2), W // 2).load(thirds_by(W // 2))
        third = gl.convert_layout(gl.reshape(gl.join(third << 2, third), (W,)), WORDS, assert_trivial=True)
        others = _repeated(_per_word(table[1], W, WORDS), W, 16, LAYOUT)
        operands = [words, _repeated(third, W, 16, LAYOUT), tables, others, ones]
        levels = gl.inline_asm_elementwise(_DECODE3, _DECODE3_PINS, operands, dtype=gl.int8, is_pure=True, pack=16)
    else:
        levels = gl.inline_asm_elementwise(_DECODE, _DECODE_PINS, [words, tables, ones], dtype=gl.int8, is_pure=True, pack=16)
    return gl.convert_layout(levels_to_k8(levels), B8, assert_trivial=True)


@gluon.jit
def load_table(levels):
    """int32 [32] in memory -> one in each lane. Of a value that is known to be the same in all lanes, two tables would live in
    uniform registers, which `prmt` cannot read: they would be copied before each."""
    return gl.load(levels + gl.arange(0, 32, LANES))


@gluon.jit
def _per_word(table, W: gl.constexpr, WORDS: gl.constexpr):
    """[32] -> [W], 256 or 512: a lane's element for each of its words."""
    wide = gl.join(gl.join(table, table), gl.join(table, table))
    wide = gl.permute(gl.join(wide, wide), (3, 0, 1, 2))  # chunk of 128 words, lane, word of the lane
    if W == 512:
        wide = gl.permute(gl.join(wide, wide), (4, 0, 1, 2, 3))
    return gl.convert_layout(gl.reshape(wide, (W,)), WORDS, assert_trivial=True)


@gluon.jit
def _repeated(words, W: gl.constexpr, COUNT: gl.constexpr, LAYOUT: gl.constexpr):
    """[W] -> [W, COUNT] in equal columns."""
    words, _ = gl.broadcast(gl.expand_dims(words, 1), gl.full([W, COUNT], 0, gl.int32, LAYOUT))
    return words


@gluon.jit
def levels_to_k8(levels):
    """[256 words, 16] -> [128 summed, 32]: word bits 7 | 6-4 | 3-2 | 1 | 0, then code bits 3-2 | 1-0 as `prmt` left them ->
    k6 | k5-4 | k3-2 | k1-0, n."""
    levels = gl.reshape(levels, (2, 8, 4, 2, 2, 4, 4))
    return gl.reshape(gl.permute(levels, (4, 5, 2, 6, 0, 3, 1)), (128, 32))


@gluon.jit
def decode_half(buffer, chunk: gl.constexpr, tables, one):
    """`fp4`: words [chunk * 512, chunk * 512 + 512) of shared memory -> float16 operand B [128, 32].

    `tables`: magnitudes 0 to 3 and 4 to 7, a byte each, int32 [32] with equal elements."""
    W: gl.constexpr = 512
    LAYOUT: gl.constexpr = halves_by(W)
    WORDS: gl.constexpr = gl.SliceLayout(1, LAYOUT)
    words = _repeated(buffer.slice(chunk * W, W).load(WORDS), W, 8, LAYOUT)
    low, high = _repeated(_per_word(tables[0], W, WORDS), W, 8, LAYOUT), _repeated(_per_word(tables[1], W, WORDS), W, 8, LAYOUT)
    operands = [words, low, high, gl.full([W, 8], one, gl.int32, LAYOUT)]
    levels = gl.inline_asm_elementwise(_DECODE4, _DECODE4_PINS, operands, dtype=gl.float16, is_pure=True, pack=8)
    return gl.convert_layout(levels_to_k16(levels), B16, assert_trivial=True)


@gluon.jit
def levels_to_k16(levels):
    """[512 words, 8] -> [128 summed, 32]: word bits 8-7 | 6-4 | 3-2 | 1-0, then code bits 2 | 1 | 0 as they were left ->
    k6-5 | k4 | k3 | k2-1 | k0, n."""
    levels = gl.reshape(levels, (4, 8, 4, 4, 2, 2, 2))
    return gl.reshape(gl.permute(levels, (3, 4, 5, 2, 6, 0, 1)), (128, 32))


@gluon.jit
def third_words(buffer):
    """`mixed`: the 128 words as four [32], of 32 tokens each."""
    words = gl.reshape(buffer.slice(0, 128).load(THIRDS), (32, 2, 2))
    even, odd = gl.split(words)
    first, third = gl.split(even)
    second, fourth = gl.split(odd)
    return first, second, third, fourth


@gluon.jit
def decode_bits(words):
    """`mixed`: words [32] of third bits -> int8 operand B [32 channels of the list, 32 tokens] of 0 and 2."""
    words = gl.convert_layout(words, gl.SliceLayout(1, BITS), assert_trivial=True)
    words, _ = gl.broadcast(gl.expand_dims(words, 1), gl.full([32, 32], 0, gl.int32, BITS))
    bits = gl.inline_asm_elementwise(_BITS, _BITS_PINS, [words], dtype=gl.int8, is_pure=True, pack=32)
    return gl.convert_layout(bits_to_k8(bits), B8, assert_trivial=True)


@gluon.jit
def bits_to_k8(bits):
    """[32 lanes, 32] -> [32, 32]: lane bits 4-2 | 1-0, bits 4-3 | 2 | 1-0 -> k4 | k3-2 | k1-0, n."""
    bits = gl.reshape(bits, (8, 4, 4, 2, 4))
    return gl.reshape(gl.permute(bits, (3, 1, 4, 2, 0)), (32, 32))


@gluon.jit
def listed_to_k8(x):
    """[32] by place in the list of channels -> by k of `decode_bits`."""
    return gl.reshape(gl.permute(gl.reshape(x, (4, 2, 4)), (1, 0, 2)), (32,))


@gluon.jit
def e4m3(x):
    """Bytes [128] -> float16."""
    return gl.inline_asm_elementwise(_E4M3, "=r,=r,r", [x], dtype=gl.float16, is_pure=True, pack=4)
