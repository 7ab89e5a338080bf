"""The informer and the elector against a small API server that misbehaves."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
from fake_kubernetes import FakeKubernetes, endpoint
from waiting import until

from router_service import discovery
from router_service.discovery import Elector, Informer
from router_service.election import Election
from router_service.endpoints import Endpoint
from router_service.kubernetes_api import ApiAway, Conflict, Expired, KubernetesApi


@pytest.fixture
def kubernetes() -> Iterator[FakeKubernetes]:
    with FakeKubernetes() as fake:
        yield fake


class Followed:
    """An informer at work; `seen` are the tables that it published."""

    def __init__(self, kubernetes: FakeKubernetes, timeout_s: float = 30.0) -> None:
        self.seen: list[Sequence[Endpoint]] = []
        api = KubernetesApi("test", kubernetes.url)
        self.informer = Informer(api, "experts", timeout_s, self.seen.append)
        self.versions: list[str] = []  # that it went on from
        watch = api.watch

        def noted(*asked: Any) -> Iterator[Any]:
            for kind, thing in watch(*asked):
                self.versions.append(thing["metadata"]["resourceVersion"])
                yield kind, thing

        api.watch = noted  # type: ignore[method-assign]
        self.thread = threading.Thread(target=self.informer.follow, daemon=True)
        self.thread.start()

    def wait_for(self, *addresses: str) -> None:
        until(lambda: bool(self.seen) and [e.address for e in self.seen[-1]] == list(addresses))


@pytest.fixture
def follow(kubernetes: FakeKubernetes, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Followed]]:
    monkeypatch.setattr(discovery, "LAST_PAUSE_S", 0.2)
    made: list[Followed] = []

    def start(timeout_s: float = 30.0) -> Followed:
        made.append(Followed(kubernetes, timeout_s))
        return made[-1]

    yield start
    for followed in made:
        followed.informer.stop()
    kubernetes.cut()
    for followed in made:
        followed.thread.join(60)


def test_what_is_listed_and_what_comes_and_goes(kubernetes: FakeKubernetes, follow: Callable[..., Followed]) -> None:
    kubernetes.put("a", [endpoint("10.0.0.1")], 5)
    kubernetes.put("of-somebody-else", [endpoint("10.9.9.9")], 5, service="other")
    followed = follow()
    followed.wait_for("10.0.0.1:5")
    kubernetes.put("b", [endpoint("10.0.0.2", serving=False)], 6)
    followed.wait_for("10.0.0.1:5", "10.0.0.2:6")
    kubernetes.put("a", [endpoint("10.0.0.1", terminating=True)], 5)
    until(lambda: followed.seen[-1][0] == Endpoint("10.0.0.1:5", leaving=True))
    kubernetes.delete("a")
    followed.wait_for("10.0.0.2:6")
    assert kubernetes.lists == 1, "the rest came over the watch"


def test_a_slice_that_is_written_again_is_no_news(kubernetes: FakeKubernetes, follow: Callable[..., Followed]) -> None:
    kubernetes.put("a", [endpoint("10.0.0.1")])
    followed = follow()
    followed.wait_for("10.0.0.1:1")
    for _ in range(3):
        kubernetes.put("a", [endpoint("10.0.0.1")])
    kubernetes.put("b", [endpoint("10.0.0.2")])
    followed.wait_for("10.0.0.1:1", "10.0.0.2:1")
    assert len(followed.seen) == 2


def test_a_version_that_was_forgotten_means_a_new_list(kubernetes: FakeKubernetes, follow: Callable[..., Followed]) -> None:
    kubernetes.put("a", [endpoint("10.0.0.1")])
    followed = follow()
    followed.wait_for("10.0.0.1:1")
    with kubernetes.changed:  # gone before anybody could hear of it
        del kubernetes.slices["a"]
    kubernetes.forget()
    kubernetes.put("b", [endpoint("10.0.0.2")])
    followed.wait_for("10.0.0.2:1")
    assert kubernetes.lists >= 2


def test_bookmarks_carry_a_quiet_watch_over_what_is_forgotten(
    kubernetes: FakeKubernetes, follow: Callable[..., Followed]
) -> None:
    """The version of the last bookmark is new enough where that of the last change is not."""
    kubernetes.put("a", [endpoint("10.0.0.1")])
    kubernetes.bookmark_s = 0.05
    followed = follow(1.5)  # so watches end, and begin again at the version they know, every 1.2 s
    followed.wait_for("10.0.0.1:1")
    kubernetes.put("x", [endpoint("10.0.0.9")], service="other")  # raises the version; this watch hears nothing of it
    newest = str(kubernetes.version)
    until(lambda: newest in followed.versions)
    with kubernetes.changed:
        kubernetes.oldest = kubernetes.version
    watches = kubernetes.watches
    until(lambda: kubernetes.watches >= watches + 2)
    assert kubernetes.lists == 1


def test_a_watch_that_is_cut_in_a_line_costs_nothing(kubernetes: FakeKubernetes, follow: Callable[..., Followed]) -> None:
    kubernetes.put("a", [endpoint("10.0.0.1")])
    followed = follow()
    followed.wait_for("10.0.0.1:1")
    for number in range(2, 5):
        kubernetes.cut()
        kubernetes.put("b", [endpoint(f"10.0.0.{number}")])
        followed.wait_for("10.0.0.1:1", f"10.0.0.{number}:1")
    assert all("10.0.0.1:1" in [found.address for found in table] for table in followed.seen)


def test_a_server_that_says_nothing_is_left_after_the_timeout(
    kubernetes: FakeKubernetes, follow: Callable[..., Followed]
) -> None:
    kubernetes.put("a", [endpoint("10.0.0.1")])
    followed = follow(1.0)
    followed.wait_for("10.0.0.1:1")
    kubernetes.frozen.set()
    until(lambda: followed.informer.away)
    assert len(followed.seen) == 1, "the last table stays"
    kubernetes.frozen.clear()
    kubernetes.put("a", [endpoint("10.0.0.2")])
    followed.wait_for("10.0.0.2:1")
    until(lambda: not followed.informer.away)


def test_a_server_that_is_away_and_comes_back(kubernetes: FakeKubernetes, follow: Callable[..., Followed]) -> None:
    kubernetes.put("a", [endpoint("10.0.0.1")])
    followed = follow()
    followed.wait_for("10.0.0.1:1")
    kubernetes.stop()
    until(lambda: followed.informer.away)
    time.sleep(0.5)
    assert len(followed.seen) == 1
    kubernetes.start()
    kubernetes.put("b", [endpoint("10.0.0.2")])
    followed.wait_for("10.0.0.1:1", "10.0.0.2:1")


def test_errors_of_the_api_are_told_apart(kubernetes: FakeKubernetes) -> None:
    api = KubernetesApi("test", kubernetes.url)
    assert api.lease("x") is None
    made = api.create_lease("x", {"holderIdentity": "a"})
    with pytest.raises(Conflict):
        api.create_lease("x", {"holderIdentity": "b"})
    version = made["metadata"]["resourceVersion"]
    api.replace_lease("x", version, {"holderIdentity": "b"})
    with pytest.raises(Conflict):
        api.replace_lease("x", version, {"holderIdentity": "c"})
    kubernetes.forget()
    with pytest.raises(Expired):
        next(api.watch("experts", "1", 5.0))
    with pytest.raises(ApiAway):
        KubernetesApi("test", "http://127.0.0.1:1").lease("x")


def test_two_candidates_and_one_lease(kubernetes: FakeKubernetes, monkeypatch: pytest.MonkeyPatch) -> None:
    def candidate(name: str) -> Elector:
        election = Election(name, duration_s=15.0, renew_s=3.0, margin_s=3.0)
        return Elector(KubernetesApi("test", kubernetes.url), "planner", election)

    a, b = candidate("a"), candidate("b")
    clock = [100.0]
    monkeypatch.setattr(discovery, "monotonic", lambda: clock[0])

    def now() -> float:
        return clock[0]

    a.turn()
    b.turn()
    assert (a.election.leading(now()), b.election.leading(now())) == (True, False)
    lease = kubernetes.leases["planner"]["spec"]
    assert (lease["holderIdentity"], lease["leaseTransitions"]) == ("a", 1)
    kubernetes.conflicts = 1
    clock[0] += 3.5
    a.turn()
    assert not a.election.leading(now()), "somebody wrote in between: not sure any more"
    a.turn()
    assert a.election.leading(now())
    b.turn()
    assert not b.election.leading(now())
    clock[0] += 15.5  # a is silent
    b.turn()
    assert b.election.leading(now())
    assert not a.election.leading(now())
    assert (b.election.epoch, kubernetes.leases["planner"]["spec"]["holderIdentity"]) == (2, "b")


def test_a_leader_without_an_api_server_stops_leading_by_its_own_clock(kubernetes: FakeKubernetes) -> None:
    election = Election("a", duration_s=1.0, renew_s=0.2, margin_s=0.3)
    elector = Elector(KubernetesApi("test", kubernetes.url), "planner", election)
    elector.turn()
    kubernetes.stop()

    def leading() -> bool:
        elector.turn()
        return election.leading(time.monotonic())

    until(lambda: not leading())
    kubernetes.start()
    until(leading)
    assert election.epoch == 1, "nobody else led meanwhile"
