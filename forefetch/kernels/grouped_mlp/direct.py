"""The two products for a few tokens, where latency counts and not bytes: fragment order, a launch each.

A program takes 32 weight rows of one pair, or 64, with all of their codes in flight at once; its warps share the inputs out
among themselves and their sums are added in a fixed order. Whatever does not need the codes is done before they arrive. Pairs
are not grouped by expert, so routing needs no kernel: a program reads its expert from `ids`, or finds it in the logits itself.
Of the tensor core's eight columns one is used. Nor does the sum over a token's experts need one: the last of a token's
programs for some columns adds their rows up, in the order of the pairs whoever it is.

With programmatic dependent launch the second product's programs fill their share of the machine while the first still runs,
and wait for it only when their weights are on the way. Whatever they read before that wait was there before the first product
began, because that one lets its dependents start only after its own wait.
"""

from __future__ import annotations

from typing import Any

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy

from forefetch.kernels.gate.triton import UNIT
from forefetch.kernels.grouped_mlp import mma

_WAIT = gl.constexpr("griddepcontrol.wait; mov.b32 $0, $1;")
_RELEASE = gl.constexpr("griddepcontrol.launch_dependents; mov.b32 $0, $1;")
_WARP = gl.constexpr("{ .reg .b32 t; mov.u32 t, %tid.x; shr.u32 t, t, 5; add.u32 $0, t, $1; }")
_PACK = gl.constexpr("cvt.rn.f16x2.f32 $0, $1, $2;")
_LOWEST = gl.constexpr(-0x80000000)


def layouts(warps: int, group: int, bits: int, experts: int) -> dict[str, Any]:
    """`mma.layouts`, and a layout for the logits of one row."""
    padded, doublings = max(32, 1 << (experts - 1).bit_length()), warps.bit_length() - 1
    own = [[32 << bit] for bit in range((padded // 32).bit_length() - 1)]
    return {
        **mma.layouts(warps, group, bits),
        "COLUMNS": gl.BlockedLayout([1], [32], [warps], [0]),
        "EXPERTS": gl.DistributedLinearLayout(own, [[1], [2], [4], [8], [16]], [[0]] * doublings, [], [padded]),
    }


@gluon.jit(do_not_specialize=["stride", "out_row"])
def product(
    source, ids, weights, logits, slot_of, pool, pool_half, to, out, live, done, constants, stride, row_stride, out_row,
    H: gl.constexpr, W: gl.constexpr, E: gl.constexpr, K: gl.constexpr, GATE: gl.constexpr, TYPE: gl.constexpr,
    TILES: gl.constexpr, CHOOSE: gl.constexpr, RENORMALISE: gl.constexpr, SUM: gl.constexpr, PDL: gl.constexpr,
    EXPERTS: gl.constexpr, COLUMNS: gl.constexpr, WARPS: gl.constexpr, GROUP: gl.constexpr, BITS: gl.constexpr,
    MMA: gl.constexpr, A: gl.constexpr, B: gl.constexpr, WORDS: gl.constexpr, COPY: gl.constexpr, SCALES: gl.constexpr,
    SCALE_COPY: gl.constexpr, INPUTS: gl.constexpr,
):  # fmt: skip
    """GATE: h [P, W] float16 from x [T, H] as int32 (rows `row_stride` words apart, of TYPE). Else y [P, H] from h as int32,
    and with SUM out [T, H] from y.

    A program takes TILES tiles of a pair. CHOOSE: experts come from logits [T, E] of 16 bits (contiguous); the first product
    also writes them to ids and weights, once its own codes are on the way.
    """
    BLOCKS: gl.constexpr = (W // 16 if GATE else H // 32) // TILES
    STEPS: gl.constexpr = (H if GATE else W) // 128
    EACH: gl.constexpr = STEPS // WARPS
    program = gl.program_id(0)
    if PDL and GATE:
        program = gl.inline_asm_elementwise(_WAIT, "=r,r", [program], dtype=gl.int32, is_pure=False, pack=1)
    if PDL:
        program = gl.inline_asm_elementwise(_RELEASE, "=r,r", [program], dtype=gl.int32, is_pure=False, pack=1)
    pair, block = program // BLOCKS, program % BLOCKS
    row = pair // K
    keys, slots = _candidates(ids + pair, logits + row * E, slot_of, E, CHOOSE, EXPERTS)
    if GATE:
        xs = _inputs(source, row, row_stride, EACH, INPUTS)
    mine, slot = _choice(keys, slots, pair % K, CHOOSE)
    note = (live, ids, weights, logits + row * E, pair, keys, mine)
    if slot >= 0:
        first = block * (TILES * STEPS) + (0 if GATE else W * H // 2048)  # of the tiles' steps in the blob
        ring = _fetched(slot.to(gl.int64) * stride, first, pool, pool_half, STEPS, TILES, H, W, WARPS, GROUP, BITS, COPY,
                        SCALE_COPY)  # fmt: skip
        if GATE:
            _note(note, block, 1, CHOOSE, E, K, RENORMALISE, EXPERTS)
            inputs = xs
        else:
            inputs = _inputs(source, _awaited(pair, PDL), W // 2, EACH, INPUTS)
        eights = mma.offset(constants, WARPS, GROUP, A)
        operands, starts = _operands(inputs, eights, EACH, GATE, TYPE, WARPS, GROUP, BITS, MMA, B, INPUTS)
        at = to + pair * (W if GATE else H) + block * (TILES * (16 if GATE else 32))
        for tile in gl.static_range(TILES):
            low, high = _sums(ring, tile, TILES, operands, starts, EACH, WARPS, GROUP, BITS, MMA, A, B, WORDS, SCALES)
            _store(at + tile * (16 if GATE else 32), low, high, GATE, WARPS, BITS)
    elif GATE:
        _note(note, block, 0, CHOOSE, E, K, RENORMALISE, EXPERTS)
    else:  # who waits for this product must find the first one done
        _awaited(pair, PDL)
    if SUM and not GATE:
        _sum_last(to, out + row * out_row, weights, live, done + row * BLOCKS + block, row * K, block * (32 * TILES), H, K,
                  32 * TILES, COLUMNS)  # fmt: skip


@gluon.jit
def _awaited(pair, PDL: gl.constexpr):
    """The pair, once the first product is done."""
    if PDL:
        pair = gl.inline_asm_elementwise(_WAIT, "=r,r", [pair], dtype=gl.int32, is_pure=False, pack=1)
    return pair


@gluon.jit
def _fetched(
    base, first, pool, pool_half, STEPS: gl.constexpr, TILES: gl.constexpr, H: gl.constexpr, W: gl.constexpr,
    WARPS: gl.constexpr, GROUP: gl.constexpr, BITS: gl.constexpr, COPY: gl.constexpr, SCALE_COPY: gl.constexpr,
):  # fmt: skip
    """Starts the copies of all steps of the tiles, each warp its own steps, a group of copies each. `base` counts 2 KB,
    `first` steps."""
    EACH: gl.constexpr = STEPS // WARPS
    SIZE: gl.constexpr = 128 * BITS  # words of a step
    HALVES: gl.constexpr = 32 * (128 // GROUP)
    plain: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    words = gl.allocate_shared_memory(gl.int32, [TILES * EACH, SIZE * WARPS], plain)
    scales = gl.allocate_shared_memory(gl.float16, [TILES * EACH, HALVES * WARPS], plain)
    i = gl.arange(0, SIZE * WARPS, COPY)
    j = gl.arange(0, HALVES * WARPS, SCALE_COPY)
    from_words = pool + base * 512 + (first + i // SIZE * EACH) * SIZE + i % SIZE
    at = base * 32 + 3 * W * H * BITS // 512 + (first + j // HALVES * EACH) * (128 // GROUP)
    from_scales = pool_half + at * 32 + j % HALVES
    for tile in gl.static_range(TILES):
        for step in gl.static_range(EACH):
            ahead = tile * STEPS + step
            mma.fetch(words, scales, tile * EACH + step, from_words + ahead * SIZE, from_scales + ahead * HALVES)
            async_copy.commit_group()
    return words, scales


@gluon.jit
def _operands(
    xs, eights, EACH: gl.constexpr, GATE: gl.constexpr, TYPE: gl.constexpr, WARPS: gl.constexpr, GROUP: gl.constexpr,
    BITS: gl.constexpr, MMA: gl.constexpr, B: gl.constexpr, INPUTS: gl.constexpr,
):  # fmt: skip
    """Each step's inputs as tensor cores take them, and what the codes' offset makes of them: while codes are on the way."""
    operands = ()
    starts = ()
    for step in gl.static_range(EACH):
        x = mma.operand(_prepare(xs[step], TYPE, BITS, INPUTS) if GATE else xs[step], INPUTS, B)
        operands = operands + (x,)  # type: ignore[assignment]  # noqa: RUF005
        starts = starts + (mma.starts(x, eights, WARPS, GROUP, MMA, B),)  # type: ignore[assignment]  # noqa: RUF005
    return operands, starts


@gluon.jit
def _sums(
    ring, tile: gl.constexpr, TILES: gl.constexpr, operands, starts, EACH: gl.constexpr, WARPS: gl.constexpr,
    GROUP: gl.constexpr, BITS: gl.constexpr, MMA: gl.constexpr, A: gl.constexpr, B: gl.constexpr, WORDS: gl.constexpr,
    SCALES: gl.constexpr,
):  # fmt: skip
    """Each warp's sums [16 W, 8] over its own EACH steps of one of the tiles."""
    low = gl.zeros([16 * WARPS, 8], gl.float32, MMA)
    high = gl.zeros([16 * WARPS, 8], gl.float32, MMA)
    for step in gl.static_range(EACH):
        async_copy.wait_group(TILES * EACH - 1 - tile * EACH - step)
        current = ring[0].index(tile * EACH + step).load(gl.SliceLayout(1, WORDS))
        scale = ring[1].index(tile * EACH + step).load(SCALES).to(gl.float32)
        low, high = mma.scaled(low, high, current, operands[step], scale, starts[step], True, WARPS, GROUP, BITS, MMA, WORDS,
                               A, B)  # fmt: skip
    return low, high


@gluon.jit
def _store(at, low, high, GATE: gl.constexpr, WARPS: gl.constexpr, BITS: gl.constexpr):
    """A tile's sums [16 W, 8], which have equal columns: added up in the warps' order, and stored from `at` on."""
    both = gl.join(gl.sum(low, 1), gl.sum(high, 1)) * 0.125  # eight equal numbers: exact
    low, high = gl.split(gl.sum(gl.reshape(both, (WARPS, 16, 2)), 0))
    r = gl.arange(0, 16, low.type.layout)
    if GATE:
        gl.store(at + r, mma.activation(low, high, r, BITS))
    else:
        gl.store(at + r, low * mma.UNSCALE)
        gl.store(at + r + 16, high * mma.UNSCALE)


@gluon.jit
def _sum_last(
    y, out, weights, live, done, pair, column, H: gl.constexpr, K: gl.constexpr, SIZE: gl.constexpr, COLUMNS: gl.constexpr
):
    """Whoever is the last of a token's K programs of these columns adds their rows up, as `routing.combine` does."""
    gl.thread_barrier()
    if gl.atomic_add(done, 1, sem="acq_rel", scope="gpu") == K - 1:
        gl.store(done, 0)
        at = column + gl.arange(0, SIZE, COLUMNS)
        total = gl.zeros([SIZE], gl.float32, COLUMNS)
        for k in gl.static_range(K):
            held, weight = gl.load(live + pair + k) != 0, gl.load(weights + pair + k)
            row = gl.load(y + (pair + k) * H + at, cache_modifier=".cg")
            total += gl.where(held, weight * row, 0.0)
        gl.store(out + at, total.to(out.dtype.element_ty))


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
def _prepare(words, TYPE: gl.constexpr, BITS: gl.constexpr, INPUTS: gl.constexpr):
    """Words of two inputs of TYPE -> two float16; for int4 divided by 16 where the input's bit 1, the word's bit 0, is set."""
    if TYPE == gl.bfloat16:  # noqa: SIM300  it is not a constant of Python's
        first = (words << 16).to(gl.float32, bitcast=True)
        second = (words & -65536).to(gl.float32, bitcast=True)
    else:
        first = (words & 0xFFFF).to(gl.int16).to(gl.float16, bitcast=True).to(gl.float32)
        second = (words >> 16).to(gl.int16).to(gl.float16, bitcast=True).to(gl.float32)
    if BITS == 4:
        k = gl.arange(0, 64, gl.SliceLayout(0, gl.SliceLayout(2, INPUTS)))
        factor = gl.where((k & 1) == 0, 1.0, 0.0625)[None, :]
        first *= factor
        second *= factor
    return gl.inline_asm_elementwise(_PACK, "=r,r,r", [second, first], dtype=gl.int32, is_pure=True, pack=1)


@gluon.jit
def _candidates(id, logits, slot_of, E: gl.constexpr, CHOOSE: gl.constexpr, EXPERTS: gl.constexpr):
    """CHOOSE: the keys of a token's experts and the slots of them all, so that none waits for the choice. Else a pair's
    expert and its slot."""
    if CHOOSE:
        keys = _keys(logits, E, EXPERTS)
        slots = gl.load(slot_of + gl.minimum(gl.arange(0, EXPERTS.shape[0], EXPERTS), E - 1))
    else:
        keys = gl.load(id).to(gl.int32)
        slots = gl.where(keys >= 0, gl.load(slot_of + gl.maximum(keys, 0)), -1)
    return keys, slots


@gluon.jit
def _choice(keys, slots, rank, CHOOSE: gl.constexpr):
    """The key of this rank and its expert's slot."""
    mine, slot = keys, slots
    if CHOOSE:
        mine = _ranked(keys, rank)
        slot = gl.max(gl.where(keys == mine, slots, -1), 0)
    return mine, slot


@gluon.jit
def _keys(logits, E: gl.constexpr, EXPERTS: gl.constexpr):
    """Integers in the order of the logits, ties to the lower index, all distinct. E <= 1024, 16-bit logits."""
    expert = gl.arange(0, EXPERTS.shape[0], EXPERTS)
    bits = gl.load(logits + gl.minimum(expert, E - 1)).to(gl.int16, bitcast=True).to(gl.int32)
    key = gl.where(bits < 0, bits ^ 0x7FFF, bits) * 1024 + (1023 - expert)
    return gl.where(expert < E, key, _LOWEST)


@gluon.jit
def _ranked(keys, rank):
    """The key that `rank` others exceed."""
    best = gl.max(keys, 0)
    for _ in range(rank):
        keys = gl.where(keys == best, _LOWEST, keys)
        best = gl.max(keys, 0)
    return best


@gluon.jit
def _note(
    note, block, held: gl.constexpr, CHOOSE: gl.constexpr, E: gl.constexpr, K: gl.constexpr, RENORMALISE: gl.constexpr,
    EXPERTS: gl.constexpr,
):  # fmt: skip
    """A pair's first program leaves whether it counts; CHOOSE: also the expert of key `mine`, and what that counts."""
    live, ids, weights, logits, pair, keys, mine = note
    if block == 0:
        gl.store(live + pair, held)
        if CHOOSE:
            expert = gl.arange(0, EXPERTS.shape[0], EXPERTS)
            value = gl.load(logits + gl.minimum(expert, E - 1)).to(gl.float32)
            power = gl.exp(value - gl.max(gl.where(expert < E, value, float("-inf")), 0))
            counted = keys >= _ranked(keys, K - 1) if RENORMALISE else expert < E
            parts = (gl.where(counted, power, 0.0) * UNIT).to(gl.int64)  # as in `gate.triton.total_of`
            total = gl.sum(parts, 0).to(gl.float32) * (1.0 / UNIT)
            gl.store(ids + pair, 1023 - (mine & 1023))
            gl.store(weights + pair, gl.sum(gl.where(keys == mine, power, 0.0), 0) / total)
