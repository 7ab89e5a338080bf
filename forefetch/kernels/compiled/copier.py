"""Copies into slots by helpers, while the engine's thread computes: jobs in a ring, of which either may do each.

A job's word goes FREE -> QUEUED -> TAKEN -> DONE -> FREE. The engine's thread makes and frees them; who makes QUEUED TAKEN
does the job or, if that is the engine's thread, may give it up. So that one never waits but for a copy under way.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from forefetch.kernels.compiled.atomics import add, get, give_way, put, replace
from forefetch.kernels.compiled.crew import YIELD_NS
from forefetch.kernels.compiled.simd import address_of, clock_ns
from forefetch.kernels.compiled.slots import NOWHERE, drop
from forefetch.kernels.compiled.toolchain import compiled
from forefetch.kernels.compiled.unpack import fill

FREE, QUEUED, TAKEN, DONE = range(4)
HEAD, TAIL, WAITING, BYTES, SPENT_NS, EACH_NS = range(6)
"""Of Jobs.numbers: jobs made; the oldest not free; how many nobody has begun; bytes copied, time of it, and of one copy lately.
Helpers use the first three."""
NUMBERS = 6
PLACES = 64
"""Jobs that may wait."""


class Jobs(NamedTuple):
    """Job n is in place n % R."""

    expert: Any  # [R] int64, as all that follows
    slot: Any
    ns: Any  # how long its copy took
    word: Any
    numbers: Any  # [NUMBERS]


@compiled()
def waiting(jobs):
    """The address of how many nobody has begun: what a helper looks at."""
    return address_of(jobs.numbers) + 8 * WAITING


@compiled()
def help_copying(jobs, copies):
    """A helper's: does the oldest job that nobody began, if there is one."""
    at = address_of(jobs.numbers)
    for number in range(get(at + 8 * TAIL), get(at + 8 * HEAD)):
        if begin(jobs, number % len(jobs.word)):
            finish(jobs, copies, number % len(jobs.word))
            return


@compiled()
def begin(jobs, at):
    """Whether the job at a place is the caller's to do now."""
    if not replace(address_of(jobs.word) + 8 * at, QUEUED, TAKEN):
        return False
    add(waiting(jobs), -1)
    return True


@compiled()
def finish(jobs, copies, at):
    """Does a job that was begun."""
    began = clock_ns()
    fill(copies, jobs.expert[at], jobs.slot[at])
    jobs.ns[at] = clock_ns() - began
    put(address_of(jobs.word) + 8 * at, DONE)


# ---- the engine's thread ----


@compiled()
def pending(jobs):
    """How many places are not free yet, at most."""
    return jobs.numbers[HEAD] - jobs.numbers[TAIL]


@compiled()
def offer(jobs, expert, slot):
    """Makes a job; the ring has room. Nobody is woken."""
    at = jobs.numbers[HEAD] % len(jobs.word)
    jobs.expert[at], jobs.slot[at] = expert, slot
    put(address_of(jobs.word) + 8 * at, QUEUED)
    add(waiting(jobs), 1)
    put(address_of(jobs.numbers) + 8 * HEAD, jobs.numbers[HEAD] + 1)


@compiled()
def copied(jobs, copies, ns):
    """Counts one copy."""
    jobs.numbers[BYTES] += copies.host_stride
    jobs.numbers[SPENT_NS] += ns
    jobs.numbers[EACH_NS] += (ns - jobs.numbers[EACH_NS]) // 8 if jobs.numbers[EACH_NS] else ns


@compiled()
def settle(jobs, copies, table):
    """Frees the places of jobs that are done: their experts are in their slots."""
    tail, head = jobs.numbers[TAIL], jobs.numbers[HEAD]
    for number in range(tail, head):
        at = number % len(jobs.word)
        if get(address_of(jobs.word) + 8 * at) == DONE:
            jobs.word[at] = FREE
            table.ready[jobs.slot[at]] = table.unused[jobs.slot[at]] = True
            copied(jobs, copies, jobs.ns[at])
    while tail < head and jobs.word[tail % len(jobs.word)] == FREE:
        tail += 1
    put(address_of(jobs.numbers) + 8 * TAIL, tail)


@compiled()
def claim(jobs, expert):
    """The place of the job that is bringing an expert; NOWHERE if there is none, or was none begun: now there is none."""
    for number in range(jobs.numbers[TAIL], jobs.numbers[HEAD]):
        at = number % len(jobs.word)
        if jobs.expert[at] == expert and get(address_of(jobs.word) + 8 * at) != FREE:
            if not begin(jobs, at):
                return at
            jobs.word[at] = FREE
    return NOWHERE


@compiled()
def ended(jobs, at):
    """Any thread's: waits for a copy under way."""
    began = clock_ns()
    while get(address_of(jobs.word) + 8 * at) == TAKEN:
        if clock_ns() - began > YIELD_NS:
            give_way()


@compiled()
def give_up(jobs, copies, table, kept):
    """Jobs that nobody began are not done any more, but for experts that are pinned; waits for others only if not `kept`."""
    for number in range(jobs.numbers[TAIL], jobs.numbers[HEAD]):
        at = number % len(jobs.word)
        if not (kept and table.pins[jobs.slot[at]]) and begin(jobs, at):
            jobs.word[at] = FREE
            drop(table, jobs.expert[at])
        elif not kept:
            ended(jobs, at)
    settle(jobs, copies, table)


@compiled()
def coming(table, expert):
    """It has a slot and is not there yet."""
    slot = table.slot_of[expert]
    return slot != NOWHERE and not table.ready[slot]
