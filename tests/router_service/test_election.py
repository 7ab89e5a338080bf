"""Who leads: scenarios over a Lease, with clocks that differ."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from router_service.election import Election, Record


class Server:
    """Holds the Lease; refuses writes to another version than the newest."""

    def __init__(self) -> None:
        self.record: Record | None = None
        self.version = 0

    def write(self, record: Record) -> Record | None:
        if (self.record.version if self.record else "") != record.version:
            return None
        self.version += 1
        self.record = replace(record, version=str(self.version))
        return self.record


def turn(server: Server, election: Election, now: float) -> str:
    action = election.decide(server.record, now)
    if action != "wait":
        written = server.write(election.next_record(action, f"{election.identity}{now}"))
        if written is None:
            election.lost()
            return "lost"
        election.written(written, now)
    return action


def test_the_first_one_leads_and_renews() -> None:
    server, a, b = Server(), Election("a"), Election("b")
    assert turn(server, a, 0) == "create"
    assert (a.leading(0), a.epoch) == (True, 1)
    assert turn(server, b, 0) == "wait"
    assert turn(server, a, 1) == "wait", "not due yet"
    assert turn(server, a, 4) == "renew"
    assert a.epoch == 1
    assert not b.leading(4)


def test_a_silent_leader_stops_before_it_is_replaced() -> None:
    server, a, b = Server(), Election("a"), Election("b")
    turn(server, a, 0)
    turn(server, b, 0.5)
    assert a.leading(11.9)
    assert not a.leading(12.1)
    assert turn(server, b, 15.4) == "wait"
    assert turn(server, b, 15.6) == "take"
    assert (b.leading(15.6), b.epoch) == (True, 2)


def test_clocks_that_differ_do_not_matter() -> None:
    """b's clock is a week ahead: it still waits the whole duration, counted from when it first saw the record."""
    server, a, b = Server(), Election("a"), Election("b")
    week = 7 * 86_400
    turn(server, a, 0)
    assert turn(server, b, week) == "wait"
    assert turn(server, b, week + 14) == "wait"
    turn(server, a, 14)
    assert turn(server, b, week + 20) == "wait", "the record changed: it lives"
    assert turn(server, b, week + 36) == "take"


def test_a_leader_that_slept_loses_by_the_version() -> None:
    server, a, b = Server(), Election("a"), Election("b")
    turn(server, a, 0)
    turn(server, b, 0)
    assert turn(server, b, 16) == "take"
    stale = a.next_record("renew", "late")
    assert server.write(stale) is None
    a.lost()
    assert not a.leading(16)
    assert turn(server, a, 16.1) == "wait"
    assert b.epoch == 2


def test_a_process_that_was_started_again_is_somebody_else() -> None:
    server, a = Server(), Election("a-1")
    turn(server, a, 0)
    again = Election("a-2")
    assert turn(server, again, 1) == "wait"
    assert turn(server, again, 17) == "take"
    assert again.epoch == 2


def test_a_lease_that_was_given_up_is_taken_at_once() -> None:
    server, b = Server(), Election("b")
    server.write(Record("", "then", 4))
    assert turn(server, b, 0) == "take"
    assert b.epoch == 5


@given(st.lists(st.tuples(st.sampled_from("abc"), st.floats(0.1, 20.0)), max_size=60))
def test_never_two_leaders_and_epochs_only_rise(steps: list[tuple[str, float]]) -> None:
    server, now, highest = Server(), 0.0, 0
    candidates = {name: Election(name) for name in "abc"}
    for name, pause in steps:
        now += pause
        turn(server, candidates[name], now)
        leaders = [candidate for candidate in candidates.values() if candidate.leading(now)]
        assert len(leaders) <= 1
        for leader in leaders:
            assert leader.epoch >= highest
            highest = leader.epoch
