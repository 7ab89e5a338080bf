"""Faults of disks, writers and peers, one by one: each ends as a miss with its counter, never as wrong bytes."""

from __future__ import annotations

import resource
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import lmdb
import pytest
from kv_calls import running

from forefetch.process import Process
from forefetch.settings import child_environment
from kv_service.client import KvClient, SessionRecord
from kv_service.disk import Disk, DiskError
from kv_service.keys import Key, chain
from kv_service.parts import checksum_of
from kv_service.session_log import SessionLogs
from kv_service.store import Outcome, Reservation
from kv_service.store_room import DISK_PAGE, Limits
from kv_service.vault import Vault

if TYPE_CHECKING:
    from kv_calls import Kv
from disk_calls import MIB, ROOT, config, fill, flip, overwrite
from waiting import until

# Damage on disk


@pytest.mark.parametrize("damage", ["flipped bit", "torn write"])
def test_a_damaged_block_is_a_miss_and_can_be_put_again(damage: str, tmp_path: Path) -> None:
    held = fill(tmp_path)
    if damage == "flipped bit":
        flip(tmp_path / "blocks", held[1][1], at=4321)
    else:  # of its pages the first is there, and what was on the disk before lies in the others
        overwrite(tmp_path / "blocks", held[1][1], held[1][1][:DISK_PAGE])
    with running(config(tmp_path)) as kv:
        keys, blocks = [key for key, _ in held], [block for _, block in held]
        assert kv.client.look_up(keys) == 3  # nobody knows yet
        assert kv.client.get(keys) == blocks[:1]
        assert kv.client.stats().corrupt == 1
        assert kv.client.look_up(keys) == 1
        assert kv.client.get(keys[2:]) == blocks[2:]
        assert kv.client.put(held[1:2]) == (1, 0)
        assert kv.client.get(keys) == blocks


def test_a_block_that_is_shorter_than_it_should_be(tmp_path: Path) -> None:
    held = fill(tmp_path)
    with lmdb.open(str(tmp_path / "blocks"), max_dbs=8) as env:
        where = env.open_db(b"bytes")
        with env.begin(write=True, db=where) as txn:
            name = next(name for name, data in txn.cursor() if data == held[2][1])
            txn.put(name, held[2][1][:-1])
            txn.delete(next(name for name, data in txn.cursor() if data == held[0][1]))
    with running(config(tmp_path)) as kv:
        keys = [key for key, _ in held]
        assert kv.client.get(keys[1:]) == [held[1][1]]
        assert kv.client.get(keys) == []
        assert kv.client.stats().short_reads == 2


@pytest.mark.parametrize("part", ["row", "tokens"])
def test_a_damaged_row_is_left_out(tmp_path: Path, part: str) -> None:
    held = fill(tmp_path)
    checksum = checksum_of([held[1][1]])
    flip(tmp_path / "blocks", checksum, at=0 if part == "row" else len(checksum) + 8)
    with running(config(tmp_path)) as kv:
        keys = [key for key, _ in held]
        assert kv.client.stats().damaged_at_start == 1
        assert kv.client.look_up(keys) == 1
        assert kv.client.get(keys[2:]) == [held[2][1]]


@pytest.mark.parametrize("damage", ["cut short", "no database"])
def test_a_damaged_file_is_set_aside(tmp_path: Path, damage: str) -> None:
    """LMDB maps its file: reading what was cut off would end the process."""
    held = fill(tmp_path, size=MIB)
    file = tmp_path / "blocks" / "data.mdb"
    if damage == "cut short":
        file.write_bytes(file.read_bytes()[:-MIB])
    else:
        file.write_bytes(b"x" * 20_000)
    with running(config(tmp_path)) as kv:
        keys = [key for key, _ in held]
        assert kv.client.stats().damaged_at_start == 1
        assert kv.client.look_up(keys) == 0
        assert kv.client.put(held) == (3, 0)
    assert (tmp_path / "blocks.damaged" / "data.mdb").exists()
    with running(config(tmp_path)) as kv:
        assert kv.client.get(keys) == [block for _, block in held]


@pytest.mark.parametrize("which", [Disk, SessionLogs])
def test_an_error_of_lmdb_while_a_file_is_read_sets_it_aside(
    which: type, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    held = fill(tmp_path)
    load, errors = which._load, [lmdb.CorruptedError("a page of another kind")]

    def failing(self: object, env: lmdb.Environment) -> None:
        load(self, env)
        for error in errors:
            errors.clear()
            raise error

    monkeypatch.setattr(which, "_load", failing)
    with running(config(tmp_path)) as kv:
        assert kv.client.stats().damaged_at_start == 1
        assert kv.client.look_up([key for key, _ in held]) == (0 if which is Disk else 3)
        assert kv.client.append_session("s", 1, SessionRecord(0, (1,))).tokens == 1


def test_a_file_that_ends_the_process_is_set_aside_by_the_next(process: Process, kv: Kv, tmp_path: Path) -> None:
    """LMDB's assertions and reads beyond the file raise nothing: the mark of a fatal signal has the next start look first."""
    client, keys = KvClient(process.address), kv.keys(1, 2, 3)
    assert client.put([(key, kv.block(key, 5000)) for key in keys]) == (3, 0)
    client.append_session("s", 1, SessionRecord(0, (1, 2)))
    until(lambda: client.stats().disk_blocks == 3)
    client.close()
    process.signal(signal.SIGABRT)
    assert process.wait(60)
    assert (tmp_path / "crash.log").stat().st_size
    pages = (tmp_path / "blocks" / "data.mdb").read_bytes()
    (tmp_path / "blocks" / "data.mdb").write_bytes(pages[:8192].ljust(len(pages), b"\0"))
    with running(config(tmp_path)) as again:
        assert again.client.stats().damaged_at_start == 1
        assert again.client.look_up(keys) == 0
        state = again.client.get_session("s")
        assert state is not None
        assert state.token_ids == (1, 2)
    assert not (tmp_path / "crash.log").stat().st_size


def test_a_disk_that_cannot_be_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    held = fill(tmp_path)
    with running(config(tmp_path)) as kv:

        def fail(self: Disk, name: bytes, size: int) -> list[bytes]:
            raise DiskError("Input/output error")

        monkeypatch.setattr(Disk, "read", fail)
        assert kv.client.get([key for key, _ in held]) == []
        assert kv.client.stats().read_errors == 1


# A disk that does not take what it should


class Small:
    """A vault whose LMDB is full long before its budget is."""

    def __init__(self, folder: Path, map_bytes: int) -> None:
        self.vault = Vault(Limits(memory=64 * MIB, disk=64 * MIB), Disk(folder, 64 * MIB, map_bytes))
        self.tag = self.vault.labels.tag("me")

    def put(self, key: Key, size: int = MIB) -> Outcome:
        data = [key.digest * (size // 32)]
        place = self.vault.reserve(self.tag, key, size, 60.0)
        assert isinstance(place, Reservation)
        return self.vault.commit(place, data, checksum_of(data))

    def read(self, keys: list[Key]) -> list[bytes]:
        return [b"".join(block.pieces) for block in self.vault.read(self.tag, keys)]


def test_a_full_disk_costs_what_a_restart_finds_and_nothing_else(tmp_path: Path) -> None:
    keys = chain(ROOT, [[token] for token in range(16)])
    small = Small(tmp_path, 6 * MIB)
    for key in keys:
        assert small.put(key) is Outcome.STORED
        until(lambda: not small.vault.store.room.dirty)
    small.vault.close()
    assert small.vault.faults.disk_full > 0
    assert small.vault.stats()["disk_blocks"] <= 6
    again = Small(tmp_path, 6 * MIB)
    found = again.vault.stats()["blocks"]
    assert 0 < found == small.vault.stats()["disk_blocks"]
    held = [key for key in keys if again.vault.look_up(again.tag, [key.digest])[0]]
    assert [again.read([key]) for key in held] == [[key.digest * (MIB // 32)] for key in held]
    again.vault.close()


@pytest.fixture
def process(tmp_path: Path) -> Iterator[Process]:
    flags = [f"--dir={tmp_path}", "--budget-mb=64", "--max-block-mb=2", "--disk-gb=0.2"]
    one = Process("kv", "kv_service", flags, child_environment(PYTHONWARNINGS="error"))
    one.spawn()
    one.wait_ready(240)
    yield one
    one.end(20)


def test_no_space_left(process: Process, kv: Kv) -> None:
    """The system refuses to let the file grow: blocks are served from memory, session records are refused, nobody dies."""
    client, keys = KvClient(process.address), kv.keys(*range(12))
    assert client.append_session("s", 1, SessionRecord(0, (1, 2))).tokens == 2
    hard = resource.prlimit(process.pid, resource.RLIMIT_FSIZE)[1]
    resource.prlimit(process.pid, resource.RLIMIT_FSIZE, (200_000, hard))
    assert client.put([(key, kv.block(key, MIB)) for key in keys]) == (12, 0)
    until(lambda: client.stats().disk_full + client.stats().write_errors == 12)  # a write cut short is EIO to LMDB
    assert client.get(keys) == [kv.block(key, MIB) for key in keys]
    record = SessionRecord(2, (), tail=bytes(MIB))
    (ack,) = client.append_sessions([("s", 1, record)])
    assert ack.verdict.name == "NO_ROOM"
    assert client.stats().sessions_refused == 1
    resource.prlimit(process.pid, resource.RLIMIT_FSIZE, (hard, hard))
    assert client.append_session("s", 1, record).tokens == 2
    more = kv.keys(100, 101)
    assert client.put([(key, kv.block(key, MIB)) for key in more]) == (2, 0)
    until(lambda: client.stats().disk_blocks == 2)
    process.signal(signal.SIGKILL)
    process.end(20)
    process.spawn()
    process.wait_ready(240)
    assert client.look_up(keys) == 0
    assert client.get(more) == [kv.block(key, MIB) for key in more]
    state = client.get_session("s")
    assert state is not None
    assert (state.token_ids, state.tail) == ((1, 2), bytes(MIB))
    client.close()


# Writers and peers


def test_a_writer_that_was_overtaken(tmp_path: Path) -> None:
    vault = Vault(Limits(MIB))
    tag, (key,) = vault.labels.tag("me"), chain(ROOT, [[1]])
    slow = vault.reserve(tag, key, 4, limit_s=0.0)
    time.sleep(0.01)
    quick = vault.reserve(tag, key, 4, limit_s=60.0)
    assert isinstance(slow, Reservation)
    assert isinstance(quick, Reservation)
    assert vault.commit(quick, [b"good"], checksum_of([b"good"])) is Outcome.STORED
    assert vault.commit(slow, [b"late"], checksum_of([b"late"])) is Outcome.STALE
    assert vault.stats()["stale_writers"] == 1
    assert [b"".join(block.pieces) for block in vault.read(tag, [key])] == [b"good"]


def test_a_writer_without_room_waits_for_a_reader(tmp_path: Path) -> None:
    vault = Vault(Limits(10))
    tag, (a, b) = vault.labels.tag("me"), chain(ROOT, [[1], [2]])
    place = vault.reserve(tag, a, 10, 60.0)
    assert isinstance(place, Reservation)
    vault.commit(place, [bytes(10)], checksum_of([bytes(10)]))
    reading = vault.read(tag, [a])
    next(reading)
    left: list[float] = []

    def leave() -> None:
        left.append(time.monotonic())
        reading.close()  # type: ignore[attr-defined]

    threading.Timer(0.2, leave).start()
    assert isinstance(vault.reserve(tag, b._replace(parent=ROOT), 10, 60.0), Reservation)
    assert time.monotonic() >= left[0]


def test_patience_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kv_service.vault.PATIENCE_S", 0.1)
    vault = Vault(Limits(10))
    tag, (a, b) = vault.labels.tag("me"), chain(ROOT, [[1], [2]])
    vault.reserve(tag, a, 10, 60.0)
    assert vault.reserve(tag, b, 10, 60.0) is Outcome.BUSY
    assert vault.stats()["no_room"] == 1
