"""Logs of sessions on disk and in memory."""

from __future__ import annotations

import contextlib
import tracemalloc
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from kv_calls import running

from forefetch.errors import NotFound, Overloaded
from forefetch.v1 import kv_pb2 as pb
from kv_service.client import SessionRecord
from kv_service.session_log import SessionLogs

if TYPE_CHECKING:
    pass

from disk_calls import ROOT, config, flip


def test_sessions_outlive_the_service(tmp_path: Path) -> None:
    with running(config(tmp_path)) as kv:
        kv.client.get_session("s", claim=True)
        kv.client.append_session("s", 1, SessionRecord(0, (1, 2, 3), state=b"seed", first_block=0, block_digests=(ROOT,)))
        kv.client.append_session("s", 1, SessionRecord(3, (4,), tail=b"kv", tail_position=3))
        kv.client.get_session("s", claim=True)
        before = kv.client.get_session("s")
    with running(config(tmp_path)) as kv:
        assert kv.client.get_session("s") == before
        assert before is not None
        assert (before.epoch, before.token_ids, before.state, before.tail) == (2, (1, 2, 3, 4), b"seed", b"kv")
        (ack,) = kv.client.append_sessions([("s", 1, SessionRecord(4, (5,)))])
        assert ack.verdict.name == "STALE_EPOCH"
        assert kv.client.stats().stale_epochs == 1


def test_a_long_log_is_replaced_by_what_it_adds_up_to(tmp_path: Path) -> None:
    with running(config(tmp_path)) as kv:
        for at in range(600):
            kv.client.append_session("s", 1, SessionRecord(at, (at,), tail=bytes(300), tail_position=at))
        stats = kv.client.stats()
        assert stats.session_bytes < 4 * (600 * 4 + 400) + (64 << 10) + 1000  # 600 rows would be 340,000
    with running(config(tmp_path)) as kv:
        state = kv.client.get_session("s")
        assert state is not None
        assert (state.token_ids, len(state.tail), state.tail_position) == (tuple(range(600)), 300, 599)
        assert kv.client.stats().session_bytes == stats.session_bytes


def test_a_damaged_session_is_dropped_whole(tmp_path: Path) -> None:
    with running(config(tmp_path)) as kv:
        for name in ("good", "bad"):
            kv.client.append_session(name, 1, SessionRecord(0, (1,), state=f"state of {name}".encode()))
            kv.client.append_session(name, 1, SessionRecord(1, (2,)))
    flip(tmp_path / "sessions", b"state of bad")
    with running(config(tmp_path)) as kv:
        assert kv.client.get_session("bad") is None
        good = kv.client.get_session("good")
        assert good is not None
        assert good.token_ids == (1, 2)
        assert kv.client.stats().damaged_at_start == 1


def test_sessions_that_are_idle_or_in_the_way_are_dropped() -> None:
    now = [0.0]
    logs = SessionLogs(4800, 100.0, clock=lambda: now[0])

    def append(name: str, size: int) -> str:
        record = pb.SessionRecord(session_id=name, epoch=1, state=bytes(size))
        return logs.append(bytes(16), [record])[0][0].name

    assert [append(name, 900) for name in "abc"] == ["APPENDED"] * 3
    assert append("d", 900) == "APPENDED"
    assert (len(logs), logs.counters.sessions_dropped) == (3, 1)
    assert append("e", 1201) == "NO_ROOM"
    now[0] = 200.0
    assert append("f", 1) == "APPENDED"
    assert len(logs) == 1


def record(name: str, position: int = 0, **fields: Any) -> pb.SessionRecord:
    return pb.SessionRecord(session_id=name, epoch=1, position=position, **fields)


def test_many_records_in_one_call_do_not_exceed_the_budget() -> None:
    logs = SessionLogs(1 << 20, 100.0)
    done = logs.append(bytes(16), [record(str(at), state=bytes(200_000)) for at in range(20)])
    assert [verdict.name for verdict, _ in done] == ["APPENDED"] * 5 + ["NO_ROOM"] * 15
    assert logs.bytes <= 1 << 20


def test_a_claim_without_room_leaves_the_session_as_it_was() -> None:
    logs = SessionLogs(4_000, 100.0)
    assert logs.append(bytes(16), [record("s", state=bytes(900))])[0][0].name == "APPENDED"
    for _ in range(3):
        logs.append(bytes(16), [record("s", state=bytes(900))])
    for _ in range(4):
        with contextlib.suppress(Overloaded):
            logs.get(bytes(16), "s", claim=True)
    with pytest.raises(Overloaded):
        logs.get(bytes(16), "s", claim=True)
    assert logs.get(bytes(16), "s", claim=False).state == bytes(900)


def test_a_session_begun_anew_has_an_epoch_that_nobody_holds() -> None:
    logs = SessionLogs(4800, 100.0)
    lost = logs.get(bytes(16), "s", claim=True).epoch
    logs.append(bytes(16), [record("s", token_ids=[1] * 100)])
    assert {logs.append(bytes(16), [record(name, state=bytes(900))])[0][0].name for name in "abc"} == {"APPENDED"}
    with pytest.raises(NotFound):
        logs.get(bytes(16), "s", claim=False)  # dropped: there was no room
    anew = logs.get(bytes(16), "s", claim=True).epoch
    mine = pb.SessionRecord(session_id="s", epoch=anew, token_ids=[2] * 100)
    assert logs.append(bytes(16), [mine])[0][0].name == "APPENDED"
    stale = pb.SessionRecord(session_id="s", epoch=lost, position=100, token_ids=[1])
    assert logs.append(bytes(16), [stale])[0][0].name == "STALE_EPOCH"
    assert SessionLogs(4800, 100.0, epoch=1 << 50).get(bytes(16), "s", claim=True).epoch > anew


def test_sessions_in_memory_take_what_they_are_counted_for() -> None:
    """A new session's objects, digests and small token ids take more than their rows."""

    def taken(*records: pb.SessionRecord) -> float:
        logs = SessionLogs(64 << 20, 100.0)
        tracemalloc.start()
        try:
            for one in records:
                logs.append(bytes(16), [one])
            return tracemalloc.get_traced_memory()[0] / logs.bytes
        finally:
            tracemalloc.stop()

    names = [str(at) for at in range(1000)]
    assert taken(*(record(name) for name in names)) < 1.2
    assert taken(*(record(name, token_ids=[1] * 500) for name in names)) < 1.2
    digests = [bytes([at]) * 32 for at in range(100)]
    assert taken(*(record(name, first_block=0, block_digests=digests) for name in names)) < 1.2
