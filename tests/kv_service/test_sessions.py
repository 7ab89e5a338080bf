"""Sessions over gRPC, and the rules of their records."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from forefetch.errors import BadRequest, Mismatch, StaleEpoch
from kv_service.client import SessionRecord, SessionState, Verdict

if TYPE_CHECKING:
    from kv_calls import Kv


def test_a_session_is_the_sum_of_its_records(kv: Kv) -> None:
    claimed = kv.client.get_session("s", claim=True)
    assert claimed == SessionState(1, (), (), b"", b"", 0)
    kv.client.append_session("s", 1, SessionRecord(0, (1, 2, 3), state=b"greedy"))
    ack = kv.client.append_session("s", 1, SessionRecord(3, (4,), first_block=0, block_digests=(bytes(32),)))
    assert (ack.verdict, ack.epoch, ack.tokens, ack.blocks) == (Verdict.APPENDED, 1, 4, 1)
    kv.client.append_session("s", 1, SessionRecord(4, (5,), tail=b"kv", tail_position=4))
    assert kv.client.get_session("s") == SessionState(1, (1, 2, 3, 4, 5), (bytes(32),), b"greedy", b"kv", 4)
    assert kv.client.get_session("other") is None


def test_repeating_a_record_changes_nothing(kv: Kv) -> None:
    records = [SessionRecord(0, (1, 2), state=b"a"), SessionRecord(2, (3,), state=b"b")]
    for record in (*records, *records):
        kv.client.append_session("s", 1, record)
    state = kv.client.get_session("s")
    assert state is not None
    assert (state.token_ids, state.state) == ((1, 2, 3), b"b")


def test_an_early_record_again_does_not_bring_its_state_back(kv: Kv) -> None:
    early = SessionRecord(0, (1, 2), state=b"a", tail=b"t")
    kv.client.append_session("s", 1, early)
    kv.client.append_session("s", 1, SessionRecord(2, (3,), state=b"b", tail=b""))
    kv.client.append_session("s", 1, early)
    state = kv.client.get_session("s")
    assert state is not None
    assert (state.token_ids, state.state, state.tail) == ((1, 2, 3), b"b", b"")


def test_a_router_that_lost_the_session_is_refused(kv: Kv) -> None:
    kv.client.append_session("s", 1, SessionRecord(0, (1, 2, 3)))
    claimed = kv.client.get_session("s", claim=True)
    assert claimed is not None
    assert (claimed.epoch, claimed.token_ids) == (2, (1, 2, 3))
    with pytest.raises(StaleEpoch):
        kv.client.append_session("s", 1, SessionRecord(3, (4,)))
    kv.client.append_session("s", 2, SessionRecord(2, (9,)))  # takes a token back: it was drawn and never shown
    state = kv.client.get_session("s")
    assert state is not None
    assert state.token_ids == (1, 2, 9)


def test_two_claims_never_get_the_same_epoch(kv: Kv) -> None:
    epochs = [state.epoch for _ in range(3) if (state := kv.client.get_session("s", claim=True))]
    assert epochs == [1, 2, 3]


def test_gaps_and_contradictions_are_told_and_change_nothing(kv: Kv) -> None:
    kv.client.append_session("s", 1, SessionRecord(0, (1, 2)))
    with pytest.raises(Mismatch, match="GAP: the log holds 2 tokens"):
        kv.client.append_session("s", 1, SessionRecord(3, (4,)))
    with pytest.raises(Mismatch, match="CONFLICT"):
        kv.client.append_session("s", 1, SessionRecord(1, (9,)))
    acks = kv.client.append_sessions([("s", 1, SessionRecord(9)), ("t", 1, SessionRecord(0, (1,)))])
    assert [ack.verdict for ack in acks] == [Verdict.GAP, Verdict.APPENDED]
    state = kv.client.get_session("s")
    assert state is not None
    assert state.token_ids == (1, 2)


@pytest.mark.parametrize(
    ("session_id", "epoch", "record", "field"),
    [
        ("", 1, SessionRecord(0), "session_id"),
        ("x" * 129, 1, SessionRecord(0), "session_id"),
        ("s", 0, SessionRecord(0), "epoch"),
        ("s", 1, SessionRecord(0, first_block=0, block_digests=(b"short",)), "block_digests"),
        ("s", 1, SessionRecord(0, block_digests=(bytes(32),)), "first_block"),
    ],
)
def test_malformed_records_name_the_field(kv: Kv, session_id: str, epoch: int, record: SessionRecord, field: str) -> None:
    with pytest.raises(BadRequest) as caught:
        kv.client.append_session(session_id, epoch, record)
    assert caught.value.field == f"records[0].{field}"
