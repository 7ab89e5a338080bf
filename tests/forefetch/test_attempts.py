"""Which router is asked for what, by scenario; time is a number the test chooses."""

from __future__ import annotations

from typing import Any

import pytest

from forefetch.attempts import Attempts
from forefetch.errors import BadRequest, Draining, ForefetchError, NotFound, Unavailable
from forefetch.v1 import router_pb2

RESUME = router_pb2.SESSION_MODE_RESUME
GONE = Unavailable("gone")


def make(addresses: str = "a b", patience_s: float = 10.0, **session: Any) -> Attempts:
    request = router_pb2.GenerateRequest(text="x")
    if session:
        request.session.CopyFrom(router_pb2.SessionParams(**session))
    return Attempts(request, addresses.split(), 0, patience_s)


def test_without_a_session_only_what_was_not_begun_is_sent_again() -> None:
    attempts = make()
    assert attempts.again(GONE, 0.0) == 0.0
    assert (attempts.address, attempts.request.text) == ("b", "x")
    attempts.saw(0)
    with pytest.raises(Unavailable):
        attempts.again(GONE, 1.0)


def test_one_router_and_no_session_is_one_attempt() -> None:
    with pytest.raises(Unavailable):
        make("a").again(GONE, 0.0)


@pytest.mark.parametrize("error", [BadRequest("f", "m"), NotFound("n"), ForefetchError("internal")])
@pytest.mark.parametrize("session", [{}, {"id": "s"}])
def test_other_errors_are_final(error: ForefetchError, session: dict[str, str]) -> None:
    with pytest.raises(type(error)):
        make(**session).again(error, 0.0)


def test_a_session_s_answer_is_resumed_where_it_broke_off() -> None:
    attempts = make(id="s")
    name = attempts.request.request_id
    assert name
    for index in range(5):
        attempts.saw(index)
    attempts.again(Draining("bye"), 0.0)
    assert attempts.address == "b"
    assert attempts.request == router_pb2.GenerateRequest(
        session=router_pb2.SessionParams(id="s", mode=RESUME, next_index=5, answer=name)
    )
    attempts.saw(5)
    attempts.again(GONE, 0.0)
    assert (attempts.address, attempts.request.session.next_index) == ("a", 6)


def test_what_never_began_is_sent_as_it_was() -> None:
    attempts = make(id="s")
    attempts.again(GONE, 0.0)
    assert attempts.request.session.mode == RESUME
    assert attempts.again(NotFound("no such answer"), 0.0) == 0.0
    assert (attempts.address, attempts.request.text) == ("b", "x")  # "a" is gone, and would say so again
    with pytest.raises(NotFound):
        attempts.again(NotFound("no such session"), 0.0)


def test_a_session_that_is_gone_with_tokens_seen_is_the_first_error() -> None:
    attempts = make(id="s")
    attempts.saw(0)
    attempts.again(GONE, 0.0)
    with pytest.raises(Unavailable, match="gone"):
        attempts.again(NotFound("forgotten"), 0.0)


def test_a_resumption_is_resumed_from_what_it_brought() -> None:
    attempts = make(id="s", mode=RESUME, next_index=7)
    attempts.again(GONE, 0.0)
    assert (attempts.request.session.next_index, attempts.request.session.answer) == (7, "")
    attempts.saw(7)
    attempts.again(GONE, 0.0)
    assert attempts.request.session.next_index == 8


def test_every_router_is_asked_at_once_then_with_pauses_until_patience_ends() -> None:
    attempts = make("a b c", id="s")
    now, pauses, asked = 0.0, [], []
    with pytest.raises(Unavailable):  # noqa: PT012
        while True:
            pauses.append(attempts.again(GONE, now))
            asked.append(attempts.address)
            now += pauses[-1] + 0.1
    assert asked[:4] == ["b", "c", "a", "b"]
    assert pauses[:2] == [0.0, 0.0]
    assert all(0 < pause <= 1.0 for pause in pauses[2:])
    assert 10.0 < now < 12.5


def test_a_token_renews_patience() -> None:
    attempts = make(id="s", patience_s=1.0)
    for index in range(10):
        attempts.again(GONE, float(index))
        attempts.saw(index)
