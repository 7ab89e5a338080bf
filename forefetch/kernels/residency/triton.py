"""The device's side of residency; see `state.py` for what arguments hold. `naming.note` takes hints in, `turns` are kept there.

`enter` and the layer's expert kernels follow one another on one stream, `pick`s and `spare`s on a second, `bring`s on a third,
each behind its `pick`, and nothing else orders these. Three rules make that safe:

1. A slot is overwritten only after its expert's row in the table points to host memory again, and not while the layer it
   belongs to is at work. `enter` exchanges `active` before it reads the table; `pick` changes the table before it reads
   `active`, by adding nothing to it. Both touch one word by atomics, so one of them comes first: either `enter` sees the
   change, or `pick` sees that the layer is at work and takes its change back.
2. The table points to a slot only after the last byte is in it: programs of `bring` count themselves in (acquire, release),
   and the last one publishes, first in the table, then in `coming`. Until then no `pick` gives the slot away.
   Several who choose copies (lanes, calls over a wire, hints) do so between `grant` and `release`, if they were granted it.
3. `enter` waits for a copy under way for at most PATIENCE looks, and reads the expert in place when that was not enough.
   Nothing else waits, so whatever becomes of copies, every launch ends.
"""

from __future__ import annotations

import triton
import triton.language as tl

from forefetch.kernels.gate.triton import top_k


@triton.jit(do_not_specialize=["pairs", "logits_row", "first_slot", "slots", "layer", "total"])
def enter(
    logits, ids, weights, idle, fault, table, coming, active, averages, chance, unused, counts, rows, counters,
    pairs, logits_row, first_slot, slots, layer, total,
    E: tl.constexpr, EP: tl.constexpr, K: tl.constexpr, BLOCK: tl.constexpr, CHOOSE: tl.constexpr,
    RENORMALISE: tl.constexpr, IDLE: tl.constexpr, HALTS: tl.constexpr, PATIENCE: tl.constexpr, FLOOR: tl.constexpr,
    CROWD: tl.constexpr, FAST: tl.constexpr, SLOW: tl.constexpr,
):  # fmt: skip
    """One program. rows [E] = where the layer's needed experts are read from now on, until the layer's kernels are done.

    CHOOSE: ids and weights [T, K] are found from logits first. IDLE: ids of idle rows become -1, so that they need nothing.
    Also counts what was found and how, and takes the uses into the averages. HALTS: not behind a fault: another layer may be
    at work.
    """
    if HALTS:  # noqa: SIM102 - known when compiled
        if tl.load(fault, volatile=True) != 0:
            return
    tl.atomic_xchg(active, layer)
    if CHOOSE:
        for token in range(pairs // K):
            chosen, place, weight = top_k(logits + token * logits_row, E, K, EP, RENORMALISE)
            tl.store(ids + token * K + place, tl.arange(0, EP), mask=chosen)
            tl.store(weights + token * K + place, weight, mask=chosen)
    tl.debug_barrier()
    count = _count(ids, idle, counts, pairs, E, EP, K, BLOCK, IDLE)
    e = tl.arange(0, EP)
    needed = count > 0
    at = layer * E + e
    row, here, ready, tries = _found(table, coming, at, needed, first_slot, slots, PATIENCE)
    tl.store(rows + e, row, mask=needed)
    tl.store(unused + (row - first_slot), tl.zeros([EP], tl.int32), mask=here)
    hinted = tl.load(chance + at, mask=e < E, other=0.0) >= FLOOR
    tl.store(chance + at, tl.zeros([EP], tl.float32), mask=e < E)
    tokens = pairs // K
    use = needed.to(tl.float32)
    if tokens > CROWD:
        use = tl.minimum(1.0, count.to(tl.float32) * CROWD / tokens)
    quick = tl.load(averages + at, mask=e < E, other=0.0)
    slow = tl.load(averages + total + at, mask=e < E, other=0.0)
    tl.store(averages + at, quick + FAST * (use - quick), mask=e < E)
    tl.store(averages + total + at, slow + SLOW * (use - slow), mask=e < E)
    found = tl.where(ready, tl.where(hinted, 0, 3), tl.where(hinted, 1, 2))  # hits, late, misses, resident
    which = tl.arange(0, 8)
    counted = tl.sum(((found[:, None] == which[None, :]) & needed[:, None]).to(tl.int32), 0)
    counted = tl.where(which == 6, tries, counted)
    counted = tl.where(which == 7, tl.sum((needed & (here == 0)).to(tl.int32), 0), counted)
    tl.atomic_add(counters + which, counted.to(tl.int64), mask=(which < 4) | (which >= 6), sem="relaxed")


@triton.jit
def _count(
    ids, idle, counts, pairs, E: tl.constexpr, EP: tl.constexpr, K: tl.constexpr, BLOCK: tl.constexpr, IDLE: tl.constexpr
):
    """[EP] pairs of each expert, by way of `counts`, which is left zeroed. IDLE: those of idle rows are struck out first."""
    for start in range(0, pairs, BLOCK):
        pair = start + tl.arange(0, BLOCK)
        expert = tl.load(ids + pair, mask=pair < pairs, other=-1).to(tl.int32)
        if IDLE:
            resting = tl.load(idle + pair // K, mask=pair < pairs, other=0) != 0
            tl.store(ids + pair, tl.zeros([BLOCK], tl.int32) - 1, mask=resting & (pair < pairs))
            expert = tl.where(resting, -1, expert)
        tl.atomic_add(counts + expert, 1, mask=(expert >= 0) & (expert < E), sem="relaxed")
    tl.debug_barrier()
    e = tl.arange(0, EP)
    count = tl.load(counts + e, mask=e < E, other=0, volatile=True)
    tl.debug_barrier()  # every thread has read before one of them writes
    tl.store(counts + e, tl.zeros([EP], tl.int32), mask=e < E)
    return count


@triton.jit
def _found(table, coming, at, needed, first_slot, slots, PATIENCE: tl.constexpr):
    """Needed experts' rows, whether each is a slot's, whether it was at once, and looks at copies under way."""
    due = needed & (tl.load(coming + at, mask=needed, other=0, volatile=True) != 0)  # looked at before the table: see `bring`
    row = tl.atomic_add(table + at, 0, mask=needed, sem="acquire")
    here = needed & (row >= first_slot) & (row < first_slot + slots)
    ready = here
    due = due & (here == 0)
    tries = tl.full([], 0, tl.int32)
    while (tl.max(due.to(tl.int32), 0) > 0) & (tries < PATIENCE):
        still = tl.load(coming + at, mask=due, other=0, volatile=True) != 0
        again = tl.atomic_add(table + at, 0, mask=due, sem="acquire")
        row = tl.where(due, again, row)
        here = needed & (row >= first_slot) & (row < first_slot + slots)
        due = due & still & (here == 0)
        tries += 1
    return row, here, ready, tries


@triton.jit(do_not_specialize=["pairs", "first_slot", "slots"])
def split(ids, rows, here, absent, pairs, first_slot, slots, BLOCK: tl.constexpr):
    """here [T, K] = ids whose experts `enter` found in slots, absent [T, K] = the others; -1 elsewhere. A program per BLOCK."""
    pair = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    expert = tl.load(ids + pair, mask=pair < pairs, other=-1)
    row = tl.load(rows + expert, mask=expert >= 0, other=-1)
    there = (expert >= 0) & (row >= first_slot) & (row < first_slot + slots)
    tl.store(here + pair, tl.where(there, expert, -1), mask=pair < pairs)
    tl.store(absent + pair, tl.where(there, -1, expert), mask=pair < pairs)


@triton.jit(do_not_specialize=["slots", "now", "layers", "total"])
def spare(
    coming, averages, chance, expert_in, spares, until, granted, slots, now, layers, total,
    E: tl.constexpr, SP: tl.constexpr, CP: tl.constexpr, SURE: tl.constexpr, SHARE: tl.constexpr, TURNS: tl.constexpr,
):  # fmt: skip
    """One program. spares [CP] = slots whose experts are expected to be needed last, as seen from the gate of layer `now`, -1
    for none; until [CP]: calls until then. Ahead of that gate, since looking through all slots takes longer than a choice."""
    if TURNS:  # noqa: SIM102 - known when compiled
        if tl.load(granted) == 0:
            return
    s = tl.arange(0, SP)
    held = tl.load(expert_in + s, mask=s < slots, other=-1)
    there = (s < slots) & (held >= 0) & (held // E != now)  # that layer will be at work
    calls = _victims(coming, averages, chance, held, there, now, layers, total, E, SURE, SHARE)
    calls = tl.where((s < slots) & (held < 0), 1e9, calls)
    for place in range(CP):
        longest = tl.max(calls, 0)
        out = tl.argmax(calls, 0)
        calls = tl.where(s == out, -1.0, calls)
        tl.store(spares + place, tl.where(longest > 0.0, out, -1))
        tl.store(until + place, longest)


@triton.jit(do_not_specialize=["first_slot", "slots", "now", "first", "targets", "layers", "total"])
def pick(
    table, coming, active, averages, chance, home, expert_in, unused, spares, until, jobs, counters, granted,
    first_slot, slots, now, first, targets, layers, total, least,
    E: tl.constexpr, EP: tl.constexpr, DP: tl.constexpr, CP: tl.constexpr, COPIES: tl.constexpr, WORTH: tl.constexpr,
    SURE: tl.constexpr, SHARE: tl.constexpr, TURNS: tl.constexpr,
):  # fmt: skip
    """One program, at the gate of layer `now`. jobs [COPIES, 2] = (expert, slot) to be brought, -1 for none.

    Wishes are the missing experts of layers `first` .. first + targets with a chance of WORTH, nearer layers first, likelier
    ones first; a victim is the one of `spares` whose expert is expected to be needed last, and later than the wish. `least`:
    such a chance is also given to what layer `now` itself missed, for its next visit.
    """
    if TURNS:  # noqa: SIM102 - known when compiled
        if tl.load(granted) == 0:
            return
    c = tl.arange(0, DP * EP)
    ahead, e = c // EP, c % EP
    target = tl.where(ahead < targets, first + ahead, now)
    real = (e < E) & (ahead <= targets)
    wish = target * E + e
    score, p = _wishes(table, coming, averages, chance, home, wish, ahead, real, first_slot, slots, targets, total, least,
                       DP, WORTH, SHARE)  # fmt: skip
    s = tl.arange(0, CP)
    slot_of, calls, held = _spared(coming, chance, expert_in, spares, until, now, E, CP, SURE)
    for job in range(COPIES):  # a loop: in a step code is in no cache, and is read once
        best = tl.max(score, 0)
        number = tl.full([], -1, tl.int32)
        slot = tl.full([], -1, tl.int32)
        if best > 0.0:
            i = tl.argmax(score, 0)
            mine = c == i
            chosen = tl.sum(tl.where(mine, wish, 0), 0)
            sure = tl.sum(tl.where(mine, p, 0.0), 0)
            away = (tl.sum(tl.where(mine, target, 0), 0) - now - 1 + layers) % layers + 1
            score = tl.where(mine, -1.0, score)
            longest = tl.max(calls, 0)
            if longest > away.to(tl.float32) + layers / sure - layers:
                taken = s == tl.argmax(calls, 0)
                calls = tl.where(taken, -1.0, calls)
                old = tl.sum(tl.where(taken, held, 0), 0)
                out = tl.sum(tl.where(taken, slot_of, 0), 0)
                if _vacate(table, active, home, old, first_slot + out, E):
                    tl.store(spares + s, tl.zeros([CP], tl.int32) - 1, mask=taken)
                    tl.atomic_add(counters + 5, tl.load(unused + out).to(tl.int64), sem="relaxed")
                    tl.atomic_add(counters + 4, tl.full([], 1, tl.int64), sem="relaxed")
                    tl.store(unused + out, 1)
                    tl.store(expert_in + out, chosen)
                    tl.store(coming + chosen, 1)
                    number = chosen
                    slot = out.to(tl.int32)
        tl.store(jobs + 2 * job, number)
        tl.store(jobs + 2 * job + 1, slot)


@triton.jit
def _spared(coming, chance, expert_in, spares, until, now, E: tl.constexpr, CP: tl.constexpr, SURE: tl.constexpr):
    """([CP] slots, calls until their experts are needed, -1 for those that must not go after all; their experts)."""
    s = tl.arange(0, CP)
    slot = tl.load(spares + s)
    held = tl.load(expert_in + slot, mask=slot >= 0, other=-1)
    real = held >= 0
    kept = tl.load(coming + held, mask=real, other=0, volatile=True) != 0  # its bytes are still on their way
    kept = kept | (tl.load(chance + held, mask=real, other=0.0) >= SURE) | (real & (held // E == now))
    return slot, tl.where((slot >= 0) & (kept == 0), tl.load(until + s), -1.0), held


@triton.jit
def _wishes(
    table, coming, averages, chance, home, wish, ahead, real, first_slot, slots, targets, total, least,
    DP: tl.constexpr, WORTH: tl.constexpr, SHARE: tl.constexpr,
):  # fmt: skip
    """([DP * EP] how much each missing expert is wished for, -1 for not at all; its chance)."""
    row = tl.load(table + wish, mask=real, other=0, volatile=True)
    real = real & (tl.load(home + wish, mask=real, other=-1) >= 0)
    absent = real & ((row < first_slot) | (row >= first_slot + slots)) & (tl.load(coming + wish, mask=real, other=1) == 0)
    p = tl.load(chance + wish, mask=real & (ahead < targets), other=0.0)
    quick = tl.load(averages + wish, mask=real, other=0.0)
    slow = tl.load(averages + total + wish, mask=real, other=0.0)
    own = (ahead == targets) & (quick >= least) & (least > 0.0)  # it was used just now
    p = tl.where(own, SHARE * quick + (1.0 - SHARE) * slow, p)
    return tl.where(absent & ((p >= WORTH) | own), 2.0 * (DP - ahead) + p, -1.0), p


@triton.jit
def _victims(
    coming, averages, chance, held, there, now, layers, total, E: tl.constexpr, SURE: tl.constexpr, SHARE: tl.constexpr
):
    """[SP] calls until the expert of each slot that may be emptied is expected to be needed; -1 for the others."""
    filled = tl.load(coming + held, mask=there, other=0, volatile=True) == 0  # else its bytes are still on their way
    use = SHARE * tl.load(averages + held, mask=there, other=1.0)
    use += (1.0 - SHARE) * tl.load(averages + total + held, mask=there, other=1.0)
    until = layers / tl.maximum(use, 1e-4) - layers + ((held // E - now - 1 + layers) % layers + 1).to(tl.float32)
    spared = tl.load(chance + held, mask=there, other=0.0) >= SURE
    return tl.where(there & filled & (spared == 0), until, -1.0)


@triton.jit
def _vacate(table, active, home, old, row, E: tl.constexpr):
    """Points expert `old` (-1: none) back to host memory; False, and all as before, when its layer may be reading row `row`."""
    reading = old < -1
    if old >= 0:
        tl.store(table + old, tl.load(home + old))
        tl.debug_barrier()
        reading = tl.atomic_add(active, 0) == old // E
    if reading:
        tl.store(table + old, row)
    return reading == 0


@triton.jit(do_not_specialize=["first_slot"])
def bring(
    base, table, home, coming, jobs, arrived, granted, first_slot, stride, programs,
    COPIES: tl.constexpr, BLOCK: tl.constexpr, TURNS: tl.constexpr,
):  # fmt: skip
    """Copies each job's expert from its host row into its slot, all programs one job after the other. stride: int32 words."""
    if TURNS:  # noqa: SIM102 - known when compiled
        if tl.load(granted) == 0:
            return
    program = tl.program_id(0)
    lane = tl.arange(0, BLOCK)
    for job in tl.static_range(COPIES):
        number, slot = tl.load(jobs + 2 * job), tl.load(jobs + 2 * job + 1)
        if number >= 0:
            source = base + tl.load(home + number).to(tl.int64) * stride
            to = base + (first_slot + slot).to(tl.int64) * stride
            for start in range(program * BLOCK, stride, programs * BLOCK):
                at = start + lane
                tl.store(to + at, tl.load(source + at, mask=at < stride), mask=at < stride)
            tl.debug_barrier()
            if tl.atomic_add(arrived + job, 1) == programs - 1:
                tl.store(arrived + job, 0)
                tl.atomic_xchg(table + number, first_slot + slot)
                tl.atomic_xchg(coming + number, 0)
