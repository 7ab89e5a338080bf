"""Short ways to use a Store."""

from __future__ import annotations

from kv_service.keys import Key, chain
from kv_service.store import Outcome, Reservation, Store
from kv_service.store_order import Entry

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
