"""Which blocks are held. Pure: times are arguments; the bytes are the caller's, who also holds a lock.

A block is RESERVED (its bytes are counted and on their way), then SEALED (visible, at once and whole), then gone. The index
holds sealed blocks alone. `commit` is compare-and-set: it takes effect only while that very reservation stands, so a writer who
was overtaken changes nothing. What is evicted, dropped and written is decided in `room`.
"""

from __future__ import annotations

import sys
from array import array
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import Enum
from itertools import takewhile
from typing import cast

from kv_service.keys import Key
from kv_service.store_order import Entry, State
from kv_service.store_room import Limits, Room


class Outcome(Enum):
    """What became of a block that was put."""

    STORED = "stored"
    HELD = "the same bytes are held already"
    CONFLICT = "other bytes are held under this key"
    NO_ROOM = "the budget, or the tenant's share of it, does not hold it"
    BUSY = "no room now, but blocks are on their way to disk, being read or being deleted: try again"
    STALE = "another writer is bringing it, or took over before it was whole"
    BROKEN = "it ended early or its checksum is wrong"

    @property
    def good(self) -> bool:
        """Whether the block is held now."""
        return self in (Outcome.STORED, Outcome.HELD)


@dataclass(frozen=True, slots=True)
class Reservation:
    """Room for a block on its way. `kept` False: someone else has it or brings it, so its bytes are only compared."""

    entry: Entry
    kept: bool


@dataclass(slots=True)
class Counters:
    """Since start; the meanings are those of GetStats."""

    hits: int = 0
    misses: int = 0
    stored: int = 0
    refused: int = 0
    conflicts: int = 0
    broken: int = 0
    no_room: int = 0
    stale_writers: int = 0
    duplicates: int = 0
    mismatches: int = 0


@dataclass(slots=True)
class Faults:
    """What went wrong with bytes since start; the meanings are those of GetStats."""

    disk_reads: int = 0
    corrupt: int = 0
    short_reads: int = 0
    read_errors: int = 0
    disk_full: int = 0
    write_errors: int = 0
    damaged_at_start: int = 0


def pack(token_ids: Sequence[int]) -> bytes:
    """Token ids as an Entry has them."""
    packed = array("I", token_ids)
    if sys.byteorder == "big":
        packed.byteswap()
    return packed.tobytes()


class Store:
    """The index. A block's name is its tenant's tag and its digest."""

    def __init__(self, limits: Limits) -> None:
        self.counters = Counters()
        self.bytes = 0  # of sealed blocks
        self.blocks = 0
        self._index: dict[bytes, Entry] = {}
        self._coming: dict[bytes, Entry] = {}  # reserved
        self._children: Counter[bytes] = Counter()
        self.room = Room(limits, lambda entry: not self._children[entry.name], self._remove)

    def __iter__(self) -> Iterator[Entry]:
        """The blocks held now."""
        return iter(list(self._index.values()))

    def children(self, entry: Entry) -> int:
        """How many blocks, held or on their way, follow this one."""
        return self._children[entry.name]

    # ---- writing ----

    def reserve(self, tag: bytes, key: Key, size: int, until: float, now: float) -> Reservation | Outcome:
        """Room for a block that is to be whole by `until`, evicting what must go. BUSY and NO_ROOM leave nothing behind."""
        name = tag + key.digest
        held = self._index.get(name) or self._coming.get(name)
        if held is not None and (held.state is State.SEALED or now < held.deadline):
            return Reservation(held, kept=False)
        if held is not None:
            self._remove(held)
        entry = Entry(name, tag, tag + key.parent, pack(key.token_ids), key.position, size, deadline=until)
        self._insert(entry, self._coming)  # before room is made: the block before it must not count as a leaf
        fits = self.room.take(entry)
        if fits:
            return Reservation(entry, kept=True)
        self._forget(entry)
        return Outcome.BUSY if fits is None else self.refuse(Outcome.NO_ROOM)

    def commit(self, place: Reservation, checksum: bytes, origin: bytes = b"") -> Outcome:
        """Ends a reservation with a whole block. The caller has verified that `checksum` is that of its bytes."""
        entry = place.entry
        if not place.kept:
            return self._compare(place, checksum)
        if self._coming.get(entry.name) is not entry:
            return self.refuse(Outcome.STALE)
        self._index[entry.name] = self._coming.pop(entry.name)
        entry.state, entry.checksum, entry.origin = State.SEALED, checksum, origin
        self._count(entry, 1)
        self.counters.stored += 1
        self.room.seal(entry)
        return Outcome.STORED

    def _compare(self, place: Reservation, checksum: bytes) -> Outcome:
        held = self._index.get(place.entry.name)
        if held is None:
            return self.refuse(Outcome.STALE)
        if held.checksum != checksum:
            return self.refuse(Outcome.CONFLICT)
        self.counters.duplicates += 1
        self.room.touch(held)
        return Outcome.HELD

    def abort(self, place: Reservation) -> Outcome:
        """Ends a reservation whose block did not arrive whole."""
        if place.kept and place.entry.state is State.RESERVED:
            self._remove(place.entry)
        return self.refuse(Outcome.BROKEN)

    def refuse(self, outcome: Outcome) -> Outcome:
        """Counts a block that is not taken."""
        counters = self.counters
        counters.refused += 1
        counters.conflicts += outcome is Outcome.CONFLICT
        counters.broken += outcome is Outcome.BROKEN
        counters.no_room += outcome in (Outcome.NO_ROOM, Outcome.BUSY)
        counters.stale_writers += outcome is Outcome.STALE
        return outcome

    def load(self, entry: Entry) -> None:
        """A block that was found on disk at start."""
        entry.state, entry.on_disk = State.SEALED, True
        self._insert(entry, self._index)
        self._count(entry, 1)
        self.room.settle(entry)

    # ---- reading ----

    def look_up(self, tag: bytes, digests: Sequence[bytes]) -> tuple[int, int]:
        """How many digests, from the first on, are held, and how many of these on disk alone; they count as used."""
        names = [tag + digest for digest in digests]
        found = cast("list[Entry]", list(takewhile(bool, map(self._index.get, names))))
        self.counters.hits += len(found)
        self.counters.misses += len(digests) - len(found)
        if found:
            self._use(found, names)
        return len(found), [entry.in_memory for entry in found].count(False)

    def _use(self, found: Sequence[Entry], names: Sequence[bytes]) -> None:
        """Counts the use of held blocks by touching the last of each run that is contiguous."""
        parents = [entry.parent for entry in found[1:]]
        if parents != names[: len(parents)]:  # a replica's share of a chain: several runs
            for entry, name, after in zip(found, names, parents, strict=False):
                if name != after:
                    self.room.touch(entry)
        self.room.touch(found[-1])

    def find_last(self, tag: bytes, digests: Sequence[bytes]) -> int:
        """How many digests there are up to the last that is held, whose block counts as used; 0: none is."""
        for count in range(len(digests), 0, -1):
            entry = self._index.get(tag + digests[count - 1])
            if entry is not None:
                self.counters.hits += 1
                self.room.touch(entry)
                return count
        self.counters.misses += 1
        return 0

    def lease(self, tag: bytes, key: Key) -> Entry | None:
        """The block, kept where it is until `release`, if it is held with the same tokens after the same block."""
        entry = self._index.get(tag + key.digest)
        if entry is None:
            return None
        if entry.parent != tag + key.parent or entry.tokens != pack(key.token_ids):
            self.counters.mismatches += 1
            return None
        self.room.touch(entry)
        self.room.lease(entry)
        return entry

    def hold(self, entry: Entry) -> bool:
        """A lease on a block that is at hand; False if it is not held any more. Does not count as a use."""
        if entry.state is State.SEALED:
            self.room.lease(entry)
        return entry.state is State.SEALED

    def release(self, entry: Entry) -> None:
        """Ends a lease."""
        self.room.release(entry)

    def quarantine(self, entry: Entry) -> None:
        """A held block's bytes are wrong or cannot be had: it is not held any more. What follows it stays, behind a hole."""
        if entry.state is State.SEALED:
            self._remove(entry)

    # ---- inside ----

    def _insert(self, entry: Entry, where: dict[bytes, Entry]) -> None:
        where[entry.name] = entry
        self._children[entry.parent] += 1

    def _forget(self, entry: Entry) -> State:
        """Takes a block out; what state it was in."""
        was, entry.state = entry.state, State.GONE
        del (self._index if was is State.SEALED else self._coming)[entry.name]
        self._children[entry.parent] -= 1
        if not self._children[entry.parent]:
            del self._children[entry.parent]
        if (before := self._index.get(entry.parent)) is not None:
            before.inherit(entry)
            self.room.offer(before)
        return was

    def _remove(self, entry: Entry) -> None:
        was = self._forget(entry)
        if was is State.SEALED:
            self._count(entry, -1)
        self.room.leave(entry, was)

    def _count(self, entry: Entry, sign: int) -> None:
        self.bytes += sign * entry.size
        self.blocks += sign
