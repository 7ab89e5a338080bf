"""Workers that come and go under load: a small API server, real routers and workers. No stream breaks or changes a token."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import grpc
import pytest
from cluster_calls import SMALL, Background, Router, until
from fake_kubernetes import FakeKubernetes, endpoint
from reference_model import CASES, Oracle

from forefetch import rpc
from forefetch.process import Process
from forefetch.v1 import expert_pb2, expert_pb2_grpc

CASE = "qwen3"
PROMPT = CASES[CASE].prompt
LONG = 200
SHARDS = 4
LEASE_S = 2.0


class Fleet:
    """Routers and workers of one Service. `workers` and `routers` by name."""

    def __init__(self, kubernetes: FakeKubernetes, model: Path) -> None:
        self.kubernetes, self.model = kubernetes, model
        self.processes: dict[str, Process] = {}
        self.ports: dict[str, int] = {}

    def worker(self, name: str) -> Process:
        """Starts one that holds nothing, and tells the API server of it."""
        flags = [f"--model={self.model}", "--device=cpu", "--placed", f"--shards={SHARDS}"]
        process = self._start(name, "expert_worker", flags)
        self.ports[name] = int(process.address.rpartition(":")[2])
        self.announce(name)
        return process

    def announce(self, name: str, **state: bool) -> None:
        self.kubernetes.put(name, [endpoint("127.0.0.1", **state)], self.ports[name])

    def router(self, name: str) -> Router:
        flags = [f"--model={self.model}", "--device=cpu", *SMALL, "--link=grpc", "--worker-grace-s=60"]
        flags += ["--workers=kubernetes:test/experts", f"--kube-api={self.kubernetes.url}", "--kube-timeout-s=5"]
        process = self._start(name, "router_service", [*flags, f"--lease-s={LEASE_S}", "--max-workers=6", "--rebalance-s=0"])
        return Router(process.address)

    def _start(self, name: str, module: str, flags: list[str]) -> Process:
        process = Process(name, module, flags, {**os.environ, "OMP_NUM_THREADS": "1"})
        self.processes[name] = process
        process.spawn()
        process.wait_ready(60)
        return process

    def end(self, name: str) -> None:
        """As Kubernetes does: it terminates, then it is gone."""
        self.processes[name].signal(signal.SIGTERM)
        assert self.processes[name].wait(20)
        self.processes.pop(name).end(0.0)
        self.kubernetes.delete(name)

    def held(self, name: str) -> set[int]:
        with rpc.channel(self.processes[name].address) as channel:
            stub = expert_pb2_grpc.ExpertServiceStub(channel)
            return set(stub.Describe(expert_pb2.ExpertServiceDescribeRequest(), timeout=10).held_shards)

    def leader(self) -> str:
        """Identity of the router that plans."""
        return str(self.kubernetes.leases.get("experts-planner", {}).get("spec", {}).get("holderIdentity", ""))


@pytest.fixture
def fleet(checkpoint: Callable[[str], Path]) -> Iterator[Fleet]:
    with FakeKubernetes() as kubernetes:
        fleet = Fleet(kubernetes, checkpoint(CASE))
        yield fleet
        for process in fleet.processes.values():
            process.end(0.0)


class Load:
    """Streams one after the other, two at a time, until `finish`; each must be the whole expected answer."""

    def __init__(self, router: Router, expected: list[int]) -> None:
        self.router, self.expected = router, expected
        self.streams: list[Background] = []
        self._stop = threading.Event()
        self._threads = [threading.Thread(target=self._run, daemon=True) for _ in range(2)]
        for thread in self._threads:
            thread.start()

    def _run(self) -> None:
        while not self._stop.is_set():
            stream = Background(self.router, PROMPT, LONG, timeout=120)
            self.streams.append(stream)
            stream.thread.join(120)

    def finish(self) -> int:
        """Steps that had to be run again, over all streams."""
        self._stop.set()
        for thread in self._threads:
            thread.join(120)
        assert len(self.streams) >= 2
        for stream in self.streams:
            assert stream.error is None, stream.error
            assert stream.tokens == self.expected
        return sum(stream.finish.usage.replayed_steps for stream in self.streams)


def serves(router: Router, count: int) -> bool:
    """The router's table has so many workers, all of them up and with experts."""
    workers = router.stats().workers
    return len(workers) == count and all(worker.up and worker.experts for worker in workers)


def test_two_workers_become_four_and_then_one(fleet: Fleet, oracle: Callable[[str], Oracle]) -> None:
    for name in ("w0", "w1"):
        fleet.worker(name)
    router = fleet.router("r0")
    assert fleet.held("w0") | fleet.held("w1") == set(range(SHARDS))
    load = Load(router, oracle(CASE).greedy(PROMPT, LONG))
    until(lambda: len(load.streams) > 1)
    for name in ("w2", "w3"):
        fleet.worker(name)
    until(lambda: serves(router, 4), 40)
    assert all(len(fleet.held(name)) < SHARDS for name in ("w0", "w1", "w2", "w3")), "each has a part, hot ones perhaps twice"
    for name in ("w0", "w1", "w2"):
        fleet.announce(name, terminating=True)
    until(lambda: fleet.held("w3") == set(range(SHARDS)), 40, 0.2)
    for name in ("w0", "w1", "w2"):
        fleet.end(name)
    until(lambda: serves(router, 1), 20)
    load.finish()
    assert router.generate(PROMPT, LONG).tokens == load.expected
    router.close()


def test_the_router_that_plans_is_killed(fleet: Fleet, oracle: Callable[[str], Oracle]) -> None:
    for name in ("w0", "w1"):
        fleet.worker(name)
    first = fleet.router("r0")
    leader = fleet.leader()
    second = fleet.router("r1")
    assert fleet.leader() == leader, "it came first, and lives"
    expected = oracle(CASE).greedy(PROMPT, LONG)
    load = Load(second, expected)
    until(lambda: len(load.streams) > 1)
    fleet.processes["r0"].signal(signal.SIGKILL)
    fleet.worker("w2")
    until(lambda: fleet.leader() not in ("", leader), 20)
    until(lambda: serves(second, 3), 40)
    assert fleet.kubernetes.leases["experts-planner"]["spec"]["leaseTransitions"] == 2
    load.finish()
    with rpc.channel(fleet.processes["w0"].address) as channel:
        stub = expert_pb2_grpc.ExpertServiceStub(channel)
        before = fleet.held("w0")
        with pytest.raises(grpc.RpcError) as caught:
            stub.Place(expert_pb2.PlaceRequest(epoch=1, planner="from the past", shards=[]), timeout=10)
    assert caught.value.code() == grpc.StatusCode.FAILED_PRECONDITION
    assert fleet.held("w0") == before
    first.close()
    second.close()


def test_the_api_server_freezes_and_a_worker_is_killed(fleet: Fleet, oracle: Callable[[str], Oracle]) -> None:
    for name in ("w0", "w1"):
        fleet.worker(name)
    router = fleet.router("r0")
    load = Load(router, oracle(CASE).greedy(PROMPT, LONG))
    until(lambda: len(load.streams) > 1)
    held = fleet.held("w1")
    fleet.kubernetes.frozen.set()
    load.streams[0].wait_for(20)
    worker = fleet.processes["w1"]
    worker.signal(signal.SIGKILL)
    worker.wait(5)
    worker.end(0.0)
    worker.spawn()  # on its old port, with nothing
    worker.wait_ready(60)
    until(lambda: fleet.held("w1") >= held, 40, 0.2)
    until(lambda: serves(router, 2), 20)
    fleet.kubernetes.frozen.clear()
    fleet.worker("w2")
    until(lambda: serves(router, 3), 40)
    assert load.finish() >= 1
    router.close()
