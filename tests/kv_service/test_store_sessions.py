"""Sessions against a naive model, and their logs against sessions that were never restarted."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from forefetch.errors import NotFound
from forefetch.v1 import kv_pb2 as pb
from kv_service import session_log
from kv_service.session_log import SessionLogs
from kv_service.store_sessions import Session, SessionRecord, Verdict

TOKENS = st.lists(st.integers(0, 3), max_size=4)
RECORDS = st.tuples(
    st.integers(1, 4),  # epoch
    st.integers(0, 6),  # position
    TOKENS,
    st.one_of(st.none(), st.tuples(st.integers(0, 2), st.lists(st.sampled_from([b"a" * 32, b"b" * 32]), max_size=2))),
    st.one_of(st.none(), st.binary(max_size=2)),
)


def record_of(position: int, tokens: list[int], blocks: tuple[int, list[bytes]] | None, state: bytes | None) -> SessionRecord:
    first, digests = blocks or (None, [])
    return SessionRecord(position, tuple(tokens), first, tuple(digests), state)


@given(st.lists(RECORDS, max_size=12))
def test_a_session_does_what_its_rules_say(records: list[Any]) -> None:
    session, tokens, digests = Session(), list[int](), list[bytes]()
    epoch = written = 0
    for mine, position, new, blocks, state in records:
        record = record_of(position, new, blocks, state)
        before = (list(session.token_ids), list(session.block_digests), session.state, session.epoch)
        verdict = session.verdict(mine, record)
        first, more = blocks or (0, [])
        if mine < epoch:
            expected = Verdict.STALE_EPOCH
        elif position > len(tokens) or first > len(digests):
            expected = Verdict.GAP
        elif (mine == written and not _agree(tokens, position, new)) or (mine == written and not _agree(digests, first, more)):
            expected = Verdict.CONFLICT
        else:
            expected = Verdict.APPENDED
        assert verdict is expected
        if verdict is not Verdict.APPENDED:
            assert before == (list(session.token_ids), list(session.block_digests), session.state, session.epoch)
            continue
        session.apply(mine, record)
        fresh, epoch, written = mine > written, mine, mine
        tokens = _written(tokens, position, new, fresh)
        digests = _written(digests, first, more, fresh) if blocks else digests
        assert (list(session.token_ids), session.block_digests, session.epoch) == (tokens, digests, epoch)


def _agree(held: list[Any], at: int, new: list[Any]) -> bool:
    return all(old == fresh for old, fresh in zip(held[at:], new, strict=False))


def _written(held: list[Any], at: int, new: list[Any], fresh: bool) -> list[Any]:
    return held[:at] + new if fresh or at + len(new) > len(held) else held


@given(st.lists(TOKENS, min_size=1, max_size=6), st.randoms(use_true_random=False))
def test_what_is_sent_twice_counts_once(parts: list[list[int]], draw: Any) -> None:
    """A router that did not hear an answer sends again from some earlier record on."""
    records, at = [], 0
    for number, part in enumerate(parts):
        records.append(SessionRecord(at, tuple(part), state=b"%d" % number))
        at += len(part)
    once, often, sent = Session(), Session(), 0
    for record in records:
        once.apply(1, record)
    while sent < len(records):
        sent = draw.randrange(sent + 1)
        for record in records[sent : sent + draw.randint(1, 3)]:
            assert often.verdict(1, record) is Verdict.APPENDED
            often.apply(1, record)
            sent += 1
    assert often.token_ids == once.token_ids
    assert often.state == once.state


OPS = st.lists(
    st.one_of(
        st.tuples(st.just("append"), st.sampled_from(["a", "b"]), RECORDS),
        st.tuples(st.just("claim"), st.sampled_from(["a", "b"])),
        st.tuples(st.just("restart")),
    ),
    max_size=25,
)


@contextmanager
def often_compacted() -> Iterator[Path]:
    """A folder for logs that are replaced by snapshots now and then."""
    compact, session_log.COMPACT_BYTES = session_log.COMPACT_BYTES, 100
    try:
        with tempfile.TemporaryDirectory() as folder:
            yield Path(folder)
    finally:
        session_log.COMPACT_BYTES = compact


@given(OPS)
@settings(max_examples=40)
def test_restarts_change_nothing(ops: list[Any]) -> None:
    with often_compacted() as folder:
        plain, logged = SessionLogs(1 << 20, 1e9), SessionLogs(1 << 20, 1e9, folder)
        for op in ops:
            if op[0] == "restart":
                logged.close()
                size, logged = logged.bytes, SessionLogs(1 << 20, 1e9, folder)
                assert (logged.damaged, logged.bytes) == (0, size)
            elif op[0] == "claim":
                assert plain.get(bytes(16), op[1], claim=True) == logged.get(bytes(16), op[1], claim=True)
            else:
                epoch, *rest = op[2]
                record = _wire(op[1], epoch, record_of(*rest))
                verdicts = [[verdict for verdict, _ in logs.append(bytes(16), [record])] for logs in (plain, logged)]
                assert verdicts[0] == verdicts[1]
        for name in ("a", "b"):
            assert _get(plain, name) == _get(logged, name)
        logged.close()


def _wire(name: str, epoch: int, record: SessionRecord) -> pb.SessionRecord:
    return pb.SessionRecord(
        session_id=name,
        epoch=epoch,
        position=record.position,
        token_ids=record.token_ids,
        first_block=record.first_block,
        block_digests=record.block_digests,
        state=record.state,
    )


def _get(logs: SessionLogs, name: str) -> Session | None:
    try:
        return logs.get(bytes(16), name, claim=False)
    except NotFound:
        return None
