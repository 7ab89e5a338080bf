"""A layer's routed experts by way of slots, in a compiled step: what `expert_worker/visit.py` does for calls of any size."""

from __future__ import annotations

from typing import Any, NamedTuple

from forefetch.kernels.compiled.copier import BYTES, EACH_NS, SPENT_NS, arrive, bring, give_up, offer, pending, settle
from forefetch.kernels.compiled.crew import shared
from forefetch.kernels.compiled.simd import clock_ns
from forefetch.kernels.compiled.slots import NOWHERE, WASTED, place, used
from forefetch.kernels.compiled.toolchain import compiled

HITS, LATE, MISSES, RESIDENT, GONE, COPIED, COPY_NS, STALL_NS, NAMED, FOUND = range(10)
COUNTS = 10
"""Per layer of a step. GONE, COPIED, COPY_NS: experts that left unused, bytes and time of copies, all since the table was made;
NAMED: experts named for the layer, FOUND: those of them that it chose."""
CROWD = 8  # as expert_worker/slots.py has it


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
    todo: Any  # [E] bool: groups that have not run
    uses: Any  # [E] float64


@compiled()
def close_call(moving, counts):
    """Writes down what was copied by now."""
    jobs = moving.jobs.numbers
    counts[GONE], counts[COPIED], counts[COPY_NS] = moving.table.numbers[WASTED], jobs[BYTES], jobs[SPENT_NS]


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
        moving.todo[group] = True
        if slot != NOWHERE:
            table.pins[slot] += 1
    begin, end = table.first[layer], table.first[layer + 1]
    moving.hinted[begin:end] = False
    table.predicted[begin:end] = False
    give_up(moving.jobs, moving.copies, table, True)
    return began


@compiled()
def next_wave(moving, needs, groups, slots, board):
    """Fills groups and slots [E] with what can run now, at least one; returns how many. They are pinned until `leave`."""
    table, copies, jobs = moving.table, moving.copies, moving.jobs
    wave = 0
    while not wave:
        demand(moving, needs, board)
        for group in range(len(needs)):
            slot = table.slot_of[needs[group]]
            if moving.todo[group] and slot != NOWHERE:
                if not table.ready[slot]:
                    arrive(jobs, copies, table, needs[group])
                table.unused[slot] = False
                moving.todo[group] = False
                groups[wave], slots[wave] = group, slot
                wave += 1
        if not wave:
            give_up(jobs, copies, table, False)  # every slot was on its way to somebody
    return wave


@compiled()
def leave(moving, slots):
    """The experts in these slots have run."""
    for slot in slots:
        moving.table.pins[slot] -= 1


@compiled()
def demand(moving, needs, board):
    """Gives slots to missing experts, as many as a call may bring in at once, and pins them; copies them or, where there are
    several and a helper is there, makes them jobs that both work on."""
    table, copies, jobs = moving.table, moving.copies, moving.jobs
    missing = 0
    for group in range(len(needs)):
        missing += moving.todo[group] and table.slot_of[needs[group]] == NOWHERE
    both = missing > 1 and shared(board, (missing - 1) * jobs.numbers[EACH_NS])
    brought = 0
    for group in range(len(needs)):
        expert = needs[group]
        if not moving.todo[group] or table.slot_of[expert] != NOWHERE:
            continue
        if brought == table.window:
            break
        slot = place(table, expert, 0.0, True)
        if slot == NOWHERE:
            break
        table.pins[slot] += 1
        brought += 1
        if both and pending(jobs) < len(jobs.word):
            offer(jobs, expert, slot)
        else:
            bring(jobs, copies, table, expert)
