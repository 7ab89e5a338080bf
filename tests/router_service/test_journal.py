"""What goes to a session's log, against the log's own rules."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from forefetch.errors import Mismatch
from kv_service.client import SessionAck, SessionRecord, Verdict
from kv_service.store_sessions import Session
from router_service.admission import Admitted, SamplingParams
from router_service.journal import Cursor, Tail, Turn

TURN = Turn(
    "model",
    "float32",
    3,
    20,
    True,
    SamplingParams(0.7, 5, 0.9, 0.1, 2**64 - 1, 3),
    ("\n", "é"),
    frozenset({7, 1}),
    "r",
    "",
    "",
)


def test_a_turn_survives_its_encoding() -> None:
    assert Turn.decode(TURN.encode()) == TURN
    ended = replace(TURN, reason="STOP_STRING", stop_string="é")
    assert Turn.decode(ended.encode()) == ended
    assert TURN.encode() == Turn.decode(TURN.encode()).encode()


def test_a_turn_gives_its_request_back() -> None:
    admitted = Admitted((1, 2, 3), 20, False, SamplingParams(seed=5), ("x",), frozenset({2}), "r")
    assert Turn.of("m", "float32", admitted).admitted((1, 2, 3), "r") == admitted


@pytest.mark.parametrize(
    "data", [b"", b"{}", b"[]", b"3", b'{"version": 2}', TURN.encode().replace(b'"version": 2', b'"version": 1')]
)
def test_what_cannot_be_read_is_a_mismatch(data: bytes) -> None:
    with pytest.raises(Mismatch, match="session"):
        Turn.decode(data)


def test_nothing_new_is_no_record() -> None:
    cursor, tokens = Cursor(TURN, 0), [1, 2, 3]
    first = cursor.next(tokens, SessionRecord)
    assert first == SessionRecord(position=0, token_ids=(1, 2, 3), state=TURN.encode())
    cursor.appended(first)
    assert cursor.next(tokens, SessionRecord) is None
    tokens.append(4)
    second = cursor.next(tokens, SessionRecord)
    assert second == SessionRecord(position=3, token_ids=(4,))
    cursor.appended(second)
    cursor.end("LENGTH", "")
    final = cursor.next(tokens, SessionRecord)
    assert final is not None
    assert (final.position, tuple(final.token_ids)) == (4, ())
    assert Turn.decode(final.state or b"").reason == "LENGTH"


def test_a_row_without_usable_logits_is_not_logged() -> None:
    cursor = Cursor(TURN, 3, turn_known=True)
    assert cursor.next([1, 2, 3, -1], SessionRecord) is None


@given(st.lists(st.sampled_from(["token", "write", "lost ack", "lost log"]), max_size=60), st.integers(0, 3))
def test_whatever_is_lost_the_log_ends_up_right(events: list[str], kept: int) -> None:
    """Acks that never come and logs that forget everything; `kept` tokens were there when the turn began."""
    tokens = [10, 11, 12]
    log, cursor = Session(), Cursor(TURN, kept)
    log.apply(1, SessionRecord(0, tokens[:kept]))

    def write(lose_ack: bool = False) -> None:
        record = cursor.next(tokens, SessionRecord)
        if record is None:
            return
        verdict = log.verdict(2, record)
        if verdict is Verdict.APPENDED:
            log.apply(2, record)
        ack = SessionAck(verdict, log.epoch, len(log.token_ids), 0)
        if not lose_ack:
            cursor.appended(record) if verdict is Verdict.APPENDED else cursor.gap(ack)
        assert verdict in (Verdict.APPENDED, Verdict.GAP)

    for event in events:
        if event == "token":
            tokens.append(100 + len(tokens))
        elif event == "lost log":
            log = Session()
        else:
            write(lose_ack=event == "lost ack")
    cursor.end("STOP_TOKEN", "")
    for _ in range(3):
        write()
    if log.token_ids:  # a log that was lost after everything was acknowledged is not noticed before the next record
        assert list(log.token_ids) == tokens
        assert Turn.decode(log.state).reason == "STOP_TOKEN"


def test_a_tail_survives_its_encoding() -> None:
    tail = Tail(32, 40, 16, b"rows")
    assert Tail.decode(32, tail.encode()) == tail
    assert Tail.decode(0, b"") is None
    assert Tail.decode(0, Tail(0, 0, 16, b"").encode()) is None
