"""Device functions shared by the kernels in fragment order: from packed words to tensor-core operands without shuffles.

The weights are the A operand of mma.m16n8k16 (16 rows), 8 tokens its B operand. Codes reach the tensor core as they lie:
`word & 0x000F000F` read as two float16 is two subnormals u * 2^-24, and `word & 0x00F000F0` is 16 u * 2^-24; the tensor core
keeps subnormals exact. So inputs whose bit 1 is set are divided by 16 beforehand (routing.py, or `half_inputs` here), and 2^24
comes back at the end: five instructions for eight codes. Their offset of 8 goes through the tensor core as well: a constant A
operand gives -8 * sum(x), which is added to both row tiles. Scales follow per group, in float32.

int8 is the same with bytes: `word & 0x00FF00FF` and the other two are u * 2^-24, their offset is 128, and no input is divided.

Where bits lie is in fragments.py. An mma's k indices need not be ours in order, if both operands agree: its k bits, lowest
first, are our k0, k4, k5, k1, k2, k3, k6. Shapes: W warps, each with a tile of its own; 32 rows and 128 inputs per step.
"""

from __future__ import annotations

from typing import Any

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy, mma_v2

UNSCALE = gl.constexpr(16777216.0)  # 2^24
_UNPACK = gl.constexpr("""{
.reg .b32 t;
and.b32 $0, $4, 0x000F000F;
and.b32 $1, $4, 0x00F000F0;
shr.u32 t, $4, 8;
and.b32 $2, t, 0x000F000F;
and.b32 $3, t, 0x00F000F0;
}""")
_UNPACK_TYPES = gl.constexpr("=r,=r,=r,=r," + ",".join(["r"] * 8))
_WIDEN = gl.constexpr("and.b32 $0, $2, 0x00FF00FF; prmt.b32 $1, $2, 0, 0x4341;")  # bytes 0 and 2, bytes 1 and 3
_WIDEN_TYPES = gl.constexpr("=r,=r,r,r,r,r")


def layouts(warps: int, group: int, bits: int) -> dict[str, Any]:
    """Who holds what. Each lane copies to shared memory the very words that it will read, so no barrier is needed for them."""
    linear, doublings = gl.DistributedLinearLayout, warps.bit_length() - 1
    halves, words = 32 * (128 // group), 128 * bits  # of a step
    mma = gl.NVMMADistributedLayout([2, 0], [warps, 1], [16, 8])

    def of_warps(step: int, *rest: int) -> list[list[int]]:
        return [[step << bit, *rest] for bit in range(doublings)]

    codes = [[0, 1], [0, 2], *([[0, 4]] if bits == 4 else [])]
    own = [1, 2, 128, 256] if bits == 4 else [1, 2, 128, 256, 512]
    spread = [[0], [0], [4], [8], [16]] if group == 128 else [[0], [0], [8], [16], [32]]
    copied = [[2], [4], [8], [16], [0]] if group == 128 else [[2], [4], [8], [16], [32]]
    return {
        "WARPS": warps,
        "GROUP": group,
        "BITS": bits,
        "MMA": mma,
        "A": gl.DotOperandLayout(0, mma, 2),
        "B": gl.DotOperandLayout(1, mma, 2),
        "WORDS": linear(
            codes + [[bit, 0] for bit in own],
            [[4, 0], [8, 0], [16, 0], [32, 0], [64, 0]],
            of_warps(words, 0),
            [],
            [words * warps, 32 // bits],
        ),
        "COPY": linear([[bit] for bit in own], [[4], [8], [16], [32], [64]], of_warps(words), [], [words * warps]),
        "SCALES": linear([[1], [2]] if group == 128 else [[1], [2], [4]], spread, of_warps(halves), [], [halves * warps]),
        "SCALE_COPY": linear([[1]], copied, of_warps(halves), [], [halves * warps]),
        "INPUTS": linear(
            [[0, 0, 1], [0, 1, 0], [0, 2, 0], [0, 4, 0], [0, 32, 0]],
            [[0, 8, 0], [0, 16, 0], [1, 0, 0], [2, 0, 0], [4, 0, 0]],
            [[0, 0, 0]] * doublings,
            [],
            [8, 64, 2],
        ),
    }


@gluon.jit
def unpack(words, WARPS: gl.constexpr, BITS: gl.constexpr, WORDS: gl.constexpr, A: gl.constexpr):
    """Words of a step [128 bits W] -> two A operands [16 W, 128]: rows 0-15 and 16-31 of each warp's tile."""
    words = gl.expand_dims(words, 1)
    words, _ = gl.broadcast(words, gl.full([128 * BITS * WARPS, 32 // BITS], 0, gl.int32, WORDS))
    if BITS == 4:
        codes = gl.inline_asm_elementwise(_UNPACK, _UNPACK_TYPES, [words], dtype=gl.float16, is_pure=True, pack=8)
        # warp, k6, r4, r2-0, k5-4, k3, r3 | k2, k1, k0 -> warp, r3, r2-0 | k6, k3, k2, k1, k5-4, k0 | r4
        codes = gl.permute(gl.reshape(codes, (WARPS, 2, 2, 8, 4, 2, 2, 2, 2, 2)), (0, 6, 3, 1, 5, 7, 8, 4, 9, 2))
    else:
        codes = gl.inline_asm_elementwise(_WIDEN, _WIDEN_TYPES, [words], dtype=gl.float16, is_pure=True, pack=4)
        # warp, k6, k2, r4, r2-0, k5-4, k3, r3 | k1, k0
        codes = gl.permute(gl.reshape(codes, (WARPS, 2, 2, 2, 8, 4, 2, 2, 2, 2)), (0, 7, 4, 1, 6, 2, 8, 5, 9, 3))
    low, high = gl.split(gl.reshape(codes, (16 * WARPS, 128, 2)))
    return gl.convert_layout(low, A, assert_trivial=True), gl.convert_layout(high, A, assert_trivial=True)


@gluon.jit
def operand(x, INPUTS: gl.constexpr, B: gl.constexpr):
    """x [8, 64] int32, each two float16 inputs -> B operand [128, 8]. As int32 until here, or LLVM re-packs every half."""
    x = gl.expand_dims(x, 2)
    x, _ = gl.broadcast(x, gl.full([8, 64, 2], 0, gl.int32, INPUTS))
    x = gl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r,r", [x], dtype=gl.float16, is_pure=True, pack=2)
    x = gl.permute(gl.reshape(x, (8, 2, 4, 2, 2, 2, 2)), (1, 3, 4, 5, 2, 6, 0))  # n, k6, k5-4, k3, k2, k1, k0 -> k.., n
    return gl.convert_layout(gl.reshape(x, (128, 8)), B, assert_trivial=True)


@gluon.jit
def offset(constants, WARPS: gl.constexpr, GROUP: gl.constexpr, A: gl.constexpr):
    """The constant A operand [16 W, GROUP]: the codes' offset where k1 = 0, and where k1 = 1; loaded, so not folded."""
    even = gl.load(constants).to(gl.float16, bitcast=True)
    odd = gl.load(constants + 1).to(gl.float16, bitcast=True)
    k = gl.arange(0, GROUP, gl.SliceLayout(0, A))
    value = gl.where((k & 8) == 0, even, odd)  # the mma's k bit 3 is our k1
    value, _ = gl.broadcast(gl.expand_dims(value, 0), gl.full([16 * WARPS, GROUP], 0.0, gl.float16, A))
    return value


@gluon.jit
def starts(x, eights, WARPS: gl.constexpr, GROUP: gl.constexpr, MMA: gl.constexpr, B: gl.constexpr):
    """What the codes' offset takes from a step's products: a [16 W, 8] for each of its groups. Needs no weights."""
    zero = gl.zeros([16 * WARPS, 8], gl.float32, MMA)
    if GROUP == 128:
        both = (mma_v2(eights, x, zero),)
    else:
        x_0, x_1 = _groups(x, B)
        both = (mma_v2(eights, x_0, zero), mma_v2(eights, x_1, zero))  # type: ignore[assignment]
    return both


@gluon.jit
def scaled(low, high, words, x, scales, starts, SHORT: gl.constexpr, WARPS: gl.constexpr, GROUP: gl.constexpr,
           BITS: gl.constexpr, MMA: gl.constexpr, WORDS: gl.constexpr, A: gl.constexpr, B: gl.constexpr):  # fmt: skip
    """low, high [16 W, 8] += scale * (weights of the step @ x), for rows 0-15 and 16-31. SHORT: see `_group`."""
    a_low, a_high = unpack(words, WARPS, BITS, WORDS, A)
    if GROUP == 128:
        low, high = _group(low, high, a_low, a_high, x, gl.reshape(scales, (WARPS, 8, 2, 2)), starts[0], SHORT, WARPS, MMA)
    else:
        scale_0, scale_1 = gl.split(gl.permute(gl.reshape(scales, (WARPS, 8, 2, 2, 2)), (0, 1, 3, 4, 2)))  # k6 last
        low_0, low_1 = _halves(a_low, WARPS, A)
        high_0, high_1 = _halves(a_high, WARPS, A)
        x_0, x_1 = _groups(x, B)
        low, high = _group(low, high, low_0, high_0, x_0, scale_0, starts[0], SHORT, WARPS, MMA)
        low, high = _group(low, high, low_1, high_1, x_1, scale_1, starts[1], SHORT, WARPS, MMA)
    return low, high


@gluon.jit
def _groups(x, B: gl.constexpr):
    """B operand [128, 8] -> those of the two groups of 64."""
    x_0, x_1 = gl.split(gl.permute(gl.reshape(x, (2, 64, 8)), (1, 2, 0)))
    return gl.convert_layout(x_0, B, assert_trivial=True), gl.convert_layout(x_1, B, assert_trivial=True)


@gluon.jit
def _group(low, high, a_low, a_high, x, scales, start, SHORT: gl.constexpr, WARPS: gl.constexpr, MMA: gl.constexpr):
    """One group's products. SHORT adds the codes' offset afterwards: three short chains of mma where few warps could hide
    a long one, for eight more additions."""
    zero = gl.zeros([16 * WARPS, 8], gl.float32, MMA)
    scale_low, scale_high = _columns(scales, WARPS, MMA)
    if SHORT:
        low += (mma_v2(a_low, x, zero) + start) * scale_low
        high += (mma_v2(a_high, x, zero) + start) * scale_high
    else:
        low += mma_v2(a_low, x, start) * scale_low
        high += mma_v2(a_high, x, start) * scale_high
    return low, high


@gluon.jit
def _halves(a, WARPS: gl.constexpr, A: gl.constexpr):
    """[16 W, 128] -> the two [16 W, 64] of k6."""
    first, second = gl.split(gl.permute(gl.reshape(a, (16 * WARPS, 2, 64)), (0, 2, 1)))
    return gl.convert_layout(first, A, assert_trivial=True), gl.convert_layout(second, A, assert_trivial=True)


@gluon.jit
def _columns(scales, WARPS: gl.constexpr, MMA: gl.constexpr):
    """[W, r2-0, r4, r3] -> column vectors for rows 0-15 and 16-31."""
    low, high = gl.split(gl.reshape(gl.permute(scales, (0, 3, 1, 2)), (16 * WARPS, 2)))
    column: gl.constexpr = gl.SliceLayout(1, MMA)
    return (
        gl.convert_layout(low, column, assert_trivial=True)[:, None],
        gl.convert_layout(high, column, assert_trivial=True)[:, None],
    )


@gluon.jit
def fetch(ring_words, ring_scales, at, words, scales):
    """Starts the copies of a step into the ring's place `at`."""
    async_copy.async_copy_global_to_shared(ring_words.index(at), words)
    async_copy.async_copy_global_to_shared(ring_scales.index(at), scales)


@gluon.jit
def activation(gate, up, row, BITS: gl.constexpr):
    """silu(gate) * up of raw sums in float16, as the second product's input: for int4 divided by 16 where bit 1 of row is set.

    Beyond float16's range it saturates; NaN stays NaN.
    """
    gate *= UNSCALE
    up *= UNSCALE
    h = gate / (1.0 + gl.exp(-gate)) * up
    if BITS == 4:
        h *= gl.where((row & 2) == 0, 1.0, 0.0625)
    h = gl.where(h > 65504.0, 65504.0, gl.where(h < -65504.0, -65504.0, h))
    return h.to(gl.float16)
