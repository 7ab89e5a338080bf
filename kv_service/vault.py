"""The store with its bytes: memory, the disk behind it, and the thread that writes. Thread-safe.

One lock guards the index and is never held while bytes move. A block is visible as soon as it is whole in memory; the writing
thread brings it to disk, in one transaction for all that came meanwhile.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import Any

from kv_service.disk import Disk, DiskError, Found
from kv_service.keys import Key
from kv_service.labels import Labels
from kv_service.parts import Pieces, checksum_of
from kv_service.store import Faults, Outcome, Reservation, Store
from kv_service.store_order import Entry
from kv_service.store_room import Limits

_log = logging.getLogger(__name__)
PATIENCE_S = 5.0
"""How long a writer waits for room that others are about to give."""
WRITE_BYTES = 32 << 20
"""Most bytes of blocks in one transaction, unless a single block has more."""
LATEST_S = 1.0
"""While a Put stream is open, writing waits, because it would compete with what comes in for cores and memory; but no longer
than this, and not when memory is needed."""


@dataclass(frozen=True, slots=True)
class Held:
    """A block on its way out, `index` among the keys asked for."""

    index: int
    pieces: Pieces
    checksum: bytes


class Vault:
    """`disk` None: memory only."""

    def __init__(self, limits: Limits, disk: Disk | None = None) -> None:
        self.store, self.faults = Store(limits), Faults()
        self.limits, self.index_s = limits, 0.0
        self._disk = disk
        self._bytes: dict[bytes, Pieces] = {}
        self.labels = Labels()
        self._changed = threading.Condition()
        self._closing = False
        self._streams = 0  # open Put streams
        self._short = 0  # of these, how many wait for room
        self._writer: threading.Thread | None = None
        if disk is not None:
            self._load(disk)
            self._writer = threading.Thread(target=self._write_loop, args=(disk,), name="kv-disk", daemon=True)
            self._writer.start()

    def _load(self, disk: Disk) -> None:
        began = time.monotonic()
        found, disk.found = disk.found, Found([], 0)  # which would keep what is evicted
        for entry in found.entries:
            self.store.load(entry)
        self.labels = Labels(disk.tenants, disk.origins)
        self.faults.damaged_at_start = found.damaged + disk.set_aside
        self.store.room.shrink(max(0, self.store.room.home - self.limits.disk))
        self.store.room.shorten()
        self.index_s = time.monotonic() - began

    def close(self) -> None:
        """Writes what is not on disk yet and frees the file."""
        with self._changed:
            self._closing = True
            self._changed.notify_all()
        if self._writer is not None:
            self._writer.join()
        if self._disk is not None:
            self._disk.close()

    # ---- blocks in ----

    @contextmanager
    def receiving(self) -> Iterator[None]:
        """Around a Put stream."""
        with self._changed:
            self._streams += 1
        try:
            yield
        finally:
            with self._changed:
                self._streams -= 1
                self._changed.notify_all()

    def reserve(self, tag: bytes, key: Key, size: int, limit_s: float) -> Reservation | Outcome:
        """Room for a block that is to be whole within `limit_s`; waits for it where it is about to be given."""
        until = time.monotonic() + PATIENCE_S
        with self._changed:
            while True:
                now = time.monotonic()
                place = self.store.reserve(tag, key, size, now + limit_s, now)
                self._settle()
                if place is not Outcome.BUSY:
                    return place
                if now >= until:
                    return self.store.refuse(place)
                self._short += 1
                self._changed.notify_all()  # what waits to be written is written now
                self._changed.wait(min(until - now, 0.5))
                self._short -= 1

    def commit(self, place: Reservation, pieces: Pieces, checksum: bytes, origin: bytes = b"") -> Outcome:
        """See Store.commit. `pieces` belong to the vault from now on."""
        with self._changed:
            outcome = self.store.commit(place, checksum, origin)
            if outcome is Outcome.STORED:
                self._bytes[place.entry.name] = pieces
            self._settle()
            self._changed.notify_all()
        return outcome

    def abort(self, place: Reservation) -> Outcome:
        """See Store.abort."""
        with self._changed:
            outcome = self.store.abort(place)
            self._changed.notify_all()
        return outcome

    def refuse(self, outcome: Outcome) -> Outcome:
        """Counts a block that is not taken."""
        with self._changed:
            return self.store.refuse(outcome)

    # ---- blocks out ----

    def look_up(self, tag: bytes, digests: Sequence[bytes]) -> tuple[int, int]:
        """How many digests, from the first on, are held, and how many of these on disk alone."""
        with self._changed:
            return self.store.look_up(tag, digests)

    def find_last(self, tag: bytes, digests: Sequence[bytes]) -> int:
        """How many digests there are up to the last that is held; 0: none is."""
        with self._changed:
            return self.store.find_last(tag, digests)

    def read(self, tag: bytes, keys: Sequence[Key]) -> Iterator[Held]:
        """The blocks up to the first that is not held or not as it should be. Each is leased until the next is asked for."""
        for index, key in enumerate(keys):
            with self._changed:
                entry = self.store.lease(tag, key)
                pieces = self._bytes.get(entry.name) if entry else None
            if entry is None:
                return
            try:
                if pieces is None:
                    pieces = self._from_disk(entry)
                if pieces is None:
                    return
                yield Held(index, pieces, entry.checksum)
            finally:
                self._release(entry)

    def _release(self, entry: Entry) -> None:
        with self._changed:
            self.store.release(entry)
            self._changed.notify_all()

    def _from_disk(self, entry: Entry) -> Pieces | None:
        pieces, fault = self._load_block(entry)
        if fault:
            self._quarantine(entry, fault)
            return None
        with self._changed:
            self.faults.disk_reads += 1
            stays = self.store.room.warm(entry)
            self._settle()
            if stays:
                self._bytes[entry.name] = pieces
        return pieces

    def _quarantine(self, entry: Entry, fault: str) -> None:
        _log.error("a block is dropped: %s", fault)
        with self._changed:
            setattr(self.faults, fault, getattr(self.faults, fault) + 1)
            self.store.quarantine(entry)
            self._settle()
            self._changed.notify_all()

    def _load_block(self, entry: Entry) -> tuple[Pieces, str]:
        """The block, and the counter of what is wrong with it."""
        try:
            pieces = self._disk.read(entry.name, entry.size) if self._disk else ()
        except DiskError as error:
            _log.error("a block cannot be read: %s", error)
            return (), "read_errors"
        if sum(map(len, pieces)) < entry.size:
            return (), "short_reads"
        return pieces, "" if checksum_of(pieces) == entry.checksum else "corrupt"

    def check(self, entry: Entry) -> bool:
        """Reads a block wherever it is, and drops it if it is damaged. True: it is whole, or not held any more."""
        with self._changed:
            if not self.store.hold(entry):
                return True
            pieces, on_disk = self._bytes.get(entry.name), entry.on_disk
        try:
            fault = "" if pieces is None or checksum_of(pieces) == entry.checksum else "corrupt"
            if on_disk and not fault:
                fault = self._load_block(entry)[1]
            if fault:
                self._quarantine(entry, fault)
        finally:
            self._release(entry)
        return not fault

    def entries(self) -> list[Entry]:
        """The blocks held now."""
        with self._changed:
            return list(self.store)

    def describe(self, entry: Entry) -> tuple[str, bytes, int]:
        """(tenant, description, blocks that follow) of a block."""
        with self._changed:
            children = self.store.children(entry)
        return (*self.labels.of(entry), children)

    def stats(self) -> dict[str, Any]:
        """What happened since start, by the names of GetStats."""
        with self._changed:
            store, room = self.store, self.store.room
            return {
                "blocks": store.blocks,
                "bytes": store.bytes,
                "budget_bytes": self.limits.home,
                "evicted": room.evicted,
                "memory_blocks": len(self._bytes),
                "memory_bytes": room.memory,
                "memory_budget_bytes": self.limits.memory,
                "disk_blocks": room.on_disk,
                "index_s": self.index_s,
                **asdict(store.counters),
                **asdict(self.faults),
            }

    # ---- inside ----

    def _settle(self) -> None:
        """Carries out what the store has decided about memory."""
        room = self.store.room
        if room.dropped:
            for name in room.dropped:
                self._bytes.pop(name, None)
            room.dropped.clear()

    def _write_loop(self, disk: Disk) -> None:
        room = self.store.room
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._closing or room.dirty or room.doomed)
                self._await_pause()
                if not room.dirty and not room.doomed:
                    return
                doomed, batch = room.take_doomed(), room.take_dirty(WRITE_BYTES)
                pairs = [(entry, self._bytes[entry.name]) for entry in batch if entry.in_memory]
                lost = [entry for entry in batch if not entry.in_memory]  # dropped before their turn came
            written = self._write(disk, doomed, pairs)
            with self._changed:
                room.deleted(doomed)
                room.written([entry for entry, _ in pairs], on_disk=written)
                room.written(lost, on_disk=False)
                self._settle()
                self._changed.notify_all()

    def _await_pause(self) -> None:
        """Until what waits to be written should be; see LATEST_S. Deletions are not put off: somebody may wait for the room."""
        room = self.store.room
        self._changed.wait_for(
            lambda: not self._streams or self._closing or self._short or room.pressed or room.doomed, LATEST_S
        )

    def _write(self, disk: Disk, doomed: list[Entry], pairs: Sequence[tuple[Entry, Pieces]]) -> bool:
        """Whether the blocks are on disk now. What is to be deleted is, unless the disk fails altogether."""
        labels = self.labels.behind([entry for entry, _ in pairs])
        names = [entry.name for entry in doomed]
        fault = disk.bring(names, pairs, labels, lambda: self._clear(doomed, sum(entry.size for entry, _ in pairs)))
        if fault:
            with self._changed:
                setattr(self.faults, fault, getattr(self.faults, fault) + len(pairs))
        return not fault

    def _clear(self, doomed: list[Entry], nbytes: int) -> list[bytes]:
        """The disk is full before its budget is, because LMDB needs runs of free pages. All that goes now, by name."""
        with self._changed:
            self.store.room.shrink(2 * nbytes)
            doomed += self.store.room.take_doomed()
            self._settle()
        return [entry.name for entry in doomed]
