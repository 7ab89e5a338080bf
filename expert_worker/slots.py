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
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

NOWHERE = -1
CROWD = 8  # rows

# The share of the newest call in the fast and in the slow average, and the fast one's share in p (chosen on recorded traces).
FAST, SLOW, FAST_SHARE = 0.2, 0.01, 0.3
_LEAST = 1e-4  # probability of an expert that was never used

Ints = npt.NDArray[np.int64]
Flags = npt.NDArray[np.bool_]
Uses = npt.NDArray[np.float64]

AT, FREE, WASTED = range(3)


class Table(NamedTuple):
    """All there is to know of slots, in arrays that compiled steps change by the same rules (`kernels/compiled/slots.py`)."""

    capacity: int
    layers: int
    floor: int
    window: int
    first: Ints  # [layers + 1]: each layer's first expert
    layer_of: Ints  # [experts]
    slot_of: Ints  # [experts]
    expert_in: Ints  # [slots]
    ready: Flags  # [slots]
    unused: Flags  # [slots]: came by prefetch and no call has used it
    pins: Ints  # [slots]
    predicted: Flags  # [experts] that only a call in need may evict
    held: Ints  # [layers]: slots of each
    fast: Uses  # [experts], as the next two
    slow: Uses
    gap: Uses  # layers * (1/p - 1)
    free: Ints  # [slots]: a stack of empty ones
    numbers: Ints  # [3]: layer of the last call; how many are empty; experts that left unused
    distances: Uses  # [layers]: room for whoever looks for a victim


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
        layers, experts = len(sizes), sum(sizes)
        averages = np.full((3, experts), 1.0 / max(sizes, default=1))
        self.table = table = Table(
            capacity=capacity,
            layers=layers,
            floor=min(floor, capacity // layers),
            window=max(1, floor, capacity // 8),  # experts that one call may bring in before it has run those
            first=np.cumsum([0, *sizes]),
            layer_of=np.repeat(np.arange(layers), sizes),
            slot_of=np.full(experts, NOWHERE),
            expert_in=np.full(capacity, NOWHERE),
            ready=np.zeros(capacity, dtype=bool),
            unused=np.zeros(capacity, dtype=bool),
            pins=np.zeros(capacity, dtype=np.int64),
            predicted=np.zeros(experts, dtype=bool),
            held=np.zeros(layers, dtype=np.int64),
            fast=averages[0],
            slow=averages[1],
            gap=averages[2],
            free=np.arange(capacity - 1, -1, -1),
            numbers=np.array((layers - 1, capacity, 0)),
            distances=np.zeros(layers),
        )
        table.gap[:] = self._gap_of(table.fast)
        self.slot_of = memoryview(table.slot_of.data)  # the same memory; single numbers are read faster so
        self._ready = memoryview(table.ready.data)

    @property
    def capacity(self) -> int:
        """Slots."""
        return self.table.capacity

    @property
    def window(self) -> int:
        """Experts that one call may bring in before it has run those."""
        return self.table.window

    @property
    def predicted(self) -> Flags:
        """Experts that only a call in need may evict."""
        return self.table.predicted

    @property
    def wasted(self) -> int:
        """Experts that left unused."""
        return int(self.table.numbers[WASTED])

    # ---- what calls need ----

    def used(self, layer: int, experts: Ints, uses: Uses) -> None:
        """A call of `layer` needs these experts, each as much as `uses_of` says."""
        table = self.table
        own = slice(table.first[layer], table.first[layer + 1])
        for average, share in ((table.fast, FAST), (table.slow, SLOW)):
            average[own] *= 1 - share
            average[experts] += share * uses
        table.gap[own] = self._gap_of(FAST_SHARE * table.fast[own] + (1 - FAST_SHARE) * table.slow[own])
        table.numbers[AT] = layer

    def _gap_of(self, probability: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
        return self.table.layers / np.maximum(probability, _LEAST) - self.table.layers

    def _distance(self, layer: int) -> int:
        """Calls until that layer's next one."""
        return (layer - int(self.table.numbers[AT]) - 1) % self.table.layers + 1

    def calls_until(self, layer: int, probability: float) -> float:
        """Expected calls until an expert is needed that the next call of `layer` needs with this probability."""
        return float(self._distance(layer) + self._gap_of(np.array(probability)))

    def expected(self, expert: int) -> float:
        """Expected calls until an expert is needed."""
        return float(self._distance(int(self.table.layer_of[expert])) + self.table.gap[expert])

    # ---- where experts are ----

    def touch(self, experts: Sequence[int]) -> None:
        """A call uses these ready experts: whoever brought them did not do so in vain."""
        self.table.unused[self._slots(experts)] = False

    def is_ready(self, expert: int) -> bool:
        """Whether it can be used."""
        slot = self.slot_of[expert]
        return slot != NOWHERE and bool(self._ready[slot])

    def ready(self, layer: int) -> list[int]:
        """The layer's experts that can be used, ascending."""
        return [expert for expert in range(*self.table.first[layer : layer + 2]) if self.is_ready(expert)]

    def place(self, expert: int, unless: float = 0.0, needed: bool = False) -> int:
        """Gives a slot to an expert that has none, for the caller to fill; evicts if there is no empty one.

        NOWHERE if that would evict an expert that is pinned, being filled, predicted, of a layer at its floor, or expected to
        be needed within `unless` calls. needed: predictions and floors do not count.
        """
        table = self.table
        if table.numbers[FREE]:
            table.numbers[FREE] -= 1
            slot = int(table.free[table.numbers[FREE]])
        else:
            slot = self._victim(expert, unless, needed)
        if slot != NOWHERE:
            if table.expert_in[slot] != NOWHERE:
                self._evict(slot)
            table.expert_in[slot], table.slot_of[expert] = expert, slot
            table.ready[slot] = table.unused[slot] = False
            table.held[table.layer_of[expert]] += 1
        return slot

    def _victim(self, expert: int, unless: float, needed: bool) -> int:
        table, there = self.table, self.table.expert_in
        layers = table.layer_of[there]
        until = table.gap[there] + ((np.arange(table.layers) - table.numbers[AT] - 1) % table.layers + 1)[layers]
        until[(table.pins > 0) | ~table.ready] = -1
        spared = table.predicted[there] | ((table.held <= table.floor)[layers] & (layers != table.layer_of[expert]))
        slot = int(np.where(spared, -1, until).argmax())
        if spared[slot] or until[slot] < 0:
            if not needed:
                return NOWHERE
            slot = int(until.argmax())
        return slot if until[slot] > unless else NOWHERE

    def _evict(self, slot: int) -> None:
        table = self.table
        table.numbers[WASTED] += table.unused[slot]
        expert = table.expert_in[slot]
        table.held[table.layer_of[expert]] -= 1
        table.slot_of[expert] = NOWHERE

    def filled(self, expert: int, prefetched: bool = False) -> None:
        """Its bytes are in its slot."""
        slot = self.slot_of[expert]
        self.table.ready[slot], self.table.unused[slot] = True, prefetched

    def drop(self, expert: int) -> None:
        """Empties an unpinned expert's slot, filled or not."""
        table, slot = self.table, self.slot_of[expert]
        self._evict(slot)
        table.expert_in[slot] = NOWHERE
        table.ready[slot] = table.unused[slot] = False
        table.free[table.numbers[FREE]] = slot
        table.numbers[FREE] += 1

    def abandon(self, expert: int) -> None:
        """Empties the slot of an expert whose bytes did not come; whoever pinned it must not unpin it."""
        self.table.pins[self.slot_of[expert]] = 0
        self.drop(expert)

    def _slots(self, experts: Sequence[int]) -> Ints:
        return np.array([self.slot_of[expert] for expert in experts], dtype=np.int64)

    def pin(self, experts: Sequence[int]) -> None:
        """Keeps placed experts, all different, where they are until as many `unpin`s."""
        self.table.pins[self._slots(experts)] += 1

    def unpin(self, experts: Sequence[int]) -> None:
        """Takes back one `pin` of each."""
        self.table.pins[self._slots(experts)] -= 1
