"""Which experts sit in which slots, and which one goes when another must come in. Pure: the caller moves the bytes.

Belady's rule evicts what is needed farthest in the future. We estimate that: an expert of a layer whose next call is d calls
away, and which a call of its layer needs with probability p, is needed again after d + layers * (1/p - 1) calls. p mixes two
averages over the calls of its layer, one that forgets in a few calls (recency) and one that remembers hundreds (frequency); d
makes the layer just passed the farthest. README.md of this room compares the rule with LRU, LFU and Belady on recorded traces.

A call of many rows needs nearly every expert once, which says little; each expert then counts as `CROWD` of its rows would use
it. So what a prompt touches once is the first to go again, and since a call may bring in no more than `window` experts at a
time, a prompt takes at most that many slots away from decoding.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

NOWHERE = -1
CROWD = 8  # rows

# The share of the newest call in the fast and in the slow average, and the fast one's share in p (chosen on recorded traces).
FAST, SLOW, FAST_SHARE = 0.2, 0.01, 0.3
_LEAST = 1e-4  # probability of an expert that was never used

Ints = npt.NDArray[np.int64]
Uses = npt.NDArray[np.float64]


def uses_of(counts: Sequence[int], rows: int) -> Uses:
    """How many of CROWD rows would use each expert, at most 1, when `counts` of `rows` rows do."""
    if rows <= CROWD:
        return np.ones(len(counts))
    return np.minimum(1.0, np.array(counts, dtype=np.float64) * (CROWD / rows))


class Slots:
    """`capacity` slots for experts numbered 0, 1, ... layer after layer. A slot is empty, being filled, or ready."""

    def __init__(self, capacity: int, sizes: Sequence[int], floor: int = 0) -> None:
        """sizes: experts of each layer. floor: a layer with no more resident than this loses none to others (as many as fit
        for all layers). ValueError when there is no slot."""
        if capacity < 1:
            raise ValueError(f"{capacity} slots")
        self.capacity, self.layers = capacity, len(sizes)
        self.floor = min(floor, capacity // len(sizes))
        self.window = max(1, floor, capacity // 8)  # experts that one call may bring in before it has run those
        self.layer_of = np.repeat(np.arange(len(sizes)), sizes)  # expert -> layer
        self._first = np.cumsum([0, *sizes])
        self.slot_of = [NOWHERE] * len(self.layer_of)
        self.expert_in = np.full(capacity, NOWHERE)
        self.predicted = np.zeros(len(self.layer_of), dtype=bool)  # experts that only a call in need may evict
        self.unused = np.zeros(capacity, dtype=bool)  # came by prefetch and no call has used it
        self.wasted = 0  # experts that left unused
        self._here = [False] * len(self.layer_of)  # experts whose slot is ready
        self._free = list(range(capacity - 1, -1, -1))
        self._ready = np.zeros(capacity, dtype=bool)
        self._pins = np.zeros(capacity, dtype=np.int64)
        self._count = np.zeros(self.layers, dtype=np.int64)  # slots of each layer
        self._at = self.layers - 1  # the layer of the last call
        chance = 1.0 / max(sizes, default=1)
        self._fast, self._slow = (np.full(len(self.layer_of), chance) for _ in range(2))
        self._gap = np.full(len(self.layer_of), self._gap_of(np.array(chance)))  # layers * (1/p - 1)

    # ---- what calls need ----

    def used(self, layer: int, experts: Ints, uses: Uses) -> None:
        """A call of `layer` needs these experts, each as much as `uses_of` says."""
        own = slice(self._first[layer], self._first[layer + 1])
        for average, share in ((self._fast, FAST), (self._slow, SLOW)):
            average[own] *= 1 - share
            average[experts] += share * uses
        self._gap[own] = self._gap_of(FAST_SHARE * self._fast[own] + (1 - FAST_SHARE) * self._slow[own])
        self._at = layer

    def _gap_of(self, probability: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
        return self.layers / np.maximum(probability, _LEAST) - self.layers

    def calls_until(self, layer: int, probability: float) -> float:
        """Expected calls until an expert is needed that the next call of `layer` needs with this probability."""
        return float((layer - self._at - 1) % self.layers + 1 + self._gap_of(np.array(probability)))

    def expected(self, expert: int) -> float:
        """Expected calls until an expert is needed."""
        return float((self.layer_of[expert] - self._at - 1) % self.layers + 1 + self._gap[expert])

    # ---- where experts are ----

    def touch(self, experts: Sequence[int]) -> None:
        """A call uses these ready experts: whoever brought them did not do so in vain."""
        self.unused[self._slots(experts)] = False

    def is_ready(self, expert: int) -> bool:
        """Whether it can be used."""
        return self._here[expert]

    def ready(self, layer: int) -> list[int]:
        """The layer's experts that can be used, ascending."""
        return [expert for expert in range(self._first[layer], self._first[layer + 1]) if self.is_ready(expert)]

    def place(self, expert: int, unless: float = 0.0, needed: bool = False) -> int:
        """Gives a slot to an expert that has none, for the caller to fill; evicts if there is no empty one.

        NOWHERE if that would evict an expert that is pinned, being filled, predicted, of a layer at its floor, or expected to
        be needed within `unless` calls. needed: predictions and floors do not count.
        """
        slot = self._free.pop() if self._free else self._victim(expert, unless, needed)
        if slot != NOWHERE:
            if self.expert_in[slot] != NOWHERE:
                self._evict(slot)
            self.expert_in[slot], self.slot_of[expert] = expert, slot
            self._ready[slot] = self.unused[slot] = False
            self._count[self.layer_of[expert]] += 1
        return slot

    def _victim(self, expert: int, unless: float, needed: bool) -> int:
        layers = self.layer_of[self.expert_in]
        until = self._gap[self.expert_in] + ((np.arange(self.layers) - self._at - 1) % self.layers + 1)[layers]
        until[(self._pins > 0) | ~self._ready] = -1
        spared = self.predicted[self.expert_in] | ((self._count <= self.floor)[layers] & (layers != self.layer_of[expert]))
        slot = int(np.where(spared, -1, until).argmax())
        if spared[slot] or until[slot] < 0:
            if not needed:
                return NOWHERE
            slot = int(until.argmax())
        return slot if until[slot] > unless else NOWHERE

    def _evict(self, slot: int) -> None:
        self.wasted += int(self.unused[slot])
        expert = int(self.expert_in[slot])
        self._here[expert] = False
        self._count[self.layer_of[expert]] -= 1
        self.slot_of[expert] = NOWHERE

    def filled(self, expert: int, prefetched: bool = False) -> None:
        """Its bytes are in its slot."""
        slot = self.slot_of[expert]
        self._ready[slot], self.unused[slot], self._here[expert] = True, prefetched, True

    def drop(self, expert: int) -> None:
        """Empties an unpinned expert's slot, filled or not."""
        slot = self.slot_of[expert]
        self._evict(slot)
        self.expert_in[slot] = NOWHERE
        self._ready[slot] = self.unused[slot] = False
        self._free.append(slot)

    def abandon(self, expert: int) -> None:
        """Empties the slot of an expert whose bytes did not come; whoever pinned it must not unpin it."""
        self._pins[self.slot_of[expert]] = 0
        self.drop(expert)

    def _slots(self, experts: Sequence[int]) -> Ints:
        return np.array([self.slot_of[expert] for expert in experts], dtype=np.int64)

    def pin(self, experts: Sequence[int]) -> None:
        """Keeps placed experts, all different, where they are until as many `unpin`s."""
        self._pins[self._slots(experts)] += 1

    def unpin(self, experts: Sequence[int]) -> None:
        """Takes back one `pin` of each."""
        self._pins[self._slots(experts)] -= 1
