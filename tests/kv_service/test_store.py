"""The store's rules one by one, and the whole against a naive model."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from kv_service.keys import Key, chain
from kv_service.store import Outcome, Reservation, Store
from kv_service.store_order import ATTENTION_TOKENS, Entry, State
from kv_service.store_room import HIGH, LOW, Limits

ROOT = bytes(32)
ME, YOU = b"m" * 16, b"y" * 16
KIB = 4096


def line(*tokens: int) -> list[Key]:
    return chain(ROOT, [[token] for token in tokens])


def sum_of(key: Key) -> bytes:
    return key.digest[:16]


def reserve(store: Store, key: Key, size: int = 10, *, tag: bytes = ME, now: float = 0.0) -> Reservation:
    place = store.reserve(tag, key, size, now + 60, now)
    assert isinstance(place, Reservation), place
    return place


def put(store: Store, key: Key, size: int = 10, *, tag: bytes = ME, checksum: bytes | None = None) -> Outcome:
    place = store.reserve(tag, key, size, 60.0, 0.0)
    if isinstance(place, Outcome):
        return place
    return store.commit(place, checksum or sum_of(key))


def held(store: Store, keys: list[Key], tag: bytes = ME) -> list[bool]:
    """Without counting as a use."""
    names = {entry.name for entry in store}
    return [tag + key.digest in names for key in keys]


def entry_of(store: Store, key: Key, tag: bytes = ME) -> Entry:
    return next(entry for entry in store if entry.name == tag + key.digest)


def flush(store: Store, on_disk: bool = True) -> None:
    """What the writing thread does."""
    doomed = store.room.take_doomed()
    batch = store.room.take_dirty(1 << 30)
    store.room.deleted(doomed)
    store.room.written(batch, on_disk=on_disk)


# Writing


def test_the_same_bytes_again_are_fine_and_others_are_an_alarm() -> None:
    store = Store(Limits(100))
    (key,) = line(1)
    assert put(store, key) is Outcome.STORED
    assert put(store, key) is Outcome.HELD
    assert put(store, key, checksum=bytes(16)) is Outcome.CONFLICT
    counters = store.counters
    assert (counters.stored, counters.duplicates, counters.conflicts, counters.refused) == (1, 1, 1, 1)
    assert entry_of(store, key).checksum == sum_of(key)
    assert (store.room.memory, store.bytes, store.blocks) == (10, 10, 1)


def test_a_block_is_invisible_until_it_is_whole() -> None:
    store = Store(Limits(100))
    (key,) = line(1)
    place = reserve(store, key)
    assert store.look_up(ME, [key.digest]) == 0
    assert store.lease(ME, key) is None
    store.commit(place, sum_of(key))
    assert store.look_up(ME, [key.digest]) == 1


def test_a_second_writer_is_compared_and_not_kept() -> None:
    store = Store(Limits(100))
    (key,) = line(1)
    first, second = reserve(store, key), reserve(store, key)
    assert (first.kept, second.kept, store.room.memory) == (True, False, 10)
    assert store.commit(second, sum_of(key)) is Outcome.STALE  # the first has not finished
    assert store.commit(first, sum_of(key)) is Outcome.STORED
    third, fourth = reserve(store, key), reserve(store, key)
    assert store.commit(third, sum_of(key)) is Outcome.HELD
    assert store.commit(fourth, bytes(16)) is Outcome.CONFLICT


def test_a_writer_that_took_too_long_is_overtaken_and_changes_nothing() -> None:
    store = Store(Limits(100))
    (key,) = line(1)
    slow = reserve(store, key, 10, now=0.0)
    quick = reserve(store, key, 12, now=61.0)
    assert (quick.kept, store.room.memory) == (True, 12)
    assert store.commit(slow, sum_of(key)) is Outcome.STALE
    assert store.abort(slow) is Outcome.BROKEN
    assert store.commit(quick, sum_of(key)) is Outcome.STORED
    assert (store.counters.stale_writers, entry_of(store, key).size, store.room.memory) == (1, 12, 12)


def test_an_aborted_block_leaves_nothing() -> None:
    store = Store(Limits(100))
    (key,) = line(1)
    assert store.abort(reserve(store, key)) is Outcome.BROKEN
    assert (store.room.memory, store.room.home, store.blocks, store.counters.broken) == (0, 0, 0, 1)
    assert put(store, key) is Outcome.STORED


# Reading


def test_look_up_stops_at_a_hole() -> None:
    store = Store(Limits(100))
    keys = line(1, 2, 3, 4)
    for key in (keys[0], keys[1], keys[3]):
        put(store, key)
    digests = [key.digest for key in keys]
    assert store.look_up(ME, digests) == 2
    assert store.look_up(ME, digests[2:]) == 0
    assert store.look_up(ME, []) == 0
    assert (store.counters.hits, store.counters.misses) == (2, 2 + 2)
    put(store, keys[2])
    assert store.look_up(ME, digests) == 4


def test_tokens_and_parent_are_compared_on_every_hit() -> None:
    store = Store(Limits(100))
    first, second = line(1, 2)
    put(store, first)
    put(store, second)
    for other in (second._replace(token_ids=(3,)), second._replace(parent=bytes(32)), second._replace(token_ids=(2, 2))):
        assert store.lease(ME, other) is None
    assert store.lease(ME, second) is entry_of(store, second)


def test_tenants_do_not_meet() -> None:
    store = Store(Limits(100))
    (key,) = line(1)
    put(store, key, tag=ME)
    assert store.look_up(YOU, [key.digest]) == 0
    assert store.lease(YOU, key) is None
    assert put(store, key, tag=YOU, checksum=bytes(16)) is Outcome.STORED  # not even a conflict says what others hold
    assert store.blocks == 2


def test_a_quarantined_block_is_a_hole() -> None:
    store = Store(Limits(100))
    keys = line(1, 2, 3)
    for key in keys:
        put(store, key)
    store.quarantine(entry_of(store, keys[1]))
    assert store.look_up(ME, [key.digest for key in keys]) == 1
    assert put(store, keys[1]) is Outcome.STORED
    assert store.look_up(ME, [key.digest for key in keys]) == 3


# What goes


def test_leaves_go_before_parents() -> None:
    store = Store(Limits(34))
    keys = line(1, 2, 3)
    for key in keys:
        put(store, key)
    (other,) = line(9)
    put(store, other)
    assert held(store, [*keys, other]) == [True, True, False, True]


def test_the_least_recently_used_branch_goes_first() -> None:
    store = Store(Limits(45))
    a, b = line(1, 2), line(8, 9)
    for key in (*a, *b):
        put(store, key)
    store.look_up(ME, [key.digest for key in a])
    put(store, line(5)[0])
    assert held(store, [*a, *b]) == [True, True, True, False]


def test_what_costs_more_to_compute_again_stays_longer() -> None:
    store = Store(Limits(100))
    early = Key(b"e" * 32, b"r" * 32, (1, 2), 0)
    late = Key(b"l" * 32, b"s" * 32, (1, 2), 4 * ATTENTION_TOKENS)
    large = Key(b"b" * 32, b"t" * 32, (1, 2), 4 * ATTENTION_TOKENS)
    put(store, late, 10)
    put(store, large, 70)  # the same cost for seven times the bytes
    put(store, early, 10)
    put(store, line(7)[0], 10)
    assert held(store, [late, early, large]) == [True, True, False]
    put(store, line(8)[0], 70)
    assert held(store, [late, early]) == [True, False]


def test_a_block_never_evicts_its_own_prefix() -> None:
    store = Store(Limits(30))
    keys = line(1, 2, 3, 4)
    assert [put(store, key) for key in keys] == [Outcome.STORED] * 3 + [Outcome.NO_ROOM]
    assert held(store, keys) == [True, True, True, False]


def test_larger_than_the_budget_is_refused() -> None:
    store = Store(Limits(30))
    assert put(store, line(2)[0], 31) is Outcome.NO_ROOM
    assert put(store, line(2)[0], 30) is Outcome.STORED


def test_blocks_on_their_way_count_and_are_waited_for() -> None:
    store = Store(Limits(30))
    places = [reserve(store, line(token)[0]) for token in range(3)]
    assert store.reserve(ME, line(7)[0], 1, 60.0, 0.0) is Outcome.BUSY
    store.abort(places[0])
    assert reserve(store, line(7)[0], 1).kept


def test_pages_in_use_are_not_evicted() -> None:
    store = Store(Limits(23))
    a, b = line(1)[0], line(2)[0]
    put(store, a)
    put(store, b)
    leased = [store.lease(ME, a), store.lease(ME, b)]
    assert store.reserve(ME, line(3)[0], 10, 60.0, 0.0) is Outcome.BUSY
    assert leased[0]
    store.release(leased[0])
    assert put(store, line(3)[0]) is Outcome.STORED
    assert held(store, [a, b]) == [False, True]


def test_watermarks_evict_in_batches() -> None:
    store = Store(Limits(1000))
    for token in range(95):
        put(store, line(token)[0])
    assert store.room.evicted == 0
    put(store, line(95)[0])
    assert (store.room.evicted, store.room.memory) == (6, 900)


def test_a_tenant_at_its_share_evicts_its_own() -> None:
    store = Store(Limits(100, tenant=30))
    for token in range(5):
        assert put(store, line(token)[0], tag=ME) is Outcome.STORED
        assert put(store, line(token)[0], tag=YOU) is Outcome.STORED
    assert (
        sum(held(store, [line(token)[0] for token in range(5)], ME)) == 2
    )  # 20 of 30: the third would pass the high watermark
    assert sum(held(store, [line(token)[0] for token in range(5)], YOU)) == 2
    assert put(store, line(9)[0], 31) is Outcome.NO_ROOM


# With a disk


def test_memory_full_of_unwritten_blocks_makes_writers_wait() -> None:
    store = Store(Limits(30, disk=10 * KIB))
    keys = line(1, 2, 3, 4)
    for key in keys[:3]:
        put(store, key)
    assert store.reserve(ME, keys[3], 10, 60.0, 0.0) is Outcome.BUSY
    flush(store)
    assert put(store, keys[3]) is Outcome.STORED
    assert [entry_of(store, key).on_disk for key in keys] == [True, True, True, False]
    assert held(store, keys) == [True] * 4
    assert len(store.room.dropped) == 2  # to the low watermark of memory; the disk has them
    assert store.room.memory == 20


def test_disk_room_is_free_only_when_the_deletion_is_done() -> None:
    store = Store(Limits(1 << 20, disk=4 * KIB))
    keys = [line(token)[0] for token in range(5)]
    for key in keys[:3]:
        put(store, key, KIB)
    flush(store)
    assert put(store, keys[3], KIB) is Outcome.STORED  # passes the high watermark: evicts one, and fits as it is
    assert store.reserve(ME, keys[4], KIB, 60.0, 0.0) is Outcome.BUSY
    flush(store)
    assert put(store, keys[4], KIB) is Outcome.STORED


def test_a_leased_block_stays_on_disk_until_it_is_released() -> None:
    store = Store(Limits(1 << 20, disk=4 * KIB))
    (key,) = line(1)
    put(store, key, KIB)
    flush(store)
    entry = store.lease(ME, key)
    assert entry
    store.quarantine(entry)
    assert not store.room.doomed
    store.release(entry)
    assert [one.name for one in store.room.take_doomed()] == [entry.name]


def test_what_could_not_be_written_stays_until_its_room_is_needed() -> None:
    store = Store(Limits(30, disk=10 * KIB))
    keys = [line(token)[0] for token in range(4)]
    for key in keys[:3]:
        put(store, key)
    flush(store, on_disk=False)
    assert held(store, keys[:3]) == [True] * 3
    assert put(store, keys[3]) is Outcome.STORED
    assert held(store, keys) == [False, False, True, True]
    assert store.room.home == 2 * KIB


def test_warm_blocks_are_kept_by_last_use() -> None:
    store = Store(Limits(30, disk=10 * KIB))
    keys = [line(token)[0] for token in range(3)]
    for key in keys[:2]:
        put(store, key)
    flush(store)
    store.look_up(ME, [keys[0].digest])
    put(store, keys[2])
    assert [entry_of(store, key).in_memory for key in keys] == [True, False, True]
    entry = store.lease(ME, keys[1])
    assert entry
    flush(store)
    assert store.room.warm(entry)
    assert entry.in_memory


# The whole

# Budgets leave a little beyond whole blocks, so that the low watermark takes one block and not two.

PATHS = st.lists(st.integers(0, 1), min_size=1, max_size=4)
SIZES = st.integers(1, 40)
TAGS = st.sampled_from([ME, YOU])


@dataclass(eq=False)
class Plain:
    """A block of the naive model."""

    tag: bytes
    key: Key
    size: int
    until: float
    sealed: bool = False
    leases: int = 0
    rank: float = 0.0
    used: int = 0

    @property
    def worth(self) -> float:
        return len(self.key.token_ids) * (1 + self.key.position / ATTENTION_TOKENS) / self.size


@dataclass
class Naive:
    """The rules said once more, without any thought of speed: memory only."""

    budget: int
    share: int
    blocks: list[Plain] = field(default_factory=list)
    clock: float = 0.0
    ticks: int = 0

    def find(self, tag: bytes, digest: bytes) -> Plain | None:
        return next((block for block in self.blocks if (block.tag, block.key.digest) == (tag, digest)), None)

    def used_by(self, tag: bytes | None) -> int:
        return sum(block.size for block in self.blocks if tag in (None, block.tag))

    def touch(self, blocks: list[Plain]) -> None:
        rank = 0.0
        for block in reversed(blocks):
            self.ticks += 1
            rank = max(rank, block.rank, self.clock + block.worth)
            block.rank, block.used = rank, self.ticks

    def may_go(self, block: Plain, coming: tuple[bytes, bytes]) -> bool:
        parents = {(other.tag, other.key.parent) for other in self.blocks} | {coming}
        return block.sealed and not block.leases and (block.tag, block.key.digest) not in parents

    def make_room(self, tag: bytes, key: Key, size: int) -> bool:
        for whose, budget in ((tag, self.share), (None, self.budget)):
            if self.used_by(whose) + size > budget * HIGH:
                while self.used_by(whose) > budget * LOW - size:
                    candidates = [b for b in self.blocks if whose in (None, b.tag) and self.may_go(b, (tag, key.parent))]
                    if not candidates:
                        break
                    victim = min(candidates, key=lambda block: (block.rank, block.used))
                    self.clock = max(self.clock, victim.rank)
                    self.blocks.remove(victim)
            if self.used_by(whose) + size > budget:
                return False
        return True


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
            self.naive.blocks.remove(known)
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
                self.naive.touch([block])
            return
        known = self.naive.find(place.entry.tag, key.digest)
        if known is None or not known.sealed:
            assert outcome is Outcome.STALE
        else:
            assert outcome is (Outcome.HELD if right else Outcome.CONFLICT)
            if right:
                self.naive.touch([known])

    @precondition(lambda self: self.open)
    @rule()
    def abort(self) -> None:
        place, block, _ = self.open.pop()
        assert self.store.abort(place) is Outcome.BROKEN
        if block in self.naive.blocks:
            self.naive.blocks.remove(block)

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
            self.naive.touch([block])
            self.leased.append((entry, block))

    @precondition(lambda self: self.leased)
    @rule(pick=st.randoms(use_true_random=False), damaged=st.booleans())
    def release(self, pick: Any, damaged: bool) -> None:
        entry, block = self.leased.pop(pick.randrange(len(self.leased)))
        if damaged:
            self.store.quarantine(entry)
            if block in self.naive.blocks:
                self.naive.blocks.remove(block)
        self.store.release(entry)
        block.leases -= 1

    @rule(path=PATHS, tag=TAGS)
    def look_up(self, path: list[int], tag: bytes) -> None:
        found: list[Plain] = []
        for key in line(*path):
            block = self.naive.find(tag, key.digest)
            if block is None or not block.sealed:
                break
            found.append(block)
        assert self.store.look_up(tag, [key.digest for key in line(*path)]) == len(found)
        self.naive.touch(found)

    @invariant()
    def agrees(self) -> None:
        sealed = [block for block in self.naive.blocks if block.sealed]
        assert {entry.name for entry in self.store} == {block.tag + block.key.digest for block in sealed}
        assert (self.store.blocks, self.store.bytes) == (len(sealed), sum(block.size for block in sealed))
        assert self.store.room.memory == self.store.room.home == self.naive.used_by(None) <= 100
        assert max(self.naive.used_by(ME), self.naive.used_by(YOU)) <= 70


TestStoreMachine = StoreMachine.TestCase
TestStoreMachine.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)


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


TestTieredMachine = TieredMachine.TestCase
TestTieredMachine.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)


@pytest.mark.parametrize("size", [1, KIB, KIB + 1])
def test_restart_counts_what_is_on_disk(size: int) -> None:
    store = Store(Limits(100, disk=8 * KIB))
    first, second = line(1, 2)
    for key in (second, first):  # in any order
        store.load(Entry(ME + key.digest, ME, ME + key.parent, b"\1\0\0\0", key.position, size, sum_of(key)))
    assert store.look_up(ME, [first.digest, second.digest]) == 2
    assert store.room.home == 2 * (KIB if size <= KIB else 2 * KIB)
    store.room.shrink(1)
    assert held(store, [first, second]) == [True, False]
