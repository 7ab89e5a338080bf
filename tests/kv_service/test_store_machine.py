"""The store as a whole: against a naive model, and with a disk that may fail."""

from __future__ import annotations

from itertools import zip_longest
from typing import Any

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from naive_store import Naive, Plain
from store_calls import KIB, ME, YOU, line, sum_of

from kv_service.keys import Key
from kv_service.store import Outcome, Reservation, Store
from kv_service.store_order import ENTRY_BYTES, Entry, State
from kv_service.store_room import Limits

# Budgets leave a little beyond whole blocks, so that the low watermark takes one block and not two.

PATHS = st.lists(st.integers(0, 1), min_size=1, max_size=4)
SIZES = st.integers(1, 40)
TAGS = st.sampled_from([ME, YOU])


class StoreMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.store, self.naive = Store(Limits(100, tenant=70)), Naive(100, 70)
        self.now = 0.0
        self.open: list[tuple[Reservation, Plain | None, Key]] = []
        self.leased: list[tuple[Entry, Plain]] = []

    @rule(path=PATHS, size=SIZES, tag=TAGS)
    def put(self, path: list[int], size: int, tag: bytes) -> None:
        """A chain in one go, as routers put it."""
        for key in line(*path):
            opened = len(self.open)
            self.begin_one(key, size, tag)
            if len(self.open) > opened:
                self.finish_one(*self.open.pop(), right=True)

    @rule(path=PATHS, size=SIZES, tag=TAGS)
    def begin(self, path: list[int], size: int, tag: bytes) -> None:
        """Perhaps without what comes before."""
        self.begin_one(line(*path)[-1], size, tag)

    def begin_one(self, key: Key, size: int, tag: bytes) -> None:
        place = self.store.reserve(tag, key, size, self.now + 10, self.now)
        known = self.naive.find(tag, key.digest)
        if known is not None and (known.sealed or self.now < known.until):
            assert isinstance(place, Reservation)
            assert not place.kept
            self.open.append((place, None, key))
            return
        if known is not None:
            self.naive.remove(known)
        if not self.naive.make_room(tag, key, size):
            assert place in (Outcome.NO_ROOM, Outcome.BUSY)
            return
        assert isinstance(place, Reservation)
        assert place.kept
        block = Plain(tag, key, size, self.now + 10)
        self.naive.blocks.append(block)
        self.open.append((place, block, key))

    @precondition(lambda self: self.open)
    @rule(pick=st.randoms(use_true_random=False), right=st.booleans())
    def finish(self, pick: Any, right: bool) -> None:
        self.finish_one(*self.open.pop(pick.randrange(len(self.open))), right=right)

    def finish_one(self, place: Reservation, block: Plain | None, key: Key, *, right: bool) -> None:
        outcome = self.store.commit(place, sum_of(key) if right or block else bytes(16))
        if block is not None:
            there = block in self.naive.blocks
            assert outcome is (Outcome.STORED if there else Outcome.STALE)
            if there:
                block.sealed = True
                self.naive.touch(block)
            return
        known = self.naive.find(place.entry.tag, key.digest)
        if known is None or not known.sealed:
            assert outcome is Outcome.STALE
        else:
            assert outcome is (Outcome.HELD if right else Outcome.CONFLICT)
            if right:
                self.naive.touch(known)

    @precondition(lambda self: self.open)
    @rule()
    def abort(self) -> None:
        place, block, _ = self.open.pop()
        assert self.store.abort(place) is Outcome.BROKEN
        if block in self.naive.blocks:
            self.naive.remove(block)

    @rule(seconds=st.integers(1, 6))
    def wait(self, seconds: int) -> None:
        self.now += seconds

    @rule(path=PATHS, tag=TAGS)
    def lease(self, path: list[int], tag: bytes) -> None:
        key = line(*path)[-1]
        entry, block = self.store.lease(tag, key), self.naive.find(tag, key.digest)
        assert (entry is not None) == (block is not None and block.sealed)
        if entry and block:
            assert entry.checksum == sum_of(key)
            block.leases += 1
            self.naive.touch(block)
            self.leased.append((entry, block))

    @precondition(lambda self: self.leased)
    @rule(pick=st.randoms(use_true_random=False), damaged=st.booleans())
    def release(self, pick: Any, damaged: bool) -> None:
        entry, block = self.leased.pop(pick.randrange(len(self.leased)))
        if damaged:
            self.store.quarantine(entry)
            if block in self.naive.blocks:
                self.naive.remove(block)
        self.store.release(entry)
        block.leases -= 1

    @rule(path=PATHS, tag=TAGS, without=st.none() | st.integers(0, 3))
    def look_up(self, path: list[int], tag: bytes, without: int | None) -> None:
        """A chain, or a replica's share of it."""
        keys = [key for index, key in enumerate(line(*path)) if index != without]
        found: list[Plain] = []
        for key in keys:
            block = self.naive.find(tag, key.digest)
            if block is None or not block.sealed:
                break
            found.append(block)
        assert self.store.look_up(tag, [key.digest for key in keys])[0] == len(found)
        for block, after in zip_longest(found, found[1:]):
            if after is None or after.key.parent != block.key.digest:
                self.naive.touch(block)

    @invariant()
    def agrees(self) -> None:
        sealed = [block for block in self.naive.blocks if block.sealed]
        assert {entry.name for entry in self.store} == {block.tag + block.key.digest for block in sealed}
        assert (self.store.blocks, self.store.bytes) == (len(sealed), sum(block.size for block in sealed))
        assert self.store.room.memory == self.store.room.home == self.naive.used_by(None) <= 100
        assert max(self.naive.used_by(ME), self.naive.used_by(YOU)) <= 70
        assert self.store.room.index == sum(ENTRY_BYTES + 4 * len(block.key.token_ids) for block in self.naive.blocks)


TestStoreMachine = StoreMachine.TestCase
TestStoreMachine.settings = settings(max_examples=60, stateful_step_count=40)


class TieredMachine(RuleBasedStateMachine):
    """With a disk that may fail: what is held can be had, nothing in use goes, and every byte is accounted for."""

    def __init__(self) -> None:
        super().__init__()
        self.store = Store(Limits(100, disk=8 * KIB, tenant=6 * KIB))
        self.memory: set[bytes] = set()
        self.disk: dict[bytes, Entry] = {}
        self.batch: list[Entry] = []
        self.doomed: list[Entry] = []
        self.leased: list[Entry] = []

    def settle(self) -> None:
        for name in self.store.room.dropped:
            self.memory.discard(name)
        self.store.room.dropped.clear()

    @rule(path=PATHS, size=SIZES, tag=TAGS, right=st.booleans())
    def put(self, path: list[int], size: int, tag: bytes, right: bool) -> None:
        for key in line(*path):
            place = self.store.reserve(tag, key, size, 1.0, 0.0)
            self.settle()
            if isinstance(place, Outcome):
                return
            outcome = self.store.commit(place, sum_of(key)) if right else self.store.abort(place)
            if outcome is Outcome.STORED:
                self.memory.add(tag + key.digest)

    @precondition(lambda self: not self.batch and not self.doomed)
    @rule(most=st.integers(1, 100))
    def begin_writing(self, most: int) -> None:
        self.doomed, self.batch = self.store.room.take_doomed(), self.store.room.take_dirty(most)

    @precondition(lambda self: self.batch or self.doomed)
    @rule(works=st.booleans())
    def end_writing(self, works: bool) -> None:
        for entry in self.doomed:
            assert self.disk.pop(entry.name) is entry
        live = [entry for entry in self.batch if entry.in_memory]
        for entry in live if works else ():
            assert entry.name not in self.disk
            self.disk[entry.name] = entry
        self.store.room.deleted(self.doomed)
        self.store.room.written(live, on_disk=works)
        self.store.room.written([entry for entry in self.batch if entry not in live], on_disk=False)
        self.settle()
        self.batch, self.doomed = [], []

    @rule(path=PATHS, tag=TAGS)
    def lease(self, path: list[int], tag: bytes) -> None:
        entry = self.store.lease(tag, line(*path)[-1])
        if entry:
            self.leased.append(entry)
            if not entry.in_memory and self.store.room.warm(entry):
                self.settle()
                self.memory.add(entry.name)

    @precondition(lambda self: self.leased)
    @rule(pick=st.randoms(use_true_random=False), damaged=st.booleans())
    def release(self, pick: Any, damaged: bool) -> None:
        entry = self.leased.pop(pick.randrange(len(self.leased)))
        if damaged:
            self.store.quarantine(entry)
            self.settle()
        self.store.release(entry)

    @rule(nbytes=st.integers(1, 3 * KIB))
    def shrink(self, nbytes: int) -> None:
        self.store.room.shrink(nbytes)
        self.settle()

    @invariant()
    def what_is_held_can_be_had(self) -> None:
        for entry in self.store:
            assert entry.in_memory == (entry.name in self.memory)
            assert entry.on_disk == (self.disk.get(entry.name) is entry)
            assert entry.in_memory or entry.on_disk
            assert not entry.dirty or entry.in_memory

    @invariant()
    def what_is_in_use_is_still_there(self) -> None:
        for entry in self.leased:
            assert entry.state is State.SEALED or not entry.on_disk or self.disk.get(entry.name) is entry

    @invariant()
    def bytes_are_accounted_for(self) -> None:
        room = self.store.room
        assert room.memory == sum(entry.size for entry in self.store if entry.in_memory) <= 100
        assert room.home <= 8 * KIB
        assert room.on_disk == len(self.disk)
        assert len(self.disk) * KIB <= room.home
        if not (self.batch or self.doomed or room.doomed or room.dirty or self.leased):
            assert room.home == KIB * self.store.blocks
            assert room.index == sum(entry.indexed for entry in self.store)


TestTieredMachine = TieredMachine.TestCase
TestTieredMachine.settings = settings(max_examples=60, stateful_step_count=40)
