"""Blocks on disk, in LMDB: what they are apart from their bytes, so that a restart reads the former alone.

    rows     name (tenant's tag, digest) -> sequence, size, position, parent, checksum, origin, token ids, and
             XXH3-64 of name and row
    bytes    name -> the block
    tenants  tag -> name        origins  8 bytes -> BlockOrigin        meta  "sequence" -> the last one given

Transactions are atomic: after a kill a block is there with its row or not at all. Each syncs its data but not the meta page, so
a power cut may lose the last ones and never tears the file. LMDB maps the file: one that is shorter than it should be is set
aside at start, because reading beyond its end would end the process.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import logging
import os
import shutil
import struct
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import lmdb
import xxhash

from forefetch.errors import ConfigError, ForefetchError
from kv_service.keys import DIGEST_BYTES
from kv_service.labels import TAG_BYTES
from kv_service.parts import Pieces, cut
from kv_service.store_order import Entry

_log = logging.getLogger(__name__)
CHECKSUM_BYTES, ORIGIN_BYTES = 16, 8
_ROW = struct.Struct(f"<BQQI{DIGEST_BYTES}s{CHECKSUM_BYTES}s{ORIGIN_BYTES}s")
_VERSION = 1
_DAMAGED = (
    lmdb.InvalidError,
    lmdb.CorruptedError,
    lmdb.VersionMismatchError,
    lmdb.PageNotFoundError,
    lmdb.IncompatibleError,
    lmdb.CursorFullError,
)
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
SLACK = 64 << 20
"""What LMDB may take beyond the blocks' budget and a quarter of it: rows, its trees, and pages between two transactions."""


Labelled = tuple[Iterable[tuple[bytes, str]], Iterable[tuple[bytes, bytes]]]
"""Names of tenants by tag, and descriptions by id."""


class DiskError(ForefetchError):
    """The disk did not do what it should. `full`: for want of room."""

    def __init__(self, message: str, full: bool = False) -> None:
        super().__init__(message)
        self.full = full


@dataclass(slots=True)
class Found:
    """What a scan has found: blocks in the order they were written, and how many rows were damaged."""

    entries: list[Entry]
    damaged: int


def take_lock(folder: Path) -> Any:
    """An open file that keeps other KV services out of `folder` until it is closed or the process ends."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        file = (folder / "lock").open("w")
    except OSError as error:
        raise ConfigError(f"--dir: {error.strerror}") from None
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        file.close()
        raise ConfigError("--dir: another KV service uses it") from None
    return file


def open_env(
    folder: Path, map_bytes: int, load: Callable[[lmdb.Environment], None], **how: Any
) -> tuple[lmdb.Environment, bool]:
    """LMDB in `folder`, read by `load`, and whether what was there before was damaged and is set aside as `folder`.damaged.
    `load` is called once more then."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with contextlib.suppress(*_DAMAGED):
            env = lmdb.open(str(folder), map_size=map_bytes, max_dbs=8, readahead=False, **how)
            if _loads(env, folder, load):
                return env, False
        set_aside(folder)
        env = lmdb.open(str(folder), map_size=map_bytes, max_dbs=8, readahead=False, **how)
        load(env)
        return env, True
    except (OSError, lmdb.Error) as error:
        raise ConfigError(f"--dir: cannot be used: {error}") from None


def set_aside(folder: Path) -> None:
    """Renames a damaged file's folder to `folder`.damaged, in the place of an earlier one."""
    aside = folder.with_name(folder.name + ".damaged")
    shutil.rmtree(aside, ignore_errors=True)
    folder.rename(aside)
    _log.error("%s is damaged; it is set aside and an empty one takes its place", folder.name)


def _loads(env: lmdb.Environment, folder: Path, load: Callable[[lmdb.Environment], None]) -> bool:
    try:
        if _whole(env, folder):
            load(env)
            return True
    except _DAMAGED:
        env.close()
        raise
    env.close()
    return False


def _whole(env: lmdb.Environment, folder: Path) -> bool:
    pages = env.info()["last_pgno"] + 1
    size = (folder / "data.mdb").stat().st_size
    return size >= pages * env.stat()["psize"] or pages <= 2


class Disk:
    """The blocks' file. `write` is for one thread; the others for any. Raises DiskError."""

    def __init__(self, folder: Path, budget_bytes: int, map_bytes: int = 0) -> None:
        room = map_bytes or budget_bytes + budget_bytes // 4 + SLACK
        self._env, self.set_aside = open_env(folder / "blocks", room, self._load, metasync=False)

    def _load(self, env: lmdb.Environment) -> None:
        """Opens the trees and reads all but the blocks' bytes: `found`, `tenants` by tag, and `origins` by id."""
        self._rows, self._bytes, self._tenants, self._origins, self._meta = (
            env.open_db(name) for name in (b"rows", b"bytes", b"tenants", b"origins", b"meta")
        )
        with env.begin() as txn:
            read = [_read_row(name, row) for name, row in txn.cursor(self._rows)]
            self.tenants = {tag: name.decode(errors="replace") for tag, name in txn.cursor(self._tenants)}
            self.origins = dict(txn.cursor(self._origins))
        found = sorted((row for row in read if row is not None), key=lambda row: row[0])
        self._sequence = found[-1][0] + 1 if found else 0
        self.found = Found([entry for _, entry in found], len(read) - len(found))

    def close(self) -> None:
        """Frees the file."""
        self._env.close()

    def read(self, name: bytes, size: int) -> Pieces:
        """A block's bytes as they are there, not verified; none if it is not there in its size. One that claims another is not
        touched: a damaged length leads beyond the file."""
        with _errors(), self._env.begin(db=self._bytes, buffers=True) as txn:
            value = txn.get(name)
            return () if value is None or len(value) != size else cut(bytes(value))

    def write(
        self,
        delete: Iterable[bytes] = (),
        put: Sequence[tuple[Entry, Pieces]] = (),
        tenants: Iterable[tuple[bytes, str]] = (),
        origins: Iterable[tuple[bytes, bytes]] = (),
    ) -> None:
        """One transaction: first the deletions, then the blocks. All or nothing."""
        with _errors(), self._env.begin(write=True) as txn:
            for name in delete:
                txn.delete(name, db=self._rows)
                txn.delete(name, db=self._bytes)
            for entry, pieces in put:
                txn.put(entry.name, self._row(entry), db=self._rows)
                txn.put(entry.name, pieces[0] if len(pieces) == 1 else b"".join(pieces), db=self._bytes)
            for tag, tenant in tenants:
                txn.put(tag, tenant.encode(), db=self._tenants)
            for origin, text in origins:
                txn.put(origin, text, db=self._origins)
            txn.put(b"sequence", self._sequence.to_bytes(8, "little"), db=self._meta)

    def bring(
        self, delete: list[bytes], put: Sequence[tuple[Entry, Pieces]], labels: Labelled, clear: Callable[[], list[bytes]]
    ) -> str:
        """`write` that makes room when the disk is full: `clear` gives names to delete, `delete` among them. Returns the
        counter of what went wrong; "": the blocks are there."""
        try:
            try:
                self.write(delete, put, *labels)
            except DiskError as error:
                if not error.full:
                    raise
                self.write(clear())
                self.write()  # LMDB gives pages out again in the transaction after the next
                self.write((), put, *labels)
        except DiskError as error:
            _log.error("%d blocks are not on disk: %s", len(put), error)
            return "disk_full" if error.full else "write_errors"
        return ""

    def _row(self, entry: Entry) -> bytes:
        self._sequence += 1
        origin = entry.origin or bytes(ORIGIN_BYTES)
        parent = entry.parent[TAG_BYTES:]
        row = _ROW.pack(_VERSION, self._sequence, entry.size, entry.position, parent, entry.checksum, origin) + entry.tokens
        return row + xxhash.xxh3_64_digest(entry.name + row)


def _read_row(name: bytes, row: bytes) -> tuple[int, Entry] | None:
    row, check = row[:-8], row[-8:]
    if len(row) < _ROW.size or row[0] != _VERSION or xxhash.xxh3_64_digest(name + row) != check:
        return None
    _, sequence, size, position, parent, checksum, origin = _ROW.unpack_from(row)
    tag = name[:TAG_BYTES]
    return sequence, Entry(name, tag, tag + parent, row[_ROW.size :], position, size, checksum, origin)


@contextlib.contextmanager
def _errors() -> Iterator[None]:
    try:
        yield
    except (lmdb.Error, OSError) as error:
        full = isinstance(error, lmdb.MapFullError) or any(os.strerror(number) in str(error) for number in _FULL)
        raise DiskError(str(error), full) from None
