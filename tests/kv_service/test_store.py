"""The store against a naive model, and its rules one by one."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field
from typing import Any

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from kv_service.keys import Key, chain
from kv_service.store import Outcome, Reservation, Store

ROOT = bytes(32)


def data_of(key: Key, size: int = 10) -> bytes:
    return (key.digest * (size // 32 + 1))[:size]


def put(store: Store, key: Key, data: bytes | None = None) -> Outcome:
    data = data_of(key) if data is None else data
    place = store.reserve(key, len(data))
    if isinstance(place, Outcome):
        return place
    return store.commit(place, data, hashlib.sha256(data).digest())


def held(store: Store, keys: list[Key]) -> list[bool]:
    """Without counting as a use."""
    return [key.digest in store._blocks for key in keys]


def line(*tokens: int) -> list[Key]:
    return chain(ROOT, [[token] for token in tokens])


def test_a_block_comes_back_as_it_was() -> None:
    store = Store(100)
    (key,) = line(1)
    assert store.get(key) is None
    assert put(store, key) is Outcome.STORED
    block = store.get(key)
    assert block is not None
    assert (block.data, block.checksum) == (data_of(key), hashlib.sha256(data_of(key)).digest())


def test_the_same_bytes_again_are_fine_and_others_are_an_alarm() -> None:
    store = Store(100)
    (key,) = line(1)
    put(store, key)
    assert put(store, key) is Outcome.HELD
    assert put(store, key, b"other") is Outcome.CONFLICT
    assert put(store, key._replace(token_ids=(2,))) is Outcome.CONFLICT
    assert (store.counters.stored, store.counters.conflicts, store.counters.refused) == (1, 2, 2)
    assert store.get(key).data == data_of(key)  # type: ignore[union-attr]
    assert store.reserved == 0


def test_two_writers_of_one_key() -> None:
    store = Store(100)
    (key,) = line(1)
    data = data_of(key)
    first, second = store.reserve(key, 10), store.reserve(key, 10)
    assert isinstance(first, Reservation)
    assert isinstance(second, Reservation)
    assert store.reserved == 20
    assert store.commit(second, data, hashlib.sha256(data).digest()) is Outcome.STORED
    assert store.commit(first, data, hashlib.sha256(data).digest()) is Outcome.HELD
    assert (store.bytes, store.reserved, len(store)) == (10, 0, 1)


def test_tokens_and_parent_are_compared_on_every_hit() -> None:
    store = Store(100)
    first, second = line(1, 2)
    put(store, first)
    put(store, second)
    for other in (second._replace(token_ids=(3,)), second._replace(parent=bytes(32))):
        assert store.get(other) is None
        assert store.look_up([first, other]) == 1


def test_look_up_gives_the_contiguous_prefix() -> None:
    store = Store(100)
    keys = line(1, 2, 3, 4)
    for key in keys[:3]:
        put(store, key)
    assert store.look_up(keys) == 3
    assert store.look_up(keys[1:]) == 2
    assert store.look_up([keys[3], keys[0]]) == 0
    assert store.look_up([]) == 0
    assert (store.counters.hits, store.counters.misses) == (5, 1 + 1 + 2)


def test_a_block_without_the_one_before_is_refused() -> None:
    store = Store(100)
    first, second = line(1, 2)
    assert put(store, second) is Outcome.ORPHAN
    put(store, first)
    assert put(store, second) is Outcome.STORED


def test_leaves_go_before_parents() -> None:
    store = Store(30)
    keys = line(1, 2, 3)
    for key in keys:
        put(store, key)
    (other,) = line(9)
    put(store, other)
    assert held(store, [*keys, other]) == [True, True, False, True]


def test_the_least_recently_used_branch_goes_first() -> None:
    store = Store(40)
    a, b = line(1, 2), line(8, 9)
    for key in (*a, *b):
        put(store, key)
    store.get(a[0])  # uses the first of a, not its end
    put(store, line(5)[0])
    assert held(store, [*a, *b]) == [True, False, True, True]
    store.look_up(b)
    put(store, line(6)[0])
    assert held(store, [*a, *b]) == [False, False, True, True]


def test_a_block_never_evicts_its_own_prefix() -> None:
    store = Store(30)
    keys = line(1, 2, 3, 4)
    assert [put(store, key) for key in keys] == [Outcome.STORED] * 3 + [Outcome.NO_ROOM]
    assert held(store, keys) == [True, True, True, False]


def test_larger_than_the_budget_is_refused_and_evicts_nothing() -> None:
    store = Store(30)
    (key,), (large,) = line(1), line(2)
    put(store, key)
    assert put(store, large, bytes(31)) is Outcome.NO_ROOM
    assert held(store, [key]) == [True]
    assert put(store, large, bytes(30)) is Outcome.STORED


def test_blocks_on_their_way_count() -> None:
    store = Store(30)
    places = [store.reserve(line(token)[0], 10) for token in range(3)]
    assert store.reserve(line(7)[0], 1) is Outcome.NO_ROOM
    assert isinstance(places[0], Reservation)
    assert store.abort(places[0]) is Outcome.BROKEN
    assert isinstance(store.reserve(line(7)[0], 1), Reservation)
    assert (len(store), store.bytes) == (0, 0)


def test_the_prefix_may_go_while_a_block_is_on_its_way() -> None:
    store = Store(20)
    first, second = line(1, 2)
    put(store, first)
    place = store.reserve(second, 5)
    put(store, line(9)[0], bytes(15))
    assert isinstance(place, Reservation)
    assert store.commit(place, bytes(5), b"sum") is Outcome.ORPHAN
    assert (store.bytes, store.reserved) == (15, 0)


def test_a_held_block_may_go_while_it_is_put_again() -> None:
    store = Store(20)
    (key,) = line(1)
    put(store, key)
    place = store.reserve(key, 10)
    put(store, line(9)[0], bytes(20))
    assert isinstance(place, Reservation)
    assert store.commit(place, b"", hashlib.sha256(data_of(key)).digest()) is Outcome.NO_ROOM


def test_who_holds_a_block_may_read_it_while_it_is_evicted() -> None:
    store = Store(10)
    (key,) = line(1)
    put(store, key)
    block = store.get(key)
    put(store, line(2)[0])
    assert held(store, [key]) == [False]
    assert block is not None
    assert block.data == data_of(key)


@dataclass
class Naive:
    """The rules said once more, without any thought of speed."""

    budget: int
    sizes: dict[Key, int] = field(default_factory=dict)
    used: dict[Key, int] = field(default_factory=dict)
    clock: int = 0

    def upwards(self, key: Key) -> list[Key]:
        return [key, *(up for other in self.sizes if other.digest == key.parent for up in self.upwards(other))]

    def use(self, key: Key) -> None:
        self.clock += 1
        for block in self.upwards(key):
            self.used[block] = self.clock

    def leaves(self) -> list[Key]:
        parents = {key.parent for key in self.sizes}
        return [key for key in self.sizes if key.digest not in parents]

    def make_room(self, key: Key, size: int, reserved: int) -> Outcome | None:
        prefix = self.upwards(key)[1:]
        if key.parent and not prefix:
            return Outcome.ORPHAN
        if sum(self.sizes[block] for block in prefix) + reserved + size > self.budget:
            return Outcome.NO_ROOM
        if prefix:
            self.use(prefix[0])
        while sum(self.sizes.values()) + reserved + size > self.budget:
            victim = min(self.leaves(), key=lambda leaf: self.used[leaf])
            del self.sizes[victim]
        return None


# A small tree, so that prefixes are shared: every chain of up to 4 tokens out of {0, 1}.
SIZES = st.sampled_from([1, 7, 13, 20, 33, 61])
PATHS = st.lists(st.integers(0, 1), min_size=1, max_size=4)


class StoreMachine(RuleBasedStateMachine):
    """Random puts, gets and look-ups; sizes near the budget; a put may be in two halves with anything in between."""

    def __init__(self) -> None:
        super().__init__()
        self.store, self.naive = Store(60), Naive(60)
        self.open: list[tuple[Reservation, Key, int]] = []

    @rule(path=PATHS, size=SIZES)
    def put(self, path: list[int], size: int) -> None:
        for key in line(*path):
            opened = len(self.open)
            self.begin_one(key, size)
            if len(self.open) > opened:
                self.finish_one(*self.open.pop(), right=True)

    @rule(path=PATHS, size=SIZES)
    def begin(self, path: list[int], size: int) -> None:
        self.begin_one(line(*path)[-1], size)

    def begin_one(self, key: Key, size: int) -> None:
        held = key in self.naive.sizes
        expected = None if held else self.naive.make_room(key, size, self.store.reserved)
        place = self.store.reserve(key, size)
        if isinstance(place, Outcome):
            assert place is expected
        else:
            assert expected is None
            assert place.held == held
            self.open.append((place, key, size))

    @precondition(lambda self: self.open)
    @rule(pick=st.randoms(use_true_random=False), right=st.booleans())
    def finish(self, pick: Any, right: bool) -> None:
        self.finish_one(*self.open.pop(pick.randrange(len(self.open))), right=right)

    def finish_one(self, place: Reservation, key: Key, size: int, *, right: bool) -> None:
        data = data_of(key, size) if right else bytes(size)
        outcome = self.store.commit(place, data, hashlib.sha256(data).digest())
        if key in self.naive.sizes:
            same = outcome is Outcome.HELD
            assert same or outcome is Outcome.CONFLICT
            if same:
                self.naive.use(key)
        elif place.held:
            assert outcome is Outcome.NO_ROOM
        elif key.parent and len(self.naive.upwards(key)) == 1:
            assert outcome is Outcome.ORPHAN
        else:
            assert outcome is Outcome.STORED
            self.naive.sizes[key] = size
            self.naive.use(key)

    @precondition(lambda self: self.open)
    @rule()
    def abort(self) -> None:
        place, _, _ = self.open.pop()
        assert self.store.abort(place) is Outcome.BROKEN

    @rule(path=PATHS)
    def get(self, path: list[int]) -> None:
        key = line(*path)[-1]
        block = self.store.get(key)
        assert (block is not None) == (key in self.naive.sizes)
        if block:
            assert len(block.data) == self.naive.sizes[key]
            assert block.checksum == hashlib.sha256(block.data).digest()
            self.naive.use(key)

    @rule(path=PATHS)
    def look_up(self, path: list[int]) -> None:
        keys = line(*path)
        count = next((index for index, key in enumerate(keys) if key not in self.naive.sizes), len(keys))
        assert self.store.look_up(keys) == count
        if count:
            self.naive.use(keys[count - 1])

    @invariant()
    def agrees(self) -> None:
        assert {block.key for block in self.store._blocks.values()} == set(self.naive.sizes)
        assert self.store.bytes == sum(self.naive.sizes.values())
        assert self.store.reserved == sum(place.size for place, _, _ in self.open)
        assert self.store.bytes + self.store.reserved <= self.store.budget_bytes


TestStoreMachine = StoreMachine.TestCase
TestStoreMachine.settings = settings(max_examples=80, stateful_step_count=40, deadline=None)
