"""Both products of a routed expert with weights in fragment order, in one launch of one-warp programs that stay.

Work is cut into items of one tile (32 weight rows and all inputs) or several: first every unit's gate/up items, then every
unit's down items. Programs draw them from a counter, each the next one before it ends an item; whoever draws the last ticket
sets the counter back. A program streams codes through a ring of D stages in shared memory; the ring runs on across items, since
where the next item's weights lie is known in time, so loading never pauses. Tiles of an item share the inputs and what the
codes' offset makes of them. Sums of a row are made by one warp in one order, whoever draws it.

A down item needs all gate/up items of its unit: each adds one to the unit's counter after its stores (release), and the down
item looks at the counter before it reads h. Gate/up items wait for nothing, and who has drawn one is running, so this ends
however many programs are resident; the wait is bounded all the same, and raises `fault`. h is read through L2 (.cg): L1 is not
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
    return {**mma.layouts(1, group, bits), "EXPERTS": counts, "EP": padded, "LANES": gl.BlockedLayout([1], [32], [1], [0])}


@gluon.jit(do_not_specialize=["stride", "room"])
def experts(
    x, pool, pool_half, slot_of, counts, table, h, h_half, y, ready, tickets, fault, constants, room, stride,
    H: gl.constexpr, W: gl.constexpr, E: gl.constexpr, K: gl.constexpr, D: gl.constexpr, GATE_TILES: gl.constexpr,
    DOWN_TILES: gl.constexpr, SHORT: gl.constexpr, PDL: gl.constexpr, WARPS: gl.constexpr, GROUP: gl.constexpr,
    BITS: gl.constexpr, MMA: gl.constexpr, A: gl.constexpr, B: gl.constexpr, WORDS: gl.constexpr, COPY: gl.constexpr,
    SCALES: gl.constexpr, SCALE_COPY: gl.constexpr, INPUTS: gl.constexpr, EXPERTS: gl.constexpr, EP: gl.constexpr,
    LANES: gl.constexpr,
):  # fmt: skip
    """y [P, H] float32 for each pair. x [T, H / 2] and h [P, W / 2] as int32: two prepared halves. stride in 2 KB."""
    HALVES: gl.constexpr = 32 * (128 // GROUP)
    plain: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    words = gl.allocate_shared_memory(gl.int32, [D, 128 * BITS], plain)
    scales = gl.allocate_shared_memory(gl.float16, [D, HALVES], plain)
    eights = mma.offset(constants, WARPS, GROUP, A)
    item = _drawn(_draw(tickets, True, LANES), LANES)  # the counter is at zero since the layer before
    if PDL:
        item = gl.inline_asm_elementwise(_WAIT, "=r,r", [item], dtype=gl.int32, is_pure=False, pack=1)
    e = gl.arange(0, EP, EXPERTS)
    units = (gl.load(counts + gl.minimum(e, E - 1)) + 7) // 8
    units = gl.where(e < E, units, 0)
    first = gl.associative_scan(units, 0, _add) - units
    total = gl.sum(units, 0)
    gates = total * (W // 16 // GATE_TILES)
    items = gates + total * (H // 32 // DOWN_TILES)
    if item < items:
        lists = (first, slot_of, counts, table, room, ready)
        ring = (words, scales, pool + gl.arange(0, 128 * BITS, COPY), pool_half + gl.arange(0, HALVES, SCALE_COPY))
        here = _read(item, gates, items, lists, H, W, GATE_TILES, DOWN_TILES, MMA, INPUTS, LANES)
        known = _known(here, LANES)
        own = _weights(item, gates, known[1], stride, H, W, GATE_TILES, DOWN_TILES, GROUP, BITS)
        for stage in gl.static_range(D - 1):
            _fetch_first(ring, stage, stage, own, item < gates, H, W, GATE_TILES, DOWN_TILES, GROUP, BITS)
            async_copy.commit_group()
        state = (item, here, known, own, 0)
        state = _phase(state, gates, items, x, h_half, lists, ring, eights, tickets, fault, stride, True, H, W, K, D,
                       GATE_TILES, DOWN_TILES, SHORT, GROUP, BITS, MMA, A, B, WORDS, SCALES, INPUTS, LANES)  # fmt: skip
        state = _phase(state, gates, items, h, y, lists, ring, eights, tickets, fault, stride, False, H, W, K, D,
                       GATE_TILES, DOWN_TILES, SHORT, GROUP, BITS, MMA, A, B, WORDS, SCALES, INPUTS, LANES)  # fmt: skip
        async_copy.wait_group(0)
        item = state[0]
    if item == items + gl.num_programs(0) - 1:  # the last ticket: nobody draws another one
        gl.store(tickets, 0)


@gluon.jit
def _phase(
    state, gates, items, source, to, lists, ring, eights, tickets, fault, stride, GATE: gl.constexpr, H: gl.constexpr,
    W: gl.constexpr, K: gl.constexpr, D: gl.constexpr, GATE_TILES: gl.constexpr, DOWN_TILES: gl.constexpr,
    SHORT: gl.constexpr, GROUP: gl.constexpr, BITS: gl.constexpr, MMA: gl.constexpr, A: gl.constexpr, B: gl.constexpr,
    WORDS: gl.constexpr, SCALES: gl.constexpr, INPUTS: gl.constexpr, LANES: gl.constexpr,
):  # fmt: skip
    """A program's items of one product, from state = (item, what is known of it, where its weights are, the ring's place). Its
    first D - 1 stages are on their way, and those of the item after the last will be, whichever product that belongs to."""
    STEPS: gl.constexpr = (H if GATE else W) // 128
    TILES: gl.constexpr = GATE_TILES if GATE else DOWN_TILES
    INNER: gl.constexpr = STEPS - (D - 2) // TILES - 1  # steps whose loading ahead stays within the item
    item, here, known, own, at = state
    end = gates if GATE else items
    if item < end:
        if not GATE:
            _await(known[4], lists[5] + known[0], fault, W // 16 // GATE_TILES)
        rows = _rows(here, known, GATE, K, H, W, INPUTS)
        x = _load(source, rows, GATE, INPUTS)
        while item < end:
            ticket, after = _draw(tickets, INNER < 2, LANES), here
            if INNER < 1:
                after = _read(_drawn(ticket, LANES), gates, items, lists, H, W, GATE_TILES, DOWN_TILES, MMA, INPUTS, LANES)
            sums = ()
            for _ in gl.static_range(2 * TILES):
                sums = sums + (gl.zeros([16, 8], gl.float32, MMA),)  # type: ignore[assignment]  # noqa: RUF005
            for step in range(0, INNER):
                # The next item is drawn late, so that it goes to whoever is fast; what is to be known of it comes in time.
                if step == INNER - 2:
                    ticket = _draw(tickets, True, LANES)
                if step == INNER - 1:
                    after = _read(_drawn(ticket, LANES), gates, items, lists, H, W, GATE_TILES, DOWN_TILES, MMA, INPUTS,
                                  LANES)  # fmt: skip
                x_next = _load(source, rows + (step + 1), GATE, INPUTS)
                sums, at = _step(x, sums, step, 0, ring, at, own, (own, True, True), eights, STEPS, TILES, GATE_TILES,
                                 DOWN_TILES, H, W, D, SHORT, GROUP, BITS, MMA, A, B, WORDS, SCALES, INPUTS)  # fmt: skip
                x = x_next
            following, then = _drawn(ticket, LANES), _known(after, LANES)
            next_own = _weights(following, gates, then[1], stride, H, W, GATE_TILES, DOWN_TILES, GROUP, BITS)
            next_rows, leaving = _rows(after, then, GATE, K, H, W, INPUTS), following < end
            next_item = next_own, following < gates, following < items
            for step in gl.static_range(INNER, STEPS):
                from_rows = rows + (step + 1)
                if step == STEPS - 1:
                    if not GATE:
                        _await(gl.where(leaving, then[4], W), lists[5] + then[0], fault, W // 16 // GATE_TILES)
                    from_rows = gl.where(leaving, next_rows, rows)
                x_next = _load(source, from_rows, GATE, INPUTS)
                sums, at = _step(x, sums, step, STEPS - step, ring, at, own, next_item, eights, STEPS, TILES, GATE_TILES,
                                 DOWN_TILES, H, W, D, SHORT, GROUP, BITS, MMA, A, B, WORDS, SCALES, INPUTS)  # fmt: skip
                x = x_next
            _store(item, gates, here[3], known[2], sums, to, GATE, H, W, TILES, BITS, MMA)
            if GATE:
                gl.thread_barrier()
                gl.atomic_add(lists[5] + known[0], 1, sem="release", scope="gpu")
            item, here, known, own, rows = following, after, then, next_own, next_rows
    return item, here, known, own, at


@gluon.jit
def _step(
    x, sums, step, LEFT: gl.constexpr, ring, at, own, following, eights, STEPS: gl.constexpr, TILES: gl.constexpr,
    GATE_TILES: gl.constexpr, DOWN_TILES: gl.constexpr, H: gl.constexpr, W: gl.constexpr, D: gl.constexpr,
    SHORT: gl.constexpr, GROUP: gl.constexpr, BITS: gl.constexpr, MMA: gl.constexpr, A: gl.constexpr, B: gl.constexpr,
    WORDS: gl.constexpr, SCALES: gl.constexpr, INPUTS: gl.constexpr,
):  # fmt: skip
    """128 inputs of all of an item's tiles, a stage of the ring each; D - 1 stages ahead are asked for meanwhile. LEFT: steps
    that the item still has, 0 if enough; what lies behind them is of the item `following` = (its weights, whether they are of
    the first product, whether there is one). Returns the sums and the ring's place."""
    operand = mma.operand(x, INPUTS, B)
    starts = mma.starts(operand, eights, 1, GROUP, MMA, B)
    added = ()
    for tile in gl.static_range(TILES):
        async_copy.wait_group(D - 2)
        current = ring[0].index(at).load(gl.SliceLayout(1, WORDS))
        scale = ring[1].index(at).load(SCALES).to(gl.float32)
        place = gl.where(at == 0, D - 1, at - 1)  # the one that was read last
        if LEFT == 0 or (tile + D - 1) // TILES < LEFT:
            ahead = step + (tile + D - 1) // TILES + (tile + D - 1) % TILES * STEPS
            _fetch(ring, place, own[0] + ahead * (BITS // 4), own[1] + ahead * (128 // GROUP))
        elif following[2]:
            _fetch_first(ring, place, tile + D - 1 - LEFT * TILES, following[0], following[1], H, W, GATE_TILES, DOWN_TILES,
                         GROUP, BITS)  # fmt: skip
        async_copy.commit_group()  # in any case, so that waits can count them
        added = added + mma.scaled(sums[2 * tile], sums[2 * tile + 1], current, operand, scale, starts, SHORT, 1, GROUP, BITS,
                                   MMA, WORDS, A, B)  # fmt: skip
        at = gl.where(at == D - 1, 0, at + 1)
    return added, at


@gluon.jit
def _draw(tickets, NOW: gl.constexpr, LANES: gl.constexpr):
    """One lane draws the next item's number; nobody waits for it before `_drawn`. Not NOW: nothing yet."""
    lane = gl.arange(0, 32, LANES)
    ticket = lane
    if NOW:  # an address by lane, or the compiler gathers the lanes' additions, which waits
        ticket = gl.atomic_add(tickets + lane, lane * 0 + 1, mask=lane == 0, sem="relaxed", scope="gpu")
    return ticket


@gluon.jit
def _drawn(ticket, LANES: gl.constexpr):
    return _of_lane(ticket, 0, LANES)


@gluon.jit
def _of_lane(values, lane: gl.constexpr, LANES: gl.constexpr):
    """One lane's number >= -1, for all."""
    return gl.max(gl.where(gl.arange(0, 32, LANES) == lane, values, -1), 0)


@gluon.jit
def _add(a, b):
    return a + b


@gluon.jit
def _read(
    item, gates, items, lists, H: gl.constexpr, W: gl.constexpr, GATE_TILES: gl.constexpr, DOWN_TILES: gl.constexpr,
    MMA: gl.constexpr, INPUTS: gl.constexpr, LANES: gl.constexpr,
):  # fmt: skip
    """What is to be known of an item, as loaded, so that nothing waits for it yet: its unit, where the unit begins in its
    expert's row, the pair of each input row and of each output column; and, by lanes, the slot, the expert's pairs, the
    first pair, how many of the unit's gate/up items are done."""
    first, slot_of, counts, table, room, ready = lists
    item = gl.minimum(item, items - 1)
    unit = gl.where(item < gates, item // (W // 16 // GATE_TILES), (item - gates) // (H // 32 // DOWN_TILES))
    expert = gl.sum((first <= unit).to(gl.int32), 0) - 1
    begin = (unit - gl.max(gl.where(first <= unit, first, 0), 0)) * 8
    n = gl.arange(0, 8, gl.SliceLayout(1, gl.SliceLayout(2, INPUTS)))
    column = gl.arange(0, 8, gl.SliceLayout(0, MMA))
    pairs = table + expert * room + begin
    lane = gl.arange(0, 32, LANES)
    either = gl.where(lane == 0, slot_of + expert, counts + expert)
    either = gl.where(lane < 2, either, gl.where(lane == 2, pairs, ready + unit))
    return unit, begin, gl.load(pairs + n), gl.load(pairs + column), gl.load(either, volatile=True)


@gluon.jit
def _known(here, LANES: gl.constexpr):
    """An item's unit, slot, pairs left of its expert, first pair, gate/up items done: once `_read` has them."""
    of = here[4]
    return here[0], _of_lane(of, 0, LANES), _of_lane(of, 1, LANES) - here[1], _of_lane(of, 2, LANES), _of_lane(of, 3, LANES)


@gluon.jit
def _weights(
    item, gates, slot, stride, H: gl.constexpr, W: gl.constexpr, GATE_TILES: gl.constexpr, DOWN_TILES: gl.constexpr,
    GROUP: gl.constexpr, BITS: gl.constexpr,
):  # fmt: skip
    """Where an item's codes begin in units of 512 words, and its scales in units of 32 halves."""
    gate_step = item % (W // 16 // GATE_TILES) * (GATE_TILES * (H // 128))
    down_step = W * H // 2048 + (item - gates) % (H // 32 // DOWN_TILES) * (DOWN_TILES * (W // 128))
    step = gl.where(item < gates, gate_step, down_step)
    base = slot.to(gl.int64) * stride
    return base + step * (BITS // 4), base * 32 + 3 * W * H * BITS // 512 + step * (128 // GROUP)


@gluon.jit
def _fetch(ring, at, at_words, at_scales):
    mma.fetch(ring[0], ring[1], at, ring[2] + at_words * 512, ring[3] + at_scales * 32)


@gluon.jit
def _fetch_first(
    ring, at, stage: gl.constexpr, own, gate, H: gl.constexpr, W: gl.constexpr, GATE_TILES: gl.constexpr,
    DOWN_TILES: gl.constexpr, GROUP: gl.constexpr, BITS: gl.constexpr,
):  # fmt: skip
    """Starts the copies of one of an item's first stages, of whichever product it is."""
    first: gl.constexpr = stage % GATE_TILES * (H // 128) + stage // GATE_TILES
    second: gl.constexpr = stage % DOWN_TILES * (W // 128) + stage // DOWN_TILES
    ahead = gl.where(gate, first, second)
    _fetch(ring, at, own[0] + ahead * (BITS // 4), own[1] + ahead * (128 // GROUP))


@gluon.jit
def _rows(here, known, GATE: gl.constexpr, K: gl.constexpr, H: gl.constexpr, W: gl.constexpr, INPUTS: gl.constexpr):
    """Offsets of a unit's eight input rows in units of 64 words; empty places repeat the first row, which costs no bytes."""
    n = gl.arange(0, 8, gl.SliceLayout(1, gl.SliceLayout(2, INPUTS)))
    pair = gl.where(n < known[2], here[2], known[3])
    return pair // K * (H // 128) if GATE else pair * (W // 128)


@gluon.jit
def _load(source, rows, GATE: gl.constexpr, INPUTS: gl.constexpr):
    lane = gl.arange(0, 64, gl.SliceLayout(0, gl.SliceLayout(2, INPUTS)))
    pointers = source + (rows * 64)[:, None] + lane[None, :]  # multiplied last, or the alignment is lost to the compiler
    return gl.load(pointers) if GATE else gl.load(pointers, cache_modifier=".cg")


@gluon.jit
def _store(
    item, gates, pair, count, sums, to, GATE: gl.constexpr, H: gl.constexpr, W: gl.constexpr, TILES: gl.constexpr,
    BITS: gl.constexpr, MMA: gl.constexpr,
):  # fmt: skip
    row = gl.arange(0, 16, gl.SliceLayout(1, MMA))
    mask = (gl.arange(0, 8, gl.SliceLayout(0, MMA)) < count)[None, :] & (row[:, None] >= 0)
    first = item % (W // 16 // TILES) if GATE else (item - gates) % (H // 32 // TILES)
    for tile in gl.static_range(TILES):
        low, high = sums[2 * tile], sums[2 * tile + 1]
        if GATE:
            at = to + pair[None, :] * W + ((first * TILES + tile) * 16 + row)[:, None]
            gl.store(at, mma.activation(low, high, row[:, None], BITS), mask=mask)
        else:
            at = to + pair[None, :] * H + ((first * TILES + tile) * 32 + row)[:, None]
            gl.store(at, low * mma.UNSCALE, mask=mask)
            gl.store(at + 16, high * mma.UNSCALE, mask=mask)


@gluon.jit
def _await(seen, counter, fault, ALL: gl.constexpr):
    """Until all gate/up items of a unit are done. Patience at an end means that who drew one hangs: `fault` says so."""
    tries = 0
    while (seen < ALL) & (tries < _PATIENCE):
        seen = gl.load(counter, volatile=True)
        tries += 1
    if tries == _PATIENCE:
        gl.store(fault, 1)
