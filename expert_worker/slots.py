"""Which experts sit in which slots, and in what waves a call's experts come to sit there. Pure: the caller moves the bytes.

A victim is the unpinned expert with the least frequency over age: uses so far, divided by the calls since the last one. Plain
recency would evict each expert just before its layer comes round again.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from dataclasses import dataclass

import numpy as np

NOWHERE = -1


@dataclass(frozen=True, slots=True)
class Wave:
    """Experts that are resident together: run all of `slots`' experts after copying each of `loads`."""

    slots: dict[int, int]  # expert -> slot
    loads: tuple[int, ...]  # experts of `slots` that are not in their slot yet


class Slots:
    """`capacity` slots for experts numbered 0..experts-1 across all layers."""

    def __init__(self, capacity: int, experts: int) -> None:
        """ValueError when there is no slot."""
        if capacity < 1:
            raise ValueError(f"{capacity} slots")
        self.slot_of = [NOWHERE] * experts
        self.expert_in = np.full(capacity, NOWHERE)
        self.hits = self.misses = 0
        self._pins = np.zeros(capacity, dtype=np.int64)
        self._uses = np.zeros(experts)
        self._last = np.zeros(experts)

    def waves(self, experts: Sequence[int], now: int) -> Generator[Wave, None, None]:
        """Yields waves that name each expert once, those already resident first; asking for the next ends the one before.

        now: number of the call, rising. Close the iterator if a wave's loads fail: they are forgotten then.
        RuntimeError when pins leave no slot to use.
        """
        self._uses[experts] += 1
        self._last[experts] = now
        ready = [expert for expert in experts if self.slot_of[expert] != NOWHERE]
        missing = [expert for expert in experts if self.slot_of[expert] == NOWHERE]
        self.hits += len(ready)
        self.misses += len(missing)
        while ready or missing:
            for expert in ready:
                self.pin(expert)
            loads = self._place(missing, now)
            if not ready and not loads:
                raise RuntimeError("every slot is pinned")
            yield from self._hold([*ready, *loads], loads)
            ready, missing = [], missing[len(loads) :]

    def _hold(self, experts: list[int], loads: list[int]) -> Generator[Wave, None, None]:
        done = False
        try:
            yield Wave({expert: self.slot_of[expert] for expert in experts}, tuple(loads))
            done = True
        finally:
            for expert in experts:
                self.unpin(expert)
            for expert in () if done else loads:
                self.drop(expert)

    def _place(self, experts: Sequence[int], now: int) -> list[int]:
        """Gives slots to as many as fit, pinned; returns those."""
        placed: list[int] = []
        for expert in experts:
            slot = self._victim(now)
            if slot == NOWHERE:
                break
            if self.expert_in[slot] != NOWHERE:
                self.drop(int(self.expert_in[slot]))
            self.expert_in[slot], self.slot_of[expert] = expert, slot
            self.pin(expert)
            placed.append(expert)
        return placed

    def _victim(self, now: int) -> int:
        """An empty slot, else the unpinned one worth least; NOWHERE if all are pinned."""
        held = self.expert_in
        worth = np.where(held == NOWHERE, -1.0, self._uses[held] / (now - self._last[held] + 1))
        worth[self._pins > 0] = np.inf
        slot = int(worth.argmin())
        return slot if worth[slot] < np.inf else NOWHERE

    def pin(self, expert: int) -> None:
        """Keeps a resident expert where it is until as many `unpin`s."""
        self._pins[self.slot_of[expert]] += 1

    def unpin(self, expert: int) -> None:
        """Takes back one `pin`."""
        self._pins[self.slot_of[expert]] -= 1

    def drop(self, expert: int) -> None:
        """Forgets that a resident expert is resident. It must not be pinned."""
        slot = self.slot_of[expert]
        self.expert_in[slot], self.slot_of[expert] = NOWHERE, NOWHERE
