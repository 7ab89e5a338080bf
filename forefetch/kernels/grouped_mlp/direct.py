"""The two products for a few tokens, where latency counts and not bytes: int4 in fragment order, a launch each.

A program takes 32 weight rows of one pair, with all of their codes in flight at once; its warps share the inputs out among
themselves and their sums are added in a fixed order. Pairs are not grouped by expert, so routing needs no kernel: a program
reads its expert from `ids`, or finds it in the logits itself. Of the tensor core's eight columns one is used.

With programmatic dependent launch the second product's programs fill their share of the machine while the first still runs,
and wait for it only when their weights are on the way. Whatever they read before that wait was there before the first product
began, because that one lets its dependents start only after its own wait.
"""

from __future__ import annotations

from typing import Any

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy

from forefetch.kernels.grouped_mlp import mma

_WAIT = gl.constexpr("griddepcontrol.wait; mov.b32 $0, $1;")
_RELEASE = gl.constexpr("griddepcontrol.launch_dependents; mov.b32 $0, $1;")
_WARP = gl.constexpr("{ .reg .b32 t; mov.u32 t, %tid.x; shr.u32 t, t, 5; add.u32 $0, t, $1; }")
_PACK = gl.constexpr("cvt.rn.f16x2.f32 $0, $1, $2;")
_LOWEST = gl.constexpr(-0x80000000)


def layouts(warps: int, group: int, experts: int) -> dict[str, Any]:
    """`mma.layouts`, a layout for the logits of one row, and one for the rows of a finished sum."""
    padded, bits = max(32, 1 << (experts - 1).bit_length()), warps.bit_length() - 1
    own = [[32 << bit] for bit in range((padded // 32).bit_length() - 1)]
    return {
        **mma.layouts(warps, group),
        "EXPERTS": gl.DistributedLinearLayout(own, [[1], [2], [4], [8], [16]], [[0]] * bits, [], [padded]),
        "ROWS": gl.BlockedLayout([1, 1], [16, 2], [1, warps], [0, 1]),
    }


@gluon.jit(do_not_specialize=["stride"])
def product(
    source, ids, weights, logits, slot_of, pool, pool_half, to, live, constants, stride, row_stride,
    H: gl.constexpr, W: gl.constexpr, E: gl.constexpr, K: gl.constexpr, GATE: gl.constexpr, TYPE: gl.constexpr,
    CHOOSE: gl.constexpr, RENORMALISE: gl.constexpr, PDL: gl.constexpr, EXPERTS: gl.constexpr, ROWS: gl.constexpr,
    WARPS: gl.constexpr, GROUP: gl.constexpr, MMA: gl.constexpr, A: gl.constexpr, B: gl.constexpr, WORDS: gl.constexpr,
    COPY: gl.constexpr, SCALES: gl.constexpr, SCALE_COPY: gl.constexpr, INPUTS: gl.constexpr,
):  # fmt: skip
    """GATE: h [P, W] float16 from x [T, H] as int32 (rows `row_stride` words apart, of TYPE). Else y [P, H] from h as int32.

    CHOOSE: experts come from logits [T, E] of 16 bits (contiguous), and are written to ids, weights by the first product.
    """
    TILES: gl.constexpr = W // 16 if GATE else H // 32
    STEPS: gl.constexpr = (H if GATE else W) // 128
    program = gl.program_id(0)
    if PDL and GATE:
        program = gl.inline_asm_elementwise(_WAIT, "=r,r", [program], dtype=gl.int32, is_pure=False, pack=1)
    if PDL:
        program = gl.inline_asm_elementwise(_RELEASE, "=r,r", [program], dtype=gl.int32, is_pure=False, pack=1)
    pair, tile = program // TILES, program % TILES
    if CHOOSE:
        expert, weight = _choose(logits + pair // K * E, pair % K, E, K, RENORMALISE, EXPERTS)
        if GATE and tile == 0:
            gl.store(ids + pair, expert)
            gl.store(weights + pair, weight)
    else:
        expert = gl.load(ids + pair).to(gl.int32)
    slot = gl.load(slot_of + gl.maximum(expert, 0))
    held = (expert >= 0) & (slot >= 0)
    if GATE and tile == 0:
        gl.store(live + pair, held.to(gl.int32))
    if held:
        first = tile * STEPS + (0 if GATE else W * H // 2048)  # of the tile's steps in the blob
        base = slot.to(gl.int64) * stride
        low, high = _sums(source, pair // K if GATE else pair, row_stride if GATE else W // 2, base, first, pool, pool_half,
                          constants, STEPS // WARPS, H, W, GATE, TYPE, PDL, WARPS, GROUP, MMA, A, B, WORDS, COPY, SCALES,
                          SCALE_COPY, INPUTS)  # fmt: skip
        low, high = _over_warps(low, WARPS, ROWS), _over_warps(high, WARPS, ROWS)
        r = gl.arange(0, 16, gl.SliceLayout(1, ROWS))
        mask = (gl.arange(0, 8, gl.SliceLayout(0, ROWS)) == 0)[None, :] & (r >= 0)[:, None]
        at = to + pair * (W if GATE else H) + (tile * (16 if GATE else 32) + r)[:, None] + gl.zeros([16, 8], gl.int32, ROWS)
        if GATE:
            gl.store(at, mma.activation(low, high, r), mask=mask)
        else:
            gl.store(at, low * mma.UNSCALE, mask=mask)
            gl.store(at + 16, high * mma.UNSCALE, mask=mask)


@gluon.jit
def _sums(
    source, row, row_words, base, first, pool, pool_half, constants, EACH: gl.constexpr,
    H: gl.constexpr, W: gl.constexpr, GATE: gl.constexpr, TYPE: gl.constexpr, PDL: gl.constexpr, WARPS: gl.constexpr,
    GROUP: gl.constexpr, MMA: gl.constexpr, A: gl.constexpr, B: gl.constexpr, WORDS: gl.constexpr, COPY: gl.constexpr,
    SCALES: gl.constexpr, SCALE_COPY: gl.constexpr, INPUTS: gl.constexpr,
):  # fmt: skip
    """Each warp's sums [16 W, 8] over its own EACH steps of a row of inputs; `base` and `first` count steps of 512 words."""
    HALVES: gl.constexpr = 32 * (128 // GROUP)
    plain: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    ring_words = gl.allocate_shared_memory(gl.int32, [EACH, 512 * WARPS], plain)
    ring_scales = gl.allocate_shared_memory(gl.float16, [EACH, HALVES * WARPS], plain)
    i = gl.arange(0, 512 * WARPS, COPY)
    j = gl.arange(0, HALVES * WARPS, SCALE_COPY)
    words = pool + (base + first + i // 512 * EACH) * 512 + i % 512
    at = base * 32 + 3 * W * H // 128 + (first + j // HALVES * EACH) * (128 // GROUP)
    scales = pool_half + at * 32 + j % HALVES
    for step in gl.static_range(EACH):
        mma.fetch(ring_words, ring_scales, step, words + step * 512, scales + step * HALVES)
        async_copy.commit_group()
    eights = mma.offset(constants, WARPS, GROUP, A)
    if PDL and not GATE:
        row = gl.inline_asm_elementwise(_WAIT, "=r,r", [row], dtype=gl.int32, is_pure=False, pack=1)
    xs = _inputs(source, row, row_words, EACH, INPUTS)
    low = gl.zeros([16 * WARPS, 8], gl.float32, MMA)
    high = gl.zeros([16 * WARPS, 8], gl.float32, MMA)
    for step in gl.static_range(EACH):
        async_copy.wait_group(EACH - 1 - step)
        x = mma.operand(_prepare(xs[step], TYPE, INPUTS) if GATE else xs[step], INPUTS, B)
        current = ring_words.index(step).load(gl.SliceLayout(1, WORDS))
        scale = ring_scales.index(step).load(SCALES).to(gl.float32)
        low, high = mma.scaled(low, high, current, x, scale, eights, True, WARPS, GROUP, MMA, WORDS, A, B)
    return low, high


@gluon.jit
def _over_warps(sums, WARPS: gl.constexpr, ROWS: gl.constexpr):
    """[16 W, 8] -> [16, 8], in the warps' order."""
    return gl.convert_layout(gl.sum(gl.reshape(sums, (WARPS, 16, 8)), 0), ROWS)


@gluon.jit
def _inputs(source, row, row_words, EACH: gl.constexpr, INPUTS: gl.constexpr):
    """The words of this warp's steps, [8, 64] each with equal rows.

    The layout says that all warps hold the same values. They do not: the pointer takes the warp's number from the hardware, so
    that each has the inputs of its own steps. That is sound because nothing here moves values between warps before the sums.
    """
    n = gl.arange(0, 8, gl.SliceLayout(1, gl.SliceLayout(2, INPUTS)))
    k = gl.arange(0, 64, gl.SliceLayout(0, gl.SliceLayout(2, INPUTS)))
    warp = gl.inline_asm_elementwise(_WARP, "=r,r", [n * 0], dtype=gl.int32, is_pure=True, pack=1)
    at = source + (row * row_words + warp * (EACH * 64))[:, None] + k[None, :]
    xs = ()
    for step in gl.static_range(EACH):
        xs = xs + (gl.load(at + step * 64),)  # type: ignore[assignment]  # noqa: RUF005
    return xs


@gluon.jit
def _prepare(words, TYPE: gl.constexpr, INPUTS: gl.constexpr):
    """Words of two inputs of TYPE -> two float16, divided by 16 where bit 1 of the input, bit 0 of the word, is set."""
    k = gl.arange(0, 64, gl.SliceLayout(0, gl.SliceLayout(2, INPUTS)))
    factor = gl.where((k & 1) == 0, 1.0, 0.0625)[None, :]
    if TYPE == gl.bfloat16:  # noqa: SIM300  it is not a constant of Python's
        first = (words << 16).to(gl.float32, bitcast=True)
        second = (words & -65536).to(gl.float32, bitcast=True)
    else:
        first = (words & 0xFFFF).to(gl.int16).to(gl.float16, bitcast=True).to(gl.float32)
        second = (words >> 16).to(gl.int16).to(gl.float16, bitcast=True).to(gl.float32)
    return gl.inline_asm_elementwise(_PACK, "=r,r,r", [second * factor, first * factor], dtype=gl.int32, is_pure=True, pack=1)


@gluon.jit
def _choose(logits, rank, E: gl.constexpr, K: gl.constexpr, RENORMALISE: gl.constexpr, EXPERTS: gl.constexpr):
    """The expert with the `rank`-th largest logit (ties to the lower index), and its weight. E <= 1024, 16-bit logits."""
    EP: gl.constexpr = EXPERTS.shape[0]
    expert = gl.arange(0, EP, EXPERTS)
    value = gl.load(logits + gl.minimum(expert, E - 1))
    bits = value.to(gl.int16, bitcast=True).to(gl.int32)
    key = gl.where(bits < 0, bits ^ 0x7FFF, bits) * 1024 + (1023 - expert)  # distinct, in the logits' order
    key = gl.where(expert < E, key, _LOWEST)
    left = key
    mine = gl.max(key, 0)
    for k in gl.static_range(K):
        best = gl.max(left, 0)
        mine = gl.where(rank == k, best, mine)
        left = gl.where(left == best, _LOWEST, left)
    value = value.to(gl.float32)
    power = gl.exp(value - gl.max(gl.where(expert < E, value, float("-inf")), 0))
    counted = (left != key) if RENORMALISE else (expert < E)
    total = gl.sum(gl.where(counted, power, 0.0), 0)
    return 1023 - (mine & 1023), gl.sum(gl.where(key == mine, power, 0.0), 0) / total
