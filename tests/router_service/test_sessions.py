"""The writing thread against a scripted KV service."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from waiting import PATIENCE_S, until

from forefetch.errors import ForefetchError, Mismatch, StaleEpoch, Unavailable
from forefetch.rpc.auth import ANONYMOUS
from forefetch.v1 import router_pb2
from kv_service.client import SessionAck, SessionRecord, SessionState, Verdict
from kv_service.store_sessions import Session
from router_service import sessions as module
from router_service.admission import Admitted, Limits, SamplingParams
from router_service.asking import Reader
from router_service.conversations import Conversations, Opened
from router_service.journal import Tail, Turn
from router_service.live import Live, Snapshot
from router_service.scheduler import Request
from router_service.sessions import Sessions, name_of

ADMITTED = Admitted((1, 2, 3), 50, False, SamplingParams(), (), frozenset(), "r")


@dataclass(eq=False)
class Service:
    """A client whose service is this object. `verdicts`: answers to give instead of its own, one for each record."""

    sessions: dict[str, Session] = field(default_factory=dict)
    verdicts: list[Verdict] = field(default_factory=list)
    away: bool = False
    calls: list[int] = field(default_factory=list)
    client: Any = None
    address: str = "kv:1"
    before_claim: Callable[[], None] = lambda: None

    def __post_init__(self) -> None:
        self.client = self

    def of_session(self, name: str) -> Service:
        return self

    def get_session(self, name: str, claim: bool = False, timeout_s: float = 0.0) -> SessionState | None:
        if not claim and name not in self.sessions:
            return None
        if claim:
            self.before_claim()
        session = self.sessions.setdefault(name, Session())
        session.epoch += claim
        return SessionState(session.epoch, tuple(session.token_ids), (), session.state, b"", 0)

    def append_session(self, name: str, epoch: int, record: SessionRecord, timeout_s: float) -> SessionAck:
        (ack,) = self.append_sessions([(name, epoch, record)], timeout_s)
        if ack.verdict is Verdict.STALE_EPOCH:
            raise StaleEpoch("no")
        return ack

    def append_sessions(self, records: Sequence[tuple[str, int, SessionRecord]], timeout_s: float) -> list[SessionAck]:
        if self.away:
            raise Unavailable("gone")
        self.calls.append(len(records))
        acks = []
        for name, epoch, record in records:
            session = self.sessions.setdefault(name, Session())
            verdict = self.verdicts.pop(0) if self.verdicts else session.verdict(epoch, record)
            if verdict is Verdict.APPENDED:
                session.apply(epoch, record)
            acks.append(SessionAck(verdict, session.epoch, len(session.token_ids), 0))
        return acks


@pytest.fixture
def service() -> Service:
    return Service()


@pytest.fixture
def sessions(service: Service, monkeypatch: pytest.MonkeyPatch) -> Iterator[Sessions]:
    monkeypatch.setattr(module, "END_S", PATIENCE_S)
    made = Sessions(service, lag_s=0.02)  # type: ignore[arg-type]
    yield made
    monkeypatch.setattr(module, "END_S", 0.2)
    made.close()
    until(lambda: not made._writer.is_alive())
    assert made.live == 0


def begin(sessions: Sessions, name: str = "s") -> Live:
    state = sessions.claim(name, 1.0)
    request = Request(1, "r", ADMITTED.prompt, ADMITTED, arrival=0.0)
    live = sessions.prepare(name, state.epoch, request, Turn.of("m", "float32", ADMITTED), 0)
    sessions.open(live, 1.0)
    return live


def test_the_beginning_is_logged_before_anything_is_computed(sessions: Sessions, service: Service) -> None:
    begin(sessions)
    assert list(service.sessions["s"].token_ids) == [1, 2, 3]
    assert Turn.decode(service.sessions["s"].state).prompt == 3


def test_tokens_follow_within_the_lag_many_sessions_in_a_call(sessions: Sessions, service: Service) -> None:
    lives = [begin(sessions, f"s{i}") for i in range(5)]
    for live in lives:
        live.request.tokens.extend([7, 8])
    until(lambda: all(list(service.sessions[live.name].token_ids) == [1, 2, 3, 7, 8] for live in lives))
    assert max(service.calls) > 1
    quiet = len(service.calls)
    time.sleep(0.1)
    assert len(service.calls) == quiet, "nothing new, nothing written"


def test_the_end_is_written_at_once_and_told(sessions: Sessions, service: Service) -> None:
    live = begin(sessions)
    live.request.tokens.append(9)
    assert sessions.finish(live, "LENGTH", "").result(2 * PATIENCE_S) is True
    assert list(service.sessions["s"].token_ids) == [1, 2, 3, 9]
    assert Turn.decode(service.sessions["s"].state).reason == "LENGTH"
    assert sessions.live == 0
    sessions.leave(live)


def test_whoever_left_early_leaves_the_answer_unfinished(sessions: Sessions, service: Service) -> None:
    live = begin(sessions)
    live.request.tokens.append(9)
    assert sessions.leave(live).result(2 * PATIENCE_S) is True
    assert Turn.decode(service.sessions["s"].state).reason == ""


def test_a_session_taken_over_ends_its_request(sessions: Sessions, service: Service) -> None:
    fenced: list[tuple[Request, ForefetchError]] = []
    sessions.fence = lambda request, error: fenced.append((request, error))
    live = begin(sessions)
    sessions.claim("s", 1.0)
    live.request.tokens.append(9)
    until(lambda: fenced)
    assert fenced[0][0] is live.request
    assert isinstance(fenced[0][1], Mismatch)
    assert list(service.sessions["s"].token_ids) == [1, 2, 3]
    assert sessions.finish(live, "LENGTH", "").result(2 * PATIENCE_S) is False
    assert sessions.counts.failures["stale"] == 1


def come(sessions: Sessions, mode: Any) -> Opened:
    """Opens "s" with the prompt [7]."""
    conversations = Conversations(sessions, Reader(Limits(50, 40, 16), None), "m", "float32")
    params = router_pb2.SessionParams(id="s", mode=mode)
    request = router_pb2.GenerateRequest(tokens=router_pb2.TokenPrompt(ids=[7]), session=params)
    return asyncio.run(conversations.open(request, ANONYMOUS, None))


def test_of_two_who_go_on_at_once_the_one_who_claims_last_follows_the_other(sessions: Sessions, service: Service) -> None:
    begin(sessions)
    service.before_claim = lambda: service.sessions["s"].token_ids.extend([8, 9])
    opened = come(sessions, router_pb2.SESSION_MODE_CONTINUE)
    assert (opened.admitted.prompt, opened.logged) == ((1, 2, 3, 8, 9, 7), 5)


def test_who_begins_a_session_that_has_just_been_begun_is_refused(sessions: Sessions, service: Service) -> None:
    service.before_claim = lambda: service.sessions.setdefault("s", Session()).token_ids.extend([8, 9])
    with pytest.raises(Mismatch, match="another request"):
        come(sessions, router_pb2.SESSION_MODE_START)


def test_a_claim_between_claim_and_beginning_is_noticed(sessions: Sessions, service: Service) -> None:
    state = sessions.claim("s", 1.0)
    sessions.claim("s", 1.0)
    request = Request(1, "r", ADMITTED.prompt, ADMITTED, arrival=0.0)
    live = sessions.prepare("s", state.epoch, request, Turn.of("m", "float32", ADMITTED), 0)
    with pytest.raises(StaleEpoch, match="session"):
        sessions.open(live, 1.0)
    assert sessions.live == 0


def test_a_service_that_was_away_gets_everything_and_one_that_stays_away_is_told_of(
    sessions: Sessions, service: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    live = begin(sessions)
    service.away = True
    live.request.tokens.extend([7, 8])
    time.sleep(0.1)
    service.away = False
    service.sessions.clear()  # and it lost everything
    until(lambda: "s" in service.sessions and list(service.sessions["s"].token_ids) == [1, 2, 3, 7, 8])
    assert Turn.decode(service.sessions["s"].state).prompt == 3
    service.away = True
    monkeypatch.setattr(module, "END_S", 0.2)
    live.request.tokens.append(9)
    assert sessions.finish(live, "LENGTH", "").result(2 * PATIENCE_S) is False
    assert sessions.counts.failures["unavailable"] == 1


def test_who_waits_for_the_end_and_is_cancelled_harms_no_other(sessions: Sessions, service: Service) -> None:
    """As a caller does whose deadline passes while the KV service is away."""
    live, other = begin(sessions), begin(sessions, "other")
    service.away = True

    async def give_up() -> None:
        live.request.tokens.append(9)
        waiting = asyncio.wrap_future(sessions.finish(live, "LENGTH", ""))
        await asyncio.sleep(0)
        waiting.cancel()
        await asyncio.sleep(0)

    asyncio.run(give_up())
    service.away = False
    until(lambda: sessions.live == 1)
    other.request.tokens.append(9)
    assert sessions.finish(other, "LENGTH", "").result(2 * PATIENCE_S) is True
    assert list(service.sessions["s"].token_ids) == [1, 2, 3, 9]


@pytest.mark.parametrize(("verdict", "name"), [(Verdict.CONFLICT, "conflict"), (Verdict.NO_ROOM, "unavailable")])
def test_a_log_that_refuses_is_counted_and_costs_no_busy_loop(
    verdict: Verdict, name: str, sessions: Sessions, service: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    live = begin(sessions)
    monkeypatch.setattr(module, "END_S", 0.2)
    service.verdicts = [verdict] * 1000
    live.request.tokens.append(9)
    assert sessions.finish(live, "LENGTH", "").result(2 * PATIENCE_S) is False
    assert sessions.counts.failures[name] == 1
    assert len(service.calls) < 50


def test_a_caller_who_goes_before_the_beginning_is_written_is_not_followed(sessions: Sessions, service: Service) -> None:
    state = sessions.claim("s", 1.0)
    request = Request(1, "r", ADMITTED.prompt, ADMITTED, arrival=0.0)
    live = sessions.prepare("s", state.epoch, request, Turn.of("m", "float32", ADMITTED), 0)
    sessions.leave(live)
    sessions.open(live, 1.0)
    assert sessions.live == 0


def test_tenants_have_names_of_their_own() -> None:
    assert len({name_of(tenant, "s") for tenant in ("default", "a", "b", "a/s")}) == 4
    assert len(name_of("t" * 500, "s" * 96)) <= 128


@pytest.fixture
def tailed(service: Service) -> Iterator[Sessions]:
    made = Sessions(service, lag_s=0.01, tail_bytes_s=1000.0)  # type: ignore[arg-type]
    yield made
    made.close()


def snapshots(sessions: Sessions, size: int, seconds: float) -> tuple[int, float]:
    """Plays the engine: leaves a snapshot of `size` bytes wherever one is wanted; how many bytes were asked for, in how many
    seconds."""
    asked, began = 0, time.monotonic()
    while (took := time.monotonic() - began) < seconds:
        for live in sessions.wanting():
            live.snapshot = Snapshot(0, live.request.computed, 4, torch.full((size,), 7, dtype=torch.uint8))
            asked += size
        for live in list(sessions._live):
            live.request.tokens.append(8)
            live.request.computed = len(live.request.tokens) - 1
        time.sleep(0.005)
    return asked, max(took, time.monotonic() - began)


def test_tails_follow_within_their_bytes_per_second(tailed: Sessions, service: Service) -> None:
    lives = [begin(tailed, f"s{i}") for i in range(3)]
    asked, seconds = snapshots(tailed, 100, 1.0)
    # One each before the size is known, one second's worth saved up at most, and what these seconds are worth.
    assert 300 <= asked <= 300 + 1000 * (1 + seconds) + 100
    until(lambda: tailed.counts.tails >= 3 and all(service.sessions[live.name].tail for live in lives))
    for live in lives:
        tail = Tail.decode(service.sessions[live.name].tail_position, service.sessions[live.name].tail)
        assert tail is not None
        assert (tail.data, tail.page) == (bytes([7]) * 100, 4)
        assert 0 < tail.end < len(service.sessions[live.name].token_ids)


def test_a_tail_larger_than_its_second_comes_some_time(tailed: Sessions, service: Service) -> None:
    live = begin(tailed)
    asked, seconds = snapshots(tailed, 1500, 2.5)
    assert 1500 <= asked <= 1500 + 1000 * (1 + seconds) + 1500
    until(lambda: len(service.sessions[live.name].tail) > 1500)


def test_without_a_budget_no_tail_is_asked_for(sessions: Sessions) -> None:
    begin(sessions)
    assert snapshots(sessions, 100, 0.1)[0] == 0
