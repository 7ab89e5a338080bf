"""Two links as one: whose turn it is, and when they are no twins."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, cast

import pytest

from expert_worker.twin import TwinLink
from forefetch.errors import Unavailable


@dataclass
class Info:
    instance_id: str


@dataclass
class FakeLink:
    """Answers a call with the call."""

    info: Info
    address: str = "w:1"
    kind: str = "grpc"
    alive: bool = True
    calls: list[Any] = field(default_factory=list)
    closed: bool = False

    def submit(self, call: Any) -> None:
        assert not self.calls, "one call at a time"
        self.calls.append(call)

    def collect(self, timeout_s: float) -> Any:
        return self.calls.pop(0)

    def close(self) -> None:
        self.closed = True


def pair(first: str = "a", second: str = "a") -> tuple[FakeLink, FakeLink]:
    return FakeLink(Info(first)), FakeLink(Info(second))


def test_two_calls_at_a_time_come_back_in_order() -> None:
    both = pair()
    link = TwinLink(*cast(Any, both))
    link.submit(cast(Any, 0))
    for call in range(1, 6):
        link.submit(cast(Any, call))
        assert link.collect(1.0) == cast(Any, call - 1)
    assert link.collect(1.0) == cast(Any, 5)
    assert link.alive
    both[1].alive = False
    assert not link.alive
    link.close()
    assert both[0].closed
    assert both[1].closed


def test_links_to_two_lives_of_a_worker_are_given_up() -> None:
    both = pair("a", "b")
    with pytest.raises(Unavailable, match="restarted"):
        TwinLink(*cast(Any, both))
    assert both[0].closed
    assert both[1].closed
