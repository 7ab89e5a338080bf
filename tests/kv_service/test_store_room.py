"""Who gives way, and what lies where, rule by rule."""

from __future__ import annotations

import pytest
from store_calls import KIB, ME, YOU, entry_of, flush, held, line, put, reserve, sum_of

from kv_service.keys import Key
from kv_service.store import Outcome, Store
from kv_service.store_order import ATTENTION_TOKENS, ENTRY_BYTES, Entry
from kv_service.store_room import Limits

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


def test_every_run_of_a_share_counts_as_used() -> None:
    store = Store(Limits(45))
    first, _, third = line(1, 2, 3)  # another replica has the second
    others = [line(8)[0], line(9)[0]]
    for key in (first, third, *others):
        put(store, key)
    store.look_up(ME, [first.digest, third.digest])
    put(store, line(5)[0])
    assert held(store, [first, third, *others]) == [True, True, False, True]
    put(store, line(6)[0])
    assert held(store, [first, third, *others]) == [True, True, False, False]


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


@pytest.mark.parametrize("disk", [0, 1 << 30])
def test_the_index_has_a_budget_too(disk: int) -> None:
    """Tiny blocks, or many on a large disk, must not fill the memory with their names."""
    each = ENTRY_BYTES + 4
    store = Store(Limits(1 << 20, disk=disk, index=40 * each))
    for token in range(100):
        assert put(store, line(token)[0], 1) is Outcome.STORED
        flush(store)
        assert store.room.index == each * store.blocks <= 40 * each
    assert store.room.evicted == 100 - store.blocks
    assert store.blocks >= 35


def test_more_found_at_start_than_the_index_may_hold() -> None:
    store = Store(Limits(1 << 20, disk=1 << 20, index=3 * (ENTRY_BYTES + 4)))
    for token in range(5):
        key = line(token)[0]
        store.load(Entry(ME + key.digest, ME, ME + key.parent, b"\1\0\0\0", key.position, 10, sum_of(key)))
    store.room.shorten()
    flush(store)
    assert store.blocks == 2
    assert store.room.index == 2 * (ENTRY_BYTES + 4)


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


def test_warm_blocks_are_kept_by_last_read() -> None:
    store = Store(Limits(30, disk=10 * KIB))
    keys = [line(token)[0] for token in range(3)]
    for key in keys[:2]:
        put(store, key)
    flush(store)
    read = store.lease(ME, keys[0])
    assert read
    store.release(read)
    store.look_up(ME, [keys[1].digest])  # moves no bytes
    put(store, keys[2])
    assert [entry_of(store, key).in_memory for key in keys] == [True, False, True]
    entry = store.lease(ME, keys[1])
    assert entry
    flush(store)
    assert store.room.warm(entry)
    assert entry.in_memory


@pytest.mark.parametrize("size", [1, KIB, KIB + 1])
def test_restart_counts_what_is_on_disk(size: int) -> None:
    store = Store(Limits(100, disk=8 * KIB))
    first, second = line(1, 2)
    for key in (second, first):  # in any order
        store.load(Entry(ME + key.digest, ME, ME + key.parent, b"\1\0\0\0", key.position, size, sum_of(key)))
    assert store.look_up(ME, [first.digest, second.digest])[0] == 2
    assert store.room.home == 2 * (KIB if size <= KIB else 2 * KIB)
    store.room.shrink(1)
    assert held(store, [first, second]) == [True, False]
