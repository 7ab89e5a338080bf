"""Which experts are in their slots and which are on their way: the policy under one lock, and the thread that copies.

Calls (`visit.py`) demand, hints wish, the copier fulfils: what is demanded goes first, a copy under way is never given up. A
copy that fails empties its slot, so it can never count as there; a call that needed it fails with it.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from time import perf_counter_ns
from typing import NamedTuple

import torch

from expert_worker.prefetch import Key, Prefetcher
from expert_worker.slots import NOWHERE, Slots
from forefetch.errors import ForefetchError
from forefetch.hints import ExpertHint

log = logging.getLogger("forefetch.expert")

HANDOVER_BYTES = 2**20
"""Copying less takes about as long as it takes another thread to wake up (some 100 us on a CPU)."""

Wait = Callable[[], None]
StartCopy = Callable[[int, int], Wait]
"""(slot, expert) -> what waits for the end. On a CPU the copy is over when it returns; on a GPU it was launched."""


class CopyFailed(ForefetchError):
    """An expert that a call needs could not be copied into fast memory."""


class Copy(NamedTuple):
    """A copy under way."""

    expert: int
    prefetched: bool
    began_ns: int
    wait: Wait


@dataclass
class Copied:
    """Totals of copies."""

    bytes: int = 0
    ns: int = 0
    failed: int = 0


class Residency:
    """The slots of one worker. Any thread may call; some methods say that `changed` must be held."""

    def __init__(self, slots: Slots, start_copy: StartCopy, *, expert_bytes: int, copy_ns: float, depth: int) -> None:
        """copy_ns: time of one copy, to begin with. depth: copies that may be under way at once; 1: calls help copying."""
        self.slots, self.prefetcher = slots, Prefetcher(slots, copy_ns)
        self.start_copy, self.expert_bytes, self.depth = start_copy, expert_bytes, depth
        # A call copies what it misses by itself where waking the copier would cost more than sharing the work gains.
        self.alone = depth == 1 and expert_bytes < HANDOVER_BYTES
        self.changed = threading.Condition()
        self.demanded: deque[int] = deque()  # placed, not yet under way
        self.later: list[int] = []  # computed elsewhere: to be brought in when nothing else is to do, if that is worth it
        self.errors: dict[int, Exception] = {}  # demanded, and failed
        self.copied = Copied()
        self.flying = 0  # copies that the copier has under way
        self.lent = False  # to a step's helpers, from its end to the next one's beginning
        self.absent: set[int] = set()  # experts that are not in host memory either: nothing may be wished for them
        self._last_ns = 0
        self._told = (0, 0, 0)
        self._closed = False
        self._thread = threading.Thread(target=self._run, name="copier", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Ends the copier after the copy under way."""
        with self.changed:
            self._closed = True
            self.changed.notify_all()

    def hint(self, key: Key, numbers: list[int], hint: ExpertHint) -> bool:
        """Takes a hint about experts of these numbers; False when it is stale."""
        with self.changed:
            if not self.absent.isdisjoint(numbers):
                return False
            busy, now = len(self.demanded) + self.flying, perf_counter_ns()
            taken = self.prefetcher.hint(key, numbers, hint.probabilities.tolist(), now, hint.window_ns, busy)
            if taken:
                self.changed.notify_all()
            return taken

    def since_last(self) -> tuple[int, int, int]:
        """(wasted bytes, copied bytes, ns of copying) since the last time that this was asked."""
        with self.changed:
            now = self.slots.wasted * self.expert_bytes, self.copied.bytes, self.copied.ns
            told, self._told = self._told, now
        return now[0] - told[0], now[1] - told[1], now[2] - told[2]

    def lend(self) -> bool:
        """Nobody here moves experts until `take_back`: whoever asked does. False, and nothing is lent, while copies are under
        way."""
        with self.changed:
            self.lent = not (self.flying or self.demanded)
        return self.lent

    def take_back(self) -> None:
        """Whoever was lent the experts moves none any more."""
        with self.changed:
            self.lent = False
            if self.later:
                self.changed.notify_all()

    @contextmanager
    def still(self) -> Iterator[None]:
        """Nothing is under way when this begins, and nothing begins before it ends."""
        with self.changed:
            while self.flying or self.demanded:
                self.changed.wait()
            yield

    # ---- experts that come and go ----

    def admit(self, expert: int) -> None:
        """It is in host memory now."""
        with self.changed:
            self.absent.discard(expert)

    def forget(self, expert: int) -> None:
        """It will leave host memory: gives up what is wished for it and empties its slot, after a copy under way. Between
        calls."""
        with self.changed:
            self.absent.add(expert)
            self.prefetcher.give_up(expert)
            self.later = [other for other in self.later if other != expert]
            while self.slots.slot_of[expert] != NOWHERE and not self.slots.is_ready(expert):
                self.changed.wait()
            if self.slots.slot_of[expert] != NOWHERE:
                self.slots.drop(expert)

    # ---- copying ----

    def demand(self, expert: int) -> bool:
        """With `changed` held: has a missing expert copied before anything wished. False when there is no slot for it."""
        if self.slots.place(expert, needed=True) == NOWHERE:
            return False
        self.demanded.append(expert)
        return True

    def withdraw(self) -> None:
        """With `changed` held: forgets what is demanded and not under way."""
        while self.demanded:
            self.slots.drop(self.demanded.pop())

    def copy_demanded(self) -> bool:
        """With `changed` held: makes one demanded copy in this thread, the lock released meanwhile. False if there is none."""
        if not self.demanded or self.depth > 1:
            return False
        expert = self.demanded.popleft()
        self.changed.release()
        try:
            copy, error = self._start(expert, False)
        finally:
            self.changed.acquire()
        self._ended(copy, error)
        return True

    def _start(self, expert: int, prefetched: bool) -> tuple[Copy, Exception | None]:
        began = perf_counter_ns()
        try:
            return Copy(expert, prefetched, began, self.start_copy(self.slots.slot_of[expert], expert)), None
        except Exception as error:
            return Copy(expert, prefetched, began, _nothing), error

    @torch.inference_mode()
    def _run(self) -> None:
        flying: deque[Copy] = deque()
        while True:
            with self.changed:
                while (job := self._next()) is None and not flying and not self._closed:
                    self.changed.wait()
                if self._closed:
                    return
            if job is not None:
                copy, error = self._start(*job)
                if error is None:
                    flying.append(copy)
                else:
                    self._finish(copy, error)
            if flying and (job is None or len(flying) >= self.depth):
                self._finish(flying.popleft(), None)

    def _finish(self, copy: Copy, error: Exception | None) -> None:
        try:
            copy.wait()
        except Exception as failed:
            error = failed
        with self.changed:
            self.flying -= 1
            self._ended(copy, error)
            self.changed.notify_all()

    def _next(self) -> tuple[int, bool] | None:
        """(expert, prefetched) to copy now; it has a slot."""
        if self.lent:
            return None
        if self.demanded:
            self.flying += 1
            return self.demanded.popleft(), False
        while (wish := self.prefetcher.next(perf_counter_ns())) is not None:
            until = self.slots.calls_until(wish.layer, wish.probability)
            if self.slots.place(wish.expert, unless=until) != NOWHERE:
                self.flying += 1
                return wish.expert, True
        while self.later:
            expert = self.later.pop()
            until = self.slots.expected(expert)
            if self.slots.slot_of[expert] == NOWHERE and self.slots.place(expert, unless=until) != NOWHERE:
                self.flying += 1
                return expert, False
        return None

    def _ended(self, copy: Copy, error: Exception | None) -> None:
        now = perf_counter_ns()
        began = max(copy.began_ns, self._last_ns) if self.depth > 1 else copy.began_ns  # on a GPU one waits for the other
        spent, self._last_ns = now - began, now
        self.copied.ns += spent
        if error is None:
            self.copied.bytes += self.expert_bytes
            self.prefetcher.copied(spent)
            self.slots.filled(copy.expert, copy.prefetched)
            return
        self.copied.failed += 1
        log.error("an expert could not be copied into its slot: %r", error)
        if not copy.prefetched:
            self.errors[copy.expert] = error
        self.slots.abandon(copy.expert)


def _nothing() -> None:
    pass
