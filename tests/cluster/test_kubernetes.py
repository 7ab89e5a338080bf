"""Workers that come and go under load: a small API server, real routers and workers. No stream breaks or changes a token."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import grpc
import pytest
from fake_kubernetes import FakeKubernetes
from fleet import ALL, EXPERTS, LAYERS, Fleet, Load, serves
from reference_model import CASES, Oracle
from waiting import until

CASE = "qwen3"
PROMPT = CASES[CASE].prompt
LONG = 200


@pytest.fixture
def fleet(checkpoint: Callable[[str], Path]) -> Iterator[Fleet]:
    with FakeKubernetes() as kubernetes:
        fleet = Fleet(kubernetes, checkpoint(CASE))
        yield fleet
        for process in fleet.processes.values():
            process.end(0.0)


@pytest.fixture
def expected(oracle: Callable[[str], Oracle]) -> list[int]:
    return oracle(CASE).greedy(PROMPT, LONG)


def test_two_workers_become_four_and_then_one(fleet: Fleet, expected: list[int]) -> None:
    fleet.workers("w0", "w1")
    router = fleet.router("r0")
    assert fleet.held("w0") | fleet.held("w1") == ALL
    load = Load(router, PROMPT, expected)
    until(lambda: len(load.streams) > 1)
    fleet.workers("w2", "w3")
    until(lambda: serves(router, 4))
    until(lambda: all(0 < len(fleet.held(name)) < len(ALL) for name in ("w0", "w1", "w2", "w3")), every=0.2)
    for name in ("w0", "w1", "w2"):
        fleet.announce(name, terminating=True)
    until(lambda: fleet.held("w3") == ALL, every=0.2)
    for name in ("w0", "w1", "w2"):
        fleet.end(name)
    until(lambda: serves(router, 1))
    load.finish()
    assert router.generate(PROMPT, LONG).tokens == expected
    router.close()


def test_measured_load_moves_and_replicates_single_experts_while_streams_run(fleet: Fleet, expected: list[int]) -> None:
    """The hottest experts of every layer begin on one worker. Nothing but their use says so."""
    fleet.workers("w0", "w1", "w2", flags=["--slots=60%", "--max-experts=18"])  # copies into slots, while places change hands
    first = fleet.router("r0")
    assert first.generate(PROMPT, LONG).tokens == expected
    hottest = {
        layer.layer: sorted(range(EXPERTS), key=lambda e, pairs=layer.pairs: (-pairs[e], e))  # type: ignore[misc]
        for layer in first.stats().expert_load
    }
    fleet.kill("r0")
    first.close()
    for name, part in (("w0", slice(0, 3)), ("w1", slice(3, 6)), ("w2", slice(6, 8))):
        fleet.place(name, {layer: sorted(order[part]) for layer, order in hottest.items()}, epoch=1)
    until(lambda: [len(fleet.held(name)) for name in ("w0", "w1", "w2")] == [9, 9, 6], every=0.1)
    fleet.processes["r1"] = fleet.processes.pop("r0")
    router = fleet.router("r1", "--rebalance-s=3", "--expert-extra=1")
    load = Load(router, PROMPT, expected)

    def spread() -> bool:
        held = [fleet.held(name) for name in ("w0", "w1", "w2")]
        return all(sum((layer, order[0]) in one for one in held) > 1 for layer, order in hottest.items())

    until(spread, every=0.5)
    until(lambda: sum(fleet.moved(name)[1] for name in ("w0", "w1", "w2")) > LAYERS, every=0.5)
    before = len(load.streams)
    until(lambda: len(load.streams) >= before + 2)
    assert load.finish() == 0, "every expert was served until the table that named it was out of use: no step ran twice"
    assert fleet.held("w0") | fleet.held("w1") | fleet.held("w2") == ALL
    router.close()


def test_the_router_that_plans_is_killed(fleet: Fleet, expected: list[int]) -> None:
    fleet.workers("w0", "w1")
    first = fleet.router("r0")
    leader = fleet.leader()
    second = fleet.router("r1")
    assert fleet.leader() == leader, "it came first, and lives"
    load = Load(second, PROMPT, expected)
    until(lambda: len(load.streams) > 1)
    fleet.kill("r0")
    fleet.workers("w2")
    until(lambda: fleet.leader() not in ("", leader))
    until(lambda: serves(second, 3))
    assert fleet.kubernetes.leases["experts-planner"]["spec"]["leaseTransitions"] == 2
    load.finish()
    until(lambda: sum(len(fleet.held(name)) for name in ("w0", "w1", "w2")) == len(ALL), every=0.2)  # nothing moves any more
    before = fleet.held("w0")
    with pytest.raises(grpc.RpcError) as caught:
        fleet.place("w0", {}, epoch=1)
    assert caught.value.code() == grpc.StatusCode.FAILED_PRECONDITION
    assert fleet.held("w0") == before
    first.close()
    second.close()


def test_the_api_server_freezes_and_a_worker_is_killed(fleet: Fleet, expected: list[int]) -> None:
    fleet.workers("w0", "w1")
    router = fleet.router("r0")
    load = Load(router, PROMPT, expected)
    until(lambda: len(load.streams) > 1)
    held = fleet.held("w1")
    fleet.kubernetes.frozen.set()
    load.streams[0].wait_for(20)
    worker = fleet.kill("w1")
    worker.spawn()  # on its old port, with nothing
    worker.wait_ready(240.0)
    until(lambda: fleet.held("w1") >= held, every=0.2)
    until(lambda: serves(router, 2))
    fleet.kubernetes.frozen.clear()
    fleet.workers("w2")
    until(lambda: serves(router, 3))
    assert load.finish() >= 1
    router.close()


def test_watches_that_are_half_open_cut_and_too_old_and_leases_that_conflict(fleet: Fleet, expected: list[int]) -> None:
    fleet.workers("w0", "w1")
    router = fleet.router("r0")
    kubernetes = fleet.kubernetes
    load = Load(router, PROMPT, expected)
    until(lambda: len(load.streams) > 1)
    leader, lists = fleet.leader(), kubernetes.lists
    kubernetes.mute()  # half-open: connections stay, and nothing comes over them any more
    kubernetes.conflicts = 2  # somebody else seems to write the Lease: 409
    fleet.workers("w2")
    until(lambda: serves(router, 3))
    assert kubernetes.lists > lists, "it gave that watch up and listed again"
    kubernetes.cut()  # in the middle of a line
    lists = kubernetes.lists
    kubernetes.forget()  # 410 for the version that it would go on from
    fleet.announce("w2", terminating=True)
    until(lambda: kubernetes.lists > lists)
    until(lambda: fleet.held("w0") | fleet.held("w1") == ALL, every=0.2)
    fleet.end("w2")
    until(lambda: serves(router, 2))
    load.finish()
    assert fleet.leader() == leader
    assert kubernetes.leases["experts-planner"]["spec"]["leaseTransitions"] == 1, "409 loses a turn and not the lead"
    router.close()
