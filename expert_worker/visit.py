"""One call's way through the slots: what is there runs first, what is missing comes in meanwhile, nothing is copied twice."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from time import perf_counter_ns
from types import TracebackType

import numpy as np

from expert_worker.prefetch import Key
from expert_worker.residency import CopyFailed, Residency
from expert_worker.slots import NOWHERE, Uses
from forefetch.wire import Verified

Elsewhere = Callable[[list[int], int], list[int]]
"""(missing experts, copies under way) -> which of the missing need not come."""


class Visit:
    """A context that holds the experts of one call where they are, wave by wave."""

    def __init__(
        self, residency: Residency, key: Key, experts: Sequence[int], uses: Uses, elsewhere: Elsewhere | None = None
    ) -> None:
        """experts: distinct numbers of one layer. uses: see Slots.used. elsewhere: see `Elsewhere`."""
        self.stall_ns = 0
        self.elsewhere: list[int] = []  # those that the caller computes by itself
        self._choose = elsewhere
        self._residency, self._slots = residency, residency.slots
        self._key, self._experts, self._uses = key, list(experts), uses
        self._pinned: list[int] = []
        self._missing: list[int] = []  # not placed yet, in order
        self._coming: list[int] = []  # placed, pinned, not there yet
        self._brought = 0  # placed by this wave
        self._found = 0, 0, 0, 0

    def __enter__(self) -> Visit:
        """The call is here: verifies its hint, pins what is there, demands what is not."""
        residency, slots, experts = self._residency, self._slots, self._experts
        with residency.changed:
            residency.errors.clear()
            hinted = residency.prefetcher.arrived(*self._key)
            slots.used(self._key[2], np.array(experts, dtype=np.int64), self._uses)
            self._ready = [expert for expert in experts if slots.is_ready(expert)]
            absent = [expert for expert in experts if not slots.is_ready(expert)]
            slots.pin(self._ready)
            self._pinned = list(self._ready)
            slots.touch(self._ready)
            flying = [expert for expert in absent if slots.slot_of[expert] != NOWHERE]
            self._follow(flying)
            self._missing = [expert for expert in absent if slots.slot_of[expert] == NOWHERE]
            if self._choose is not None and self._missing:
                self.elsewhere = self._choose(self._missing, len(flying) + residency.flying)
                self._missing = [expert for expert in self._missing if expert not in self.elsewhere]
            self._refill()
        hits, late = (sum(expert in hinted for expert in group) for group in (self._ready, absent))
        self._found = hits, late, len(absent) - late, len(self._ready) - hits
        return self

    def verified(self) -> Verified:
        """How the experts were found, and what was copied and wasted since the last time that this was asked."""
        return Verified(*self._found, *self._residency.since_last())

    def waves(self) -> Iterator[list[int]]:
        """Experts that are in their slots now: run all of them, then ask for more. Names each expert once. CopyFailed."""
        first = self._ready
        if self._residency.alone and (self._coming or self._missing):
            began = perf_counter_ns()
            with self._residency.changed:
                first = first + self._fetch()
            self.stall_ns += perf_counter_ns() - began
        if first:
            yield first
        while self._coming or self._missing:
            began = perf_counter_ns()
            with self._residency.changed:
                self._release()
                arrived = self._await()
            self.stall_ns += perf_counter_ns() - began
            yield arrived

    def gather(self) -> bool:
        """Waits until all experts are in their slots at once; False when they do not fit. CopyFailed."""
        began = perf_counter_ns()
        with self._residency.changed:
            while (self._coming or self._missing) and (self._fetch() or self._residency.flying):
                self._brought = 0
                if not self._coming and self._missing:
                    self._residency.changed.wait(0.001)  # until a prefetch under way has become something to evict
        self.stall_ns += perf_counter_ns() - began
        return not self._coming and not self._missing

    def _fetch(self) -> list[int]:
        """Copies in this thread whatever finds room, so that everything can run at once."""
        found: list[int] = []
        while self._coming or self._missing:
            self._refill()
            if not self._coming:
                break
            found += self._await()
        return found

    def _release(self) -> None:
        """The wave before has run."""
        still = set(self._coming)
        self._slots.unpin([expert for expert in self._pinned if expert not in still])
        self._pinned, self._brought = list(self._coming), len(self._coming)

    def _await(self) -> list[int]:
        """Waits until something that comes is there, helping where that is possible; returns all that is."""
        residency, slots = self._residency, self._slots
        while True:
            self._refill()
            while residency.alone and residency.copy_demanded():
                pass
            for expert in self._coming if residency.errors else ():
                if expert in residency.errors:
                    raise CopyFailed("an expert could not be copied into fast memory") from residency.errors[expert]
            arrived = [expert for expert in self._coming if slots.is_ready(expert)]
            if arrived:
                self._coming = [expert for expert in self._coming if expert not in arrived]
                slots.touch(arrived)
                return arrived
            if not residency.copy_demanded():
                if not self._coming and not residency.flying:
                    raise RuntimeError("every slot is pinned")
                residency.changed.wait()

    def _refill(self) -> None:
        """Demands as many of the missing as the window has room for."""
        residency = self._residency
        slot_of = self._slots.slot_of
        lost = [expert for expert in self._coming if slot_of[expert] == NOWHERE and expert not in residency.errors]
        if lost:  # a prefetch that failed under way: now it is a matter of this call
            self._coming = [expert for expert in self._coming if expert not in lost]
            self._pinned = [expert for expert in self._pinned if expert not in lost]
            self._missing = lost + self._missing
        placed: list[int] = []
        while self._missing and self._brought < self._slots.window:
            on_its_way = self._slots.slot_of[self._missing[0]] != NOWHERE  # a hint for another step was quicker
            if not on_its_way and not residency.demand(self._missing[0]):
                break
            self._slots.pin(self._missing[:1])
            placed.append(self._missing.pop(0))
            self._brought += 1
        self._coming += placed
        self._pinned += placed
        if placed and not residency.alone:
            residency.changed.notify_all()

    def _follow(self, flying: list[int]) -> None:
        """Experts that a prefetch is bringing."""
        self._slots.pin(flying)
        self._coming += flying
        self._pinned += flying

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        """Lets go of everything. What was demanded and is under way still arrives."""
        residency = self._residency
        with residency.changed:
            self._slots.unpin([expert for expert in self._pinned if self._slots.slot_of[expert] != NOWHERE])
            residency.withdraw()
            residency.errors.clear()
            if self.elsewhere:
                residency.later = [*residency.later, *self.elsewhere][-self._slots.capacity :]
                residency.changed.notify_all()
