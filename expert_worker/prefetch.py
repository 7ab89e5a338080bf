"""What to copy ahead of time: hints in, copies out, and what came of them. Pure: time is an argument, the caller copies.

A hint's experts are wished for in the order of their probability, as many as the measured speed of copies can bring by the time
the layer's call is expected, behind what is wished for earlier calls. A second hint for the same step and layer replaces the
first. A hint is stale when its router's calls have reached the layer. `source` names the router: step numbers are its own.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from expert_worker.slots import Slots

# A hinted expert at least this likely is not evicted for another hint.
PREDICTED = 0.5
_NEWEST = 0.1  # share of the newest copy in the average
_SOURCES = 256
_OUTLOOKS = 64  # hints that may wait for their calls

Key = tuple[str, int, int]  # source, step, place of the layer


class Wish(NamedTuple):
    """An expert to copy by a time (ns)."""

    expert: int
    layer: int
    probability: float
    deadline_ns: int


@dataclass(slots=True)
class Outlook:
    """A hint that waits for its call."""

    experts: frozenset[int]
    predicted: list[int]
    deadline_ns: int
    wishes: list[Wish] = field(default_factory=list)  # least likely first


class Prefetcher:
    """One per worker. Not for concurrent use."""

    def __init__(self, slots: Slots, copy_ns: float) -> None:
        """copy_ns: how long copying an expert takes, to begin with."""
        self.copy_ns = copy_ns
        self.late_wishes = 0  # not copied because there was no time left
        self._slots = slots
        self._reached: dict[str, tuple[int, int]] = {}  # source -> step and layer of its last call
        self._outlooks: dict[Key, Outlook] = {}

    def copied(self, ns: int) -> None:
        """An expert was copied in that time."""
        self.copy_ns += _NEWEST * (ns - self.copy_ns)

    # ---- hints ----

    def hint(
        self, key: Key, experts: Sequence[int], probabilities: Sequence[float], now_ns: int, window_ns: int, busy: int
    ) -> bool:
        """Takes a hint; False when it is stale. experts: likeliest first. busy: copies that are under way or demanded."""
        source, step, layer = key
        if (step, layer) <= self._reached.get(source, (-1, -1)):
            return False
        self._forget(key)
        if len(self._outlooks) >= _OUTLOOKS:
            self._forget(next(iter(self._outlooks)))
        deadline = now_ns + window_ns
        likely = [expert for expert, chance in zip(experts, probabilities, strict=True) if chance >= PREDICTED]
        outlook = Outlook(frozenset(experts), likely, deadline)
        self._outlooks[key] = outlook
        self._slots.predicted[likely] = True
        room = int((window_ns / self.copy_ns if self.copy_ns > 0 else len(experts)) - busy - self._ahead(deadline))
        missing = [
            Wish(expert, layer, chance, deadline)
            for expert, chance in zip(experts, probabilities, strict=True)
            if self._slots.slot_of[expert] < 0 and chance > 0
        ]
        outlook.wishes = missing[: max(room, 0)][::-1]
        self.late_wishes += len(missing) - len(outlook.wishes)
        return True

    def _ahead(self, deadline_ns: int) -> int:
        """Wishes that are due before."""
        return sum(len(outlook.wishes) for outlook in self._outlooks.values() if outlook.deadline_ns < deadline_ns)

    def _forget(self, key: Key) -> frozenset[int]:
        outlook = self._outlooks.pop(key, None)
        if outlook is None:
            return frozenset()
        self._slots.predicted[outlook.predicted] = False
        for other in self._outlooks.values():  # two routers may predict the same
            self._slots.predicted[other.predicted] = True
        return outlook.experts

    def give_up(self, expert: int) -> None:
        """Nothing is wished for an expert any more."""
        for outlook in self._outlooks.values():
            outlook.wishes = [wish for wish in outlook.wishes if wish.expert != expert]
            outlook.predicted = [other for other in outlook.predicted if other != expert]
        self._slots.predicted[expert] = False

    # ---- copies ----

    def next(self, now_ns: int) -> Wish | None:
        """The wish to fulfil now: of the call expected first the likeliest that can still be in time. It is taken off."""
        for outlook in sorted(self._outlooks.values(), key=lambda outlook: outlook.deadline_ns):
            while outlook.wishes:
                wish = outlook.wishes.pop()
                if self._slots.slot_of[wish.expert] >= 0:
                    continue
                if now_ns + self.copy_ns <= wish.deadline_ns:
                    return wish
                self.late_wishes += 1
        return None

    # ---- calls ----

    def arrived(self, source: str, step: int, layer: int) -> frozenset[int]:
        """A call of `layer` is here: forgets every hint that it makes stale, and returns what was hinted for it."""
        if source not in self._reached and len(self._reached) >= _SOURCES:
            del self._reached[next(iter(self._reached))]
        self._reached[source] = step, layer
        hinted: frozenset[int] = frozenset()
        for key in [key for key in self._outlooks if key[0] == source and key[1:] <= (step, layer)]:
            experts = self._forget(key)
            if key[1:] == (step, layer):
                hinted = experts
        return hinted
