"""A layer's routed experts by way of slots, in a compiled step: what `expert_worker/visit.py` does for calls of any size."""

from __future__ import annotations

from typing import Any, NamedTuple

from forefetch.kernels.compiled.copier import BYTES, EACH_NS, SPENT_NS, claim, copied, ended, give_up, settle
from forefetch.kernels.compiled.simd import address_of, clock_ns
from forefetch.kernels.compiled.slots import NOWHERE, WASTED, distance, place, used
from forefetch.kernels.compiled.toolchain import compiled, entry
from forefetch.kernels.compiled.unpack import SAME, fill, fill_at

HITS, LATE, MISSES, RESIDENT, GONE, COPIED, COPY_NS, STALL_NS, NAMED, FOUND = range(10)
COUNTS = 10
"""Per layer of a step. GONE, COPIED, COPY_NS: experts that left unused, bytes and time of copies, all since the table was made;
NAMED: experts named for the layer, FOUND: those of them that it chose."""
CROWD = 8  # as expert_worker/slots.py has it
PASS, HERE, BRING, AWAIT = -1, 0, 1, 2
"""What a group or item needs before it runs: to do without a slot this once; nothing; its expert brought in by who takes it;
or, plus a job's place, that job's end. Of no job (NOWHERE) that makes BRING."""


class Moving(NamedTuple):
    """What a step needs where experts move. One type whether they do or not, so that steps are compiled once."""

    any: bool  # there are fewer slots than experts
    table: Any  # expert_worker.slots.Table
    copies: Any  # unpack.Copies
    jobs: Any  # copier.Jobs
    hinted: Any  # [experts] bool: named for the layer's call
    named: Any  # [E] int64: places in the layer of those named, likeliest first
    counts: Any  # [L, COUNTS] int64
    needs: Any  # [E] int64: experts of the layer's call, by group
    ways: Any  # [E] int64: what each group needs
    how: Any  # [E] int64: the same for each item; zeros where nothing moves
    spent: Any  # [E] int64: ns that an item took to come in
    uses: Any  # [E] float64
    once: Any  # [threads, bytes of a slot] uint8: where experts that are not worth a slot are unpacked; empty if none is


@compiled()
def close_call(moving, counts):
    """Writes down what was copied by now."""
    jobs = moving.jobs.numbers
    counts[GONE], counts[COPIED], counts[COPY_NS] = moving.table.numbers[WASTED], jobs[BYTES], jobs[SPENT_NS]


@entry
@compiled()
def account(counts, ends, before, out):
    """out [L, 4:8] = what each layer's call wasted and copied, the time of that, and of waiting for it.

    before, ends [3]: GONE, COPIED and COPY_NS when the step before and this one ended; what came after the last call is the
    last layer's. `before` becomes `ends`.
    """
    for column in range(3):
        for layer in range(len(counts)):
            now = ends[column] if layer == len(counts) - 1 else counts[layer, GONE + column]
            out[layer, 4 + column] = max(0, now - before[column])  # dense layers have zeros
            before[column] = max(now, before[column])
    for layer in range(len(counts)):
        out[layer, 7] = counts[layer, STALL_NS]


@compiled()
def close_step(moving):
    """Nothing is on its way any more."""
    give_up(moving.jobs, moving.copies, moving.table, False)


@compiled()
def open_call(moving, needs, first, layer, rows, counts):
    """Verifies what was named, pins what is there or on its way, gives up the rest of what was to come. Returns when."""
    began, table = clock_ns(), moving.table
    settle(moving.jobs, moving.copies, table)
    uses = moving.uses[: len(needs)]
    for group in range(len(needs)):
        pairs = first[group + 1] - first[group]
        uses[group] = 1.0 if rows <= CROWD else min(1.0, pairs * (CROWD / rows))
    used(table, layer, needs, uses)
    for group in range(len(needs)):
        expert, slot = needs[group], table.slot_of[needs[group]]
        ready, named = slot != NOWHERE and table.ready[slot], moving.hinted[expert]
        counts[FOUND] += named
        counts[(HITS if named else RESIDENT) if ready else (LATE if named else MISSES)] += 1
        if slot != NOWHERE:
            table.pins[slot] += 1
    begin, end = table.first[layer], table.first[layer + 1]
    moving.hinted[begin:end] = False
    table.predicted[begin:end] = False
    give_up(moving.jobs, moving.copies, table, True)
    return began


@compiled()
def line_up(moving, needs, groups, slots):
    """Fills groups and slots [E] with all of them, in the order of items; what has a slot stays pinned until `leave`.

    Who takes an item does first what `moving.how` says. They are taken last to first, so the longest come first and those that
    others are bringing last.
    """
    table, items = moving.table, 0
    demand(moving, needs)
    for group in range(len(needs)):
        slot = table.slot_of[needs[group]]
        if slot != NOWHERE:
            moving.ways[group] = HERE if table.ready[slot] else AWAIT + claim(moving.jobs, needs[group])
    for lowest, highest in ((AWAIT, AWAIT + len(moving.jobs.word)), (HERE, HERE), (PASS, PASS), (BRING, BRING)):
        for group in range(len(needs)):
            if lowest <= moving.ways[group] <= highest:
                groups[items], slots[items], moving.how[items] = group, table.slot_of[needs[group]], moving.ways[group]
                items += 1


@compiled()
def demand(moving, needs):
    """Gives slots to missing experts that will be needed again a step sooner than some other, as many as a call may bring in,
    and pins them. The others do without: a CPU computes from host memory as well."""
    table, brought = moving.table, 0
    for group in range(len(needs)):
        expert = needs[group]
        if table.slot_of[expert] != NOWHERE:
            continue
        unless = back_in(table, expert) + table.layers
        slot = place(table, expert, unless, True) if brought < table.window else NOWHERE
        if slot == NOWHERE:
            moving.ways[group] = PASS
        else:
            table.pins[slot] += 1
            brought += 1


@compiled()
def back_in(table, expert):
    """Expected calls until an expert is needed again."""
    return distance(table, table.layer_of[expert]) + table.gap[expert]


@compiled()
def bringing(moving, items):
    """About how long it takes one thread to bring in what the items lack."""
    missing = 0
    for item in range(items):
        missing += moving.how[item] == BRING
    return missing * moving.jobs.numbers[EACH_NS]


@compiled()
def come_in(moving, item, expert, slot, who):
    """Any thread's, this one of number `who`: the address where the item's expert is when this returns."""
    began, way, at = clock_ns(), moving.how[item], moving.copies.pool + slot * moving.copies.stride
    if way == PASS and moving.copies.kind == SAME:
        at = moving.copies.host + expert * moving.copies.host_stride
    elif way == PASS:
        at = address_of(moving.once) + who * moving.once.shape[1]
        fill_at(moving.copies, expert, at)
    elif way == BRING:
        fill(moving.copies, expert, slot)
    else:
        ended(moving.jobs, way - AWAIT)
    moving.spent[item] = clock_ns() - began
    return at


@compiled()
def leave(moving, slots):
    """The experts in these slots, the items', have run."""
    table, jobs, copies = moving.table, moving.jobs, moving.copies
    settle(jobs, copies, table)
    for item in range(len(slots)):
        slot = slots[item]
        if moving.how[item] == PASS:
            continue
        if moving.how[item] == BRING:
            table.ready[slot] = True
            copied(jobs, copies, moving.spent[item])
        table.unused[slot] = False
        table.pins[slot] -= 1
