"""Which blocks are held, and which go. Pure: no clock, no threads; the caller holds a lock.

A block is held only while the block before it is, so every held block can be reached from a first one. Whoever uses a block
uses its prefix too: a use moves the block and then everything before it to the recent end of one list, so that a block
always stands before its parent, and taking from the old end evicts leaves first, least recently used first.

Put has two steps. `reserve` makes room before the first byte arrives, so that blocks on their way count against the budget;
`commit` makes the whole block visible at once, `abort` leaves nothing behind. Blocks are never changed: who holds a `Block`
may read it while it is evicted.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import Enum

from kv_service.keys import Key


class Outcome(Enum):
    """What became of a block that was put."""

    STORED = "stored"
    HELD = "the same bytes are held already"
    CONFLICT = "other bytes or tokens are held under this key"
    NO_ROOM = "the budget does not hold it next to its prefix"
    ORPHAN = "the block before it is not held"
    BROKEN = "it ended early or its checksum is wrong"

    @property
    def good(self) -> bool:
        """Whether the block is held now."""
        return self in (Outcome.STORED, Outcome.HELD)


@dataclass(frozen=True, slots=True)
class Block:
    """A held block. `data` is never written to again; `checksum` is its SHA-256."""

    key: Key
    data: bytes | bytearray
    checksum: bytes


@dataclass(slots=True, eq=False)
class Reservation:
    """Room for a block on its way. `held`: the key is held, so its bytes are compared by checksum and need not be kept."""

    key: Key
    size: int
    held: bool


@dataclass(slots=True)
class Counters:
    """Since start; the meanings are those of GetStats."""

    hits: int = 0
    misses: int = 0
    stored: int = 0
    refused: int = 0
    evicted: int = 0
    conflicts: int = 0


class Store:
    """Blocks by digest, `budget_bytes` of them at most, blocks on their way included."""

    def __init__(self, budget_bytes: int) -> None:
        self.budget_bytes = budget_bytes
        self.bytes = 0
        self.reserved = 0
        self.counters = Counters()
        self._blocks: OrderedDict[bytes, Block] = OrderedDict()  # oldest use first, each block before its parent

    def __len__(self) -> int:
        return len(self._blocks)

    def reserve(self, key: Key, size: int) -> Reservation | Outcome:
        """Room for `size` bytes, evicting what must go; ORPHAN or NO_ROOM (and nothing evicted) when it cannot be had."""
        if key.digest in self._blocks:
            return Reservation(key, 0, held=True)
        if not self._reachable(key):
            return self._refuse(Outcome.ORPHAN)
        prefix = sum(len(block.data) for block in self._upwards(key.parent))
        if prefix + self.reserved + size > self.budget_bytes:
            return self._refuse(Outcome.NO_ROOM)
        self._use(key.parent)  # the prefix stands at the recent end now: what is evicted next comes before it
        while self.bytes + self.reserved + size > self.budget_bytes:
            self._evict()
        self.reserved += size
        return Reservation(key, size, held=False)

    def commit(self, reservation: Reservation, data: bytes | bytearray, checksum: bytes) -> Outcome:
        """Ends a reservation with the whole block. The caller has verified that `checksum` is its SHA-256."""
        self.reserved -= reservation.size
        key = reservation.key
        held = self._blocks.get(key.digest)
        if held is not None:
            if held.key != key or held.checksum != checksum:
                self.counters.conflicts += 1
                return self._refuse(Outcome.CONFLICT)
            self._use(key.digest)
            return Outcome.HELD
        if reservation.held:  # evicted since, and its bytes were not kept
            return self._refuse(Outcome.NO_ROOM)
        if not self._reachable(key):
            return self._refuse(Outcome.ORPHAN)
        self._blocks[key.digest] = Block(key, data, checksum)
        self.bytes += len(data)
        self.counters.stored += 1
        self._use(key.digest)
        return Outcome.STORED

    def abort(self, reservation: Reservation) -> Outcome:
        """Ends a reservation whose block did not arrive whole."""
        self.reserved -= reservation.size
        return self._refuse(Outcome.BROKEN)

    def look_up(self, keys: Sequence[Key]) -> int:
        """How many keys, from the first on, are held with the same parent and tokens; they count as used."""
        held = 0
        while held < len(keys) and self._held(keys[held]):
            held += 1
        self.counters.hits += held
        self.counters.misses += len(keys) - held
        if held:
            self._use(keys[held - 1].digest)
        return held

    def get(self, key: Key) -> Block | None:
        """The block, if it is held with the same parent and tokens; it counts as used."""
        block = self._held(key)
        if block is not None:
            self._use(key.digest)
        return block

    def _held(self, key: Key) -> Block | None:
        block = self._blocks.get(key.digest)
        return block if block is not None and block.key == key else None

    def _reachable(self, key: Key) -> bool:
        return not key.parent or key.parent in self._blocks

    def _upwards(self, digest: bytes) -> Iterator[Block]:
        while digest:
            block = self._blocks[digest]
            yield block
            digest = block.key.parent

    def _use(self, digest: bytes) -> None:
        for block in self._upwards(digest):
            self._blocks.move_to_end(block.key.digest)

    def _evict(self) -> None:
        _, block = self._blocks.popitem(last=False)
        self.bytes -= len(block.data)
        self.counters.evicted += 1

    def _refuse(self, outcome: Outcome) -> Outcome:
        self.counters.refused += 1
        return outcome
