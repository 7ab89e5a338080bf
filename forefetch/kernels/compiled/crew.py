"""Threads that help the one that runs a step: it posts a job of many items, and everybody takes items until none is left.

Who posts takes items as well and waits only for those that somebody has begun. So a helper without a core delays nothing but
its own item, and one that never comes nothing at all. Helpers spin for a moment after a job, since the next one is near, then
sleep in a pipe; none of this needs the GIL. Which thread takes an item changes no bit of it.

A board is an array of int64 words, by which the threads talk. Letters: C helpers.
"""

from __future__ import annotations

import os
import threading
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

from forefetch.kernels.compiled.atomics import add, get, give_way, hear, put, replace, ring
from forefetch.kernels.compiled.simd import address_of, clock_ns
from forefetch.kernels.compiled.toolchain import SPLIT_NS, compiled

TICKET, NEVER, DONE, HELPERS, KIND, ARGUMENTS, STEP, FIRST_HELPER = 0, 1, 8, 16, 17, 18, 32, 48
"""Words: the job's number and what is left of it in one, a word that is always 0, items done, C, the job's kind, what it needs,
and what all jobs of a layer need; then 8 for each helper."""
ASLEEP, PIPE, TAKEN = 0, 1, 3
"""Of a helper: whether it sleeps (1), or has been rung and is not up yet (RUNG); where one writes to wake it, then where it
reads; items that it has done."""
RUNG = 2
LEFT = np.int64(0xFFFFFFFF)  # the part of a ticket that counts items
SPIN_NS = 100_000
"""How long a helper looks for the next job before it sleeps: longer than a step does without helpers between two jobs."""
LEAST_NS = 6_000
"""Estimated time from which a job is shared with helpers that are awake; sleeping ones are woken from SPLIT_NS on."""
YIELD_NS = 20_000
"""How long is waited for a begun item before the core is offered to whoever has it."""


@compiled()
def shared(board, ns):
    """Whether a job that takes one thread so long is to be shared. Wakes sleeping helpers if it is long enough."""
    helpers = board[HELPERS]
    if helpers == 0 or ns < LEAST_NS:
        return False
    if ns >= SPLIT_NS:
        wake(board)
        return True
    return awake(board)


@compiled()
def awake(board):
    """Whether any helper is up."""
    up = 0
    for helper in range(board[HELPERS]):
        up += get(address_of(board) + 8 * (FIRST_HELPER + 8 * helper + ASLEEP)) == 0
    return up > 0


@compiled()
def wake(board):
    """Wakes helpers that sleep."""
    for helper in range(board[HELPERS]):
        at = FIRST_HELPER + 8 * helper
        if replace(address_of(board) + 8 * (at + ASLEEP), 1, RUNG):
            ring(board[at + PIPE])


@compiled()
def post(board, kind, items):
    """Offers a job, whose arguments are on the board. The one before is over."""
    at = address_of(board)
    board[KIND] = kind
    put(at + 8 * DONE, 0)
    put(at + 8 * TICKET, (((get(at + 8 * TICKET) >> 32) + 1) << 32) | items)


@compiled()
def take(board):
    """An item of the job that is offered, which stays as it is until that is done; -1: none is left."""
    at = address_of(board) + 8 * TICKET
    while True:
        ticket = get(at)
        left = ticket & LEFT
        if left == 0:
            return np.int64(-1)
        if replace(at, ticket, ticket - 1):
            return left - 1


@compiled()
def finish(board):
    """An item is done."""
    add(address_of(board) + 8 * DONE, 1)


@compiled()
def join(board, items):
    """Waits until all items are done."""
    at, began = address_of(board) + 8 * DONE, clock_ns()
    while get(at) < items:
        if clock_ns() - began > YIELD_NS:
            give_way()


@compiled()
def rest(board, helper, more):
    """Waits for a job, or until the word at `more` is not 0: spins, then sleeps. False: the crew is dismissed."""
    at, mine = address_of(board), address_of(board) + 8 * (FIRST_HELPER + 8 * helper)
    until = clock_ns() + SPIN_NS
    while clock_ns() < until:
        if get(at + 8 * TICKET) & LEFT or get(more):
            return True
    put(mine + 8 * ASLEEP, 1)
    if (get(at + 8 * TICKET) & LEFT or get(more)) and replace(mine + 8 * ASLEEP, 1, 0):
        return True  # posted after the last look, and nobody has rung
    heard = hear(board[FIRST_HELPER + 8 * helper + PIPE + 1])
    put(mine + 8 * ASLEEP, 0)
    return heard != 0  # a signal in between is as good as a ring


class Crew:
    """`helpers` threads that run assist(board, number), compiled code that returns when `rest` says so."""

    def __init__(self, helpers: int, assist: Callable[[Any, int], None]) -> None:
        self.board: npt.NDArray[np.int64] = np.zeros(FIRST_HELPER + 8 * helpers, dtype=np.int64)
        pipes = [os.pipe() for _ in range(helpers)]
        for number, (reads, writes) in enumerate(pipes):
            at = FIRST_HELPER + 8 * number
            self.board[at + PIPE : at + PIPE + 2] = writes, reads
            threading.Thread(target=_serve, args=(assist, self.board, number, reads), name="crew", daemon=True).start()
        self.board[HELPERS] = self.helpers = helpers
        self.dismiss = weakref.finalize(self, _dismiss, [writes for _, writes in pipes])


def _serve(assist: Callable[[Any, int], None], board: npt.NDArray[np.int64], number: int, reads: int) -> None:
    try:
        assist(board, number)
    finally:
        os.close(reads)


def _dismiss(pipes: list[int]) -> None:
    """Helpers end when they next sleep."""
    for pipe in pipes:
        os.close(pipe)
