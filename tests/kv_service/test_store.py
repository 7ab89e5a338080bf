"""The index's rules, one by one."""

from __future__ import annotations

from store_calls import KIB, ME, YOU, entry_of, flush, line, put, reserve, sum_of

from kv_service.store import Outcome, Store
from kv_service.store_room import Limits

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
    assert store.look_up(ME, [key.digest])[0] == 0
    assert store.lease(ME, key) is None
    store.commit(place, sum_of(key))
    assert store.look_up(ME, [key.digest])[0] == 1


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
    assert store.look_up(ME, digests)[0] == 2
    assert store.look_up(ME, digests[2:])[0] == 0
    assert store.look_up(ME, [])[0] == 0
    assert (store.counters.hits, store.counters.misses) == (2, 2 + 2)
    put(store, keys[2])
    assert store.look_up(ME, digests)[0] == 4


def test_look_up_says_what_is_on_disk_alone() -> None:
    store = Store(Limits(30, disk=10 * KIB))
    keys = line(1, 2, 3, 4)
    for key in keys[:3]:
        put(store, key)
    flush(store)
    put(store, keys[3])
    assert store.look_up(ME, [key.digest for key in keys]) == (4, 2)


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
    assert store.look_up(YOU, [key.digest])[0] == 0
    assert store.lease(YOU, key) is None
    assert put(store, key, tag=YOU, checksum=bytes(16)) is Outcome.STORED  # not even a conflict says what others hold
    assert store.blocks == 2


def test_a_quarantined_block_is_a_hole() -> None:
    store = Store(Limits(100))
    keys = line(1, 2, 3)
    for key in keys:
        put(store, key)
    store.quarantine(entry_of(store, keys[1]))
    assert store.look_up(ME, [key.digest for key in keys])[0] == 1
    assert put(store, keys[1]) is Outcome.STORED
    assert store.look_up(ME, [key.digest for key in keys])[0] == 3


def test_the_last_held_block_is_found_whatever_is_missing_before_it() -> None:
    store = Store(Limits(100))
    keys = line(1, 2, 3, 4)
    digests = [key.digest for key in keys]
    assert store.find_last(ME, digests) == 0
    put(store, keys[0])
    put(store, keys[2])
    assert store.find_last(ME, digests) == 3
    assert store.find_last(ME, digests[:2]) == 1
    assert store.find_last(YOU, digests) == store.find_last(ME, []) == 0
    assert (store.counters.hits, store.counters.misses) == (2, 3)
