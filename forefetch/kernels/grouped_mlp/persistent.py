"""Both products of a routed expert with weights in fragment order, in one launch of one-warp programs that stay.

Work is cut into items of 32 weight rows and all inputs: first every unit's gate/up items, then every unit's down items, dealt
out in turn. A program streams codes through a ring of D stages in shared memory; the ring runs on across items, since where the
next item's weights lie is known an item ahead, so loading never pauses. Sums of a row are made by one warp in one order.

A down item needs all gate/up items of its unit: each adds one to the unit's counter after its stores (release), and the down
item looks at the counter before it reads h. Gate/up items wait for nothing and come first, so this ends if all programs are
resident, which the launch sees to; the wait is bounded and raises `fault` otherwise. h is read through L2 (.cg): L1 is not
coherent, and an acquire would throw the SM's whole L1 away for each item.
"""

from __future__ import annotations

from typing import Any

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy

from forefetch.kernels.grouped_mlp import mma

_PATIENCE = gl.constexpr(1 << 16)  # looks at a counter, about a microsecond each
_WAIT = gl.constexpr("griddepcontrol.wait; griddepcontrol.launch_dependents; mov.b32 $0, $1;")


def layouts(group: int, bits: int, experts: int) -> dict[str, Any]:
    """`mma.layouts` of one warp, and a layout for the experts' counts."""
    padded = max(32, 1 << (experts - 1).bit_length())
    counts = gl.BlockedLayout([padded // 32], [32], [1], [0])
    return {**mma.layouts(1, group, bits), "EXPERTS": counts, "EP": padded}


@gluon.jit(do_not_specialize=["stride", "room"])
def experts(
    x, pool, pool_half, slot_of, counts, table, h, h_half, y, ready, fault, constants, room, stride,
    H: gl.constexpr, W: gl.constexpr, E: gl.constexpr, K: gl.constexpr, D: gl.constexpr, SHORT: gl.constexpr, PDL: gl.constexpr,
    WARPS: gl.constexpr, GROUP: gl.constexpr, BITS: gl.constexpr, MMA: gl.constexpr, A: gl.constexpr, B: gl.constexpr,
    WORDS: gl.constexpr, COPY: gl.constexpr, SCALES: gl.constexpr, SCALE_COPY: gl.constexpr, INPUTS: gl.constexpr,
    EXPERTS: gl.constexpr, EP: gl.constexpr,
):  # fmt: skip
    """y [P, H] float32 for each pair. x [T, H / 2] and h [P, W / 2] as int32: two prepared halves. stride in 2 KB."""
    HALVES: gl.constexpr = 32 * (128 // GROUP)
    plain: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    words = gl.allocate_shared_memory(gl.int32, [D, 128 * BITS], plain)
    scales = gl.allocate_shared_memory(gl.float16, [D, HALVES], plain)
    eights = mma.offset(constants, WARPS, GROUP, A)
    item = gl.program_id(0)
    if PDL:
        item = gl.inline_asm_elementwise(_WAIT, "=r,r", [item], dtype=gl.int32, is_pure=False, pack=1)
    e = gl.arange(0, EP, EXPERTS)
    units = (gl.load(counts + gl.minimum(e, E - 1)) + 7) // 8
    units = gl.where(e < E, units, 0)
    first = gl.associative_scan(units, 0, _add) - units
    total = gl.sum(units, 0)
    gates = total * (W // 16)
    items = gates + total * (H // 32)
    if item < items:
        lists = (first, slot_of, counts, table, room)
        ring = (words, scales, pool + gl.arange(0, 128 * BITS, COPY), pool_half + gl.arange(0, HALVES, SCALE_COPY))
        here = _read(item, gates, lists, H, W, MMA, INPUTS)
        at_words, at_scales = _weights(item, gates, here[0], stride, H, W, GROUP, BITS)
        for stage in gl.static_range(D - 1):
            _fetch(ring, stage, at_words + stage * (BITS // 4), at_scales + stage * (128 // GROUP))
            async_copy.commit_group()
        state = (item, here, at_words, at_scales, 0)
        state = _phase(state, gates, items, x, h_half, lists, ring, eights, ready, fault, stride,
                       True, H, W, K, D, SHORT, GROUP, BITS, MMA, A, B, WORDS, SCALES, INPUTS)  # fmt: skip
        state = _phase(state, gates, items, h, y, lists, ring, eights, ready, fault, stride,
                       False, H, W, K, D, SHORT, GROUP, BITS, MMA, A, B, WORDS, SCALES, INPUTS)  # fmt: skip
        async_copy.wait_group(0)


@gluon.jit
def _phase(
    state, gates, items, source, to, lists, ring, eights, ready, fault, stride, GATE: gl.constexpr, H: gl.constexpr,
    W: gl.constexpr, K: gl.constexpr, D: gl.constexpr, SHORT: gl.constexpr, GROUP: gl.constexpr, BITS: gl.constexpr,
    MMA: gl.constexpr, A: gl.constexpr, B: gl.constexpr, WORDS: gl.constexpr, SCALES: gl.constexpr, INPUTS: gl.constexpr,
):  # fmt: skip
    """A program's items of one product, from state = (item, its unit, where its weights are, the ring's place). Its first
    D - 1 stages are on their way, and those of the item after the last will be, whichever product that belongs to."""
    STEPS: gl.constexpr = (H if GATE else W) // 128
    UNROLL: gl.constexpr = 2 if STEPS % 2 == 0 else 1
    item, here, at_words, at_scales, at = state
    programs = gl.num_programs(0)
    end = gates if GATE else items
    if item < end:
        after = _read(gl.minimum(item + programs, items - 1), gates, lists, H, W, MMA, INPUTS)
        if not GATE:
            _await(gl.load(ready + here[4], volatile=True), ready + here[4], fault, W)
        rows = _rows(here, GATE, K, H, W, INPUTS)
        x = _load(source, rows, GATE, INPUTS)
        while item < end:
            # What the next item needs was asked for an item ago; now ask for what the one after it needs.
            following = item + programs
            next_words, next_scales = _weights(following, gates, after[0], stride, H, W, GROUP, BITS)
            later = _read(gl.minimum(following + programs, items - 1), gates, lists, H, W, MMA, INPUTS)
            seen = W // 16 if GATE else gl.load(ready + after[4], volatile=True)
            next_rows = _rows(after, GATE, K, H, W, INPUTS)
            low = gl.zeros([16, 8], gl.float32, MMA)
            high = gl.zeros([16, 8], gl.float32, MMA)
            for outer in range(0, STEPS, UNROLL):
                for inner in gl.static_range(UNROLL):
                    step = outer + inner
                    async_copy.wait_group(D - 2)
                    current = ring[0].index(at).load(gl.SliceLayout(1, WORDS))
                    scale = ring[1].index(at).load(SCALES).to(gl.float32)
                    _fetch_ahead(ring, at, step + D - 1, (at_words, at_scales), (next_words, next_scales), following < items,
                                 STEPS, D, GROUP, BITS)  # fmt: skip
                    from_rows = rows + (step + 1)
                    if inner == UNROLL - 1:
                        leaving = (step == STEPS - 1) & (following < end)
                        if not GATE:
                            _await(gl.where(leaving, seen, W // 16), ready + after[4], fault, W)
                        from_rows = gl.where(leaving, next_rows, rows + gl.minimum(step + 1, STEPS - 1))
                    x_next = _load(source, from_rows, GATE, INPUTS)
                    operand = mma.operand(x, INPUTS, B)
                    starts = mma.starts(operand, eights, 1, GROUP, MMA, B)
                    low, high = mma.scaled(low, high, current, operand, scale, starts, SHORT, 1, GROUP, BITS, MMA, WORDS, A, B)
                    x = x_next
                    at = gl.where(at == D - 1, 0, at + 1)
            _store(item, gates, here, low, high, to, ready, GATE, H, W, BITS, MMA)
            item, here, after, rows = following, after, later, next_rows
            at_words, at_scales = next_words, next_scales
    return item, here, at_words, at_scales, at


@gluon.jit
def _add(a, b):
    return a + b


@gluon.jit
def _read(item, gates, lists, H: gl.constexpr, W: gl.constexpr, MMA: gl.constexpr, INPUTS: gl.constexpr):
    """An item's slot, pairs left of its expert, pair of each input row, of each output column, unit, first pair: as loaded,
    so that nothing waits for them yet."""
    first, slot_of, counts, table, room = lists
    unit = gl.where(item < gates, item // (W // 16), (item - gates) // (H // 32))
    expert = gl.sum((first <= unit).to(gl.int32), 0) - 1
    begin = (unit - gl.max(gl.where(first <= unit, first, 0), 0)) * 8
    n = gl.arange(0, 8, gl.SliceLayout(1, gl.SliceLayout(2, INPUTS)))
    column = gl.arange(0, 8, gl.SliceLayout(0, MMA))
    pairs = table + expert * room + begin
    count = gl.load(counts + expert)
    return gl.load(slot_of + expert), count - begin, gl.load(pairs + n), gl.load(pairs + column), unit, gl.load(pairs)


@gluon.jit
def _weights(item, gates, slot, stride, H: gl.constexpr, W: gl.constexpr, GROUP: gl.constexpr, BITS: gl.constexpr):
    """Where an item's codes begin in units of 512 words, and its scales in units of 32 halves."""
    gate = item < gates
    step = gl.where(gate, item % (W // 16) * (H // 128), W * H // 2048 + (item - gates) % (H // 32) * (W // 128))
    base = slot.to(gl.int64) * stride
    return base + step * (BITS // 4), base * 32 + 3 * W * H * BITS // 512 + step * (128 // GROUP)


@gluon.jit
def _fetch(ring, at, at_words, at_scales):
    mma.fetch(ring[0], ring[1], at, ring[2] + at_words * 512, ring[3] + at_scales * 32)


@gluon.jit
def _fetch_ahead(
    ring, at, ahead, own, following, more, STEPS: gl.constexpr, D: gl.constexpr, GROUP: gl.constexpr, BITS: gl.constexpr
):
    """Starts the copies of step `ahead` of an item whose weights are at `own`, or, behind its end, of the `following` one, if
    there is one more; into the place that was read last. A group of copies in any case, so that waits can count them."""
    inside = ahead < STEPS
    if inside | more:
        place = gl.where(at == 0, D - 1, at - 1)
        words = gl.where(inside, own[0] + ahead * (BITS // 4), following[0] + (ahead - STEPS) * (BITS // 4))
        scales = gl.where(inside, own[1] + ahead * (128 // GROUP), following[1] + (ahead - STEPS) * (128 // GROUP))
        _fetch(ring, place, words, scales)
    async_copy.commit_group()


@gluon.jit
def _rows(here, GATE: gl.constexpr, K: gl.constexpr, H: gl.constexpr, W: gl.constexpr, INPUTS: gl.constexpr):
    """Offsets of a unit's eight input rows in units of 64 words; empty places repeat the first row, which costs no bytes."""
    n = gl.arange(0, 8, gl.SliceLayout(1, gl.SliceLayout(2, INPUTS)))
    pair = gl.where(n < here[1], here[2], here[5])
    return pair // K * (H // 128) if GATE else pair * (W // 128)


@gluon.jit
def _load(source, rows, GATE: gl.constexpr, INPUTS: gl.constexpr):
    lane = gl.arange(0, 64, gl.SliceLayout(0, gl.SliceLayout(2, INPUTS)))
    pointers = source + (rows * 64)[:, None] + lane[None, :]  # multiplied last, or the alignment is lost to the compiler
    return gl.load(pointers) if GATE else gl.load(pointers, cache_modifier=".cg")


@gluon.jit
def _store(
    item, gates, here, low, high, to, ready, GATE: gl.constexpr, H: gl.constexpr, W: gl.constexpr, BITS: gl.constexpr,
    MMA: gl.constexpr,
):  # fmt: skip
    row = gl.arange(0, 16, gl.SliceLayout(1, MMA))
    mask = (gl.arange(0, 8, gl.SliceLayout(0, MMA)) < here[1])[None, :] & (row[:, None] >= 0)
    if GATE:
        at = to + here[3][None, :] * W + (item % (W // 16) * 16 + row)[:, None]
        gl.store(at, mma.activation(low, high, row[:, None], BITS), mask=mask)
        gl.thread_barrier()
        gl.atomic_add(ready + here[4], 1, sem="release", scope="gpu")
    else:
        at = to + here[3][None, :] * H + ((item - gates) % (H // 32) * 32 + row)[:, None]
        gl.store(at, low * mma.UNSCALE, mask=mask)
        gl.store(at + 16, high * mma.UNSCALE, mask=mask)


@gluon.jit
def _await(seen, counter, fault, W: gl.constexpr):
    """Until all gate/up items of a unit are done. Patience at an end means a launch that was not resident: `fault` says so."""
    tries = 0
    while (seen < W // 16) & (tries < _PATIENCE):
        seen = gl.load(counter, volatile=True)
        tries += 1
    if tries == _PATIENCE:
        gl.store(fault, 1)
