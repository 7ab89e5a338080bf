"""Both products of a routed expert with int4 weights in fragment order, in one launch of one-warp programs that stay.

Work is cut into items of 32 weight rows and all inputs: first every unit's gate/up items, then every unit's down items, dealt
out in turn. A program streams codes through a ring of D stages in shared memory; the ring runs on across items, since where the
next item's weights lie is known an item ahead, so loading never pauses. Sums of a row are made by one warp in one order.

A down item needs all gate/up items of its unit: each adds one to the unit's counter after its stores (release), and the down
item looks at the counter before it reads h. Gate/up items wait for nothing and come first, so this ends if all programs are
resident, which the launch sees to; the wait is bounded and raises `fault` otherwise. h is read through L2 (.cg): L1 is not
coherent, and an acquire would throw the SM's whole L1 away for each item.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy

from forefetch.kernels.grouped_mlp import mma

_WORDS = gl.constexpr(16)  # of a unit's record: HEADER + 8 pairs
_PATIENCE = gl.constexpr(1 << 21)  # looks at a counter, about a microsecond each
_WAIT = gl.constexpr("griddepcontrol.wait; griddepcontrol.launch_dependents; mov.b32 $0, $1;")


@gluon.jit(do_not_specialize=["stride"])
def experts(
    x, pool, pool_half, records, totals, h, h_half, y, ready, fault, constants, stride,
    H: gl.constexpr, W: gl.constexpr, K: gl.constexpr, D: gl.constexpr, PDL: gl.constexpr,
    WARPS: gl.constexpr, GROUP: gl.constexpr, MMA: gl.constexpr, A: gl.constexpr, B: gl.constexpr, WORDS: gl.constexpr,
    COPY: gl.constexpr, SCALES: gl.constexpr, SCALE_COPY: gl.constexpr, INPUTS: gl.constexpr,
):  # fmt: skip
    """y [P, H] float32 for each pair. x [T, H / 2], h [P, W / 2] as int32: two prepared halves. stride in 2 KB."""
    item = gl.program_id(0)
    if PDL:
        item = gl.inline_asm_elementwise(_WAIT, "=r,r", [item], dtype=gl.int32, is_pure=False, pack=1)
    units = gl.load(totals)
    gates = units * (W // 16)
    items = gates + units * (H // 32)
    if item < items:
        plain: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
        ring_words = gl.allocate_shared_memory(gl.int32, [D, 512], plain)
        ring_scales = gl.allocate_shared_memory(gl.float16, [D, 32 * (128 // GROUP)], plain)
        eights = mma.offset(constants, 1, GROUP, A)
        cursor = _read(item, items, gates, records, H, W, MMA, INPUTS)
        words, scales = _weights(item, gates, cursor[0], stride, H, W, GROUP)
        lane_words = pool + gl.arange(0, 512, COPY)
        lane_scales = pool_half + gl.arange(0, 32 * (128 // GROUP), SCALE_COPY)
        for stage in gl.static_range(D - 1):
            _fetch(ring_words, ring_scales, stage, lane_words, lane_scales, words + stage, scales + stage * (128 // GROUP))
            async_copy.commit_group()
        at = 0
        item, cursor, words, scales, at = _phase(
            item, gates, items, cursor, words, scales, at, x, lane_words, lane_scales, records, ready, fault, h_half,
            ring_words, ring_scales, eights, stride, True, H, W, K, D, GROUP, MMA, A, B, WORDS, SCALES, INPUTS,
        )  # fmt: skip
        item, cursor, words, scales, at = _phase(
            item, gates, items, cursor, words, scales, at, h, lane_words, lane_scales, records, ready, fault, y, ring_words,
            ring_scales, eights, stride, False, H, W, K, D, GROUP, MMA, A, B, WORDS, SCALES, INPUTS,
        )  # fmt: skip
        async_copy.wait_group(0)


@gluon.jit
def _phase(  # noqa: PLR0915  one loop, which no call may split: Triton would not inline its state
    item, gates, items, cursor, words, scales, at, source, lane_words, lane_scales, records, ready, fault, to, ring_words,
    ring_scales, eights, stride, GATE: gl.constexpr, H: gl.constexpr, W: gl.constexpr, K: gl.constexpr, D: gl.constexpr,
    GROUP: gl.constexpr, MMA: gl.constexpr, A: gl.constexpr, B: gl.constexpr, WORDS: gl.constexpr, SCALES: gl.constexpr,
    INPUTS: gl.constexpr,
):  # fmt: skip
    """A program's items of one product. `cursor` is the record of `item`, whose first D - 1 stages are on their way."""
    STEPS: gl.constexpr = (H if GATE else W) // 128
    UNROLL: gl.constexpr = 2 if STEPS % 2 == 0 else 1
    programs = gl.num_programs(0)
    end = gates if GATE else items
    row = gl.arange(0, 16, gl.SliceLayout(1, MMA))
    column = gl.arange(0, 8, gl.SliceLayout(0, MMA))
    if item < end:
        after = _read(gl.minimum(item + programs, items - 1), items, gates, records, H, W, MMA, INPUTS)
        if not GATE:
            _await(gl.load(ready + cursor[4], volatile=True), ready + cursor[4], fault, W)
        base = _inputs_at(cursor, GATE, K, H, W, INPUTS)
        x = _load(source, base, GATE, INPUTS)
        while item < end:
            # What the next item needs was loaded an item ago; what the one after needs is asked for now.
            following = item + programs
            next_words, next_scales = _weights(following, gates, after[0], stride, H, W, GROUP)
            more = following < items
            same = following < end
            later = _read(gl.minimum(following + programs, items - 1), items, gates, records, H, W, MMA, INPUTS)
            seen = W // 16
            if not GATE:
                seen = gl.load(ready + after[4], volatile=True)
            next_base = _inputs_at(after, GATE, K, H, W, INPUTS)
            low = gl.zeros([16, 8], gl.float32, MMA)
            high = gl.zeros([16, 8], gl.float32, MMA)
            for outer in range(0, STEPS, UNROLL):
                for inner in gl.static_range(UNROLL):
                    step = outer + inner
                    ahead = step + D - 1
                    async_copy.wait_group(D - 2)
                    current = ring_words.index(at).load(gl.SliceLayout(1, WORDS))
                    scale = ring_scales.index(at).load(SCALES).to(gl.float32)
                    behind = gl.where(at == 0, D - 1, at - 1)
                    inside = ahead < STEPS
                    if inside | more:
                        from_words = gl.where(inside, words + ahead, next_words + (ahead - STEPS))
                        from_scales = gl.where(
                            inside, scales + ahead * (128 // GROUP), next_scales + (ahead - STEPS) * (128 // GROUP)
                        )
                        _fetch(ring_words, ring_scales, behind, lane_words, lane_scales, from_words, from_scales)
                    async_copy.commit_group()
                    last = step == STEPS - 1
                    if not GATE and inner == UNROLL - 1:
                        _await(gl.where(last & same, seen, W // 16), ready + after[4], fault, W)
                    beyond = gl.where(last & same, next_base, base + gl.minimum(step + 1, STEPS - 1))
                    x_next = _load(source, beyond if inner == UNROLL - 1 else base + (step + 1), GATE, INPUTS)
                    low, high = mma.scaled(
                        low, high, current, mma.operand(x, INPUTS, B), scale, eights, 1, GROUP, MMA, WORDS, A, B
                    )
                    x = x_next
                    at = gl.where(at == D - 1, 0, at + 1)
            filled = column < cursor[1]
            pair = cursor[3]
            if GATE:
                tile = item % (W // 16)
                value = mma.activation(low, high, row)
                gl.store(to + pair[None, :] * W + (tile * 16 + row)[:, None], value, mask=filled[None, :] & (row[:, None] >= 0))
                gl.thread_barrier()
                gl.atomic_add(ready + cursor[4], 1, sem="release", scope="gpu")
            else:
                tile = (item - gates) % (H // 32)
                at_y = to + pair[None, :] * H + (tile * 32 + row)[:, None]
                mask = filled[None, :] & (row[:, None] >= 0)
                gl.store(at_y, low * mma.UNSCALE, mask=mask)
                gl.store(at_y + 16, high * mma.UNSCALE, mask=mask)
            item = following
            cursor = after
            after = later
            words = next_words
            scales = next_scales
            base = next_base
    return item, cursor, words, scales, at


@gluon.jit
def _read(item, items, gates, records, H: gl.constexpr, W: gl.constexpr, MMA: gl.constexpr, INPUTS: gl.constexpr):
    """slot, pairs in the unit, pair of each input row, of each output column, unit, its first pair: raw, nothing waits yet."""
    unit = gl.where(item < gates, item // (W // 16), (item - gates) // (H // 32))
    record = records + unit * _WORDS
    slot = gl.load(record)
    count = gl.load(record + 1)
    n = gl.arange(0, 8, gl.SliceLayout(1, gl.SliceLayout(2, INPUTS)))
    column = gl.arange(0, 8, gl.SliceLayout(0, MMA))
    return slot, count, gl.load(record + 8 + n), gl.load(record + 8 + column), unit, gl.load(record + 8)


@gluon.jit
def _weights(item, gates, slot, stride, H: gl.constexpr, W: gl.constexpr, GROUP: gl.constexpr):
    """Where an item's codes begin in units of 512 words, and its scales in units of 32 halves."""
    gate = item < gates
    tile = gl.where(gate, item % (W // 16) * (H // 128), W * H // 2048 + (item - gates) % (H // 32) * (W // 128))
    base = slot.to(gl.int64) * stride
    return base + tile, base * 32 + 3 * W * H // 128 + tile * (128 // GROUP)


@gluon.jit
def _fetch(ring_words, ring_scales, at, lane_words, lane_scales, words, scales):
    mma.fetch(ring_words, ring_scales, at, lane_words + words * 512, lane_scales + scales * 32)


@gluon.jit
def _inputs_at(cursor, GATE: gl.constexpr, K: gl.constexpr, H: gl.constexpr, W: gl.constexpr, INPUTS: gl.constexpr):
    """Offsets of a unit's eight input rows in units of 64 words; empty places repeat the first row, which costs no bytes."""
    n = gl.arange(0, 8, gl.SliceLayout(1, gl.SliceLayout(2, INPUTS)))
    pair = gl.where(n < cursor[1], cursor[2], cursor[5])
    return pair // K * (H // 128) if GATE else pair * (W // 128)


@gluon.jit
def _load(source, at, GATE: gl.constexpr, INPUTS: gl.constexpr):
    lane = gl.arange(0, 64, gl.SliceLayout(0, gl.SliceLayout(2, INPUTS)))
    pointers = source + (at * 64)[:, None] + lane[None, :]  # multiplied last, or the alignment is lost to the compiler
    return gl.load(pointers) if GATE else gl.load(pointers, cache_modifier=".cg")


@gluon.jit
def _await(seen, counter, fault, W: gl.constexpr):
    """Until all gate/up items of a unit are done. Patience at an end means a launch that was not resident: `fault` says so."""
    tries = 0
    while (seen < W // 16) & (tries < _PATIENCE):
        seen = gl.load(counter, volatile=True)
        tries += 1
    if tries == _PATIENCE:
        gl.store(fault, 1)
