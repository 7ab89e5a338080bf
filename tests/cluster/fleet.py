"""Routers and placed workers behind a small API server, each a process of its own, and a load that checks every token."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

from cluster_calls import SMALL, Background, Router
from fake_kubernetes import FakeKubernetes, endpoint

from forefetch import rpc
from forefetch.process import Process
from forefetch.v1 import expert_pb2, expert_pb2_grpc

LEASE_S = 5.0
START_S = 240.0
LAYERS, EXPERTS = 3, 8
ALL = {(layer, expert) for layer in range(LAYERS) for expert in range(EXPERTS)}


class Fleet:
    """Routers and workers of one Service. `processes` and `ports` by name."""

    def __init__(self, kubernetes: FakeKubernetes, model: Path) -> None:
        self.kubernetes, self.model = kubernetes, model
        self.processes: dict[str, Process] = {}
        self.ports: dict[str, int] = {}

    def workers(self, *names: str, flags: Sequence[str] = ()) -> None:
        """Starts some that hold nothing, all at a time, and tells the API server of them."""
        for name in names:
            self._spawn(name, "expert_worker", [f"--model={self.model}", "--device=cpu", "--placed", *flags])
        for name in names:
            self.processes[name].wait_ready(START_S)
            self.ports[name] = int(self.processes[name].address.rpartition(":")[2])
            self.announce(name)

    def announce(self, name: str, **state: bool) -> None:
        self.kubernetes.put(name, [endpoint("127.0.0.1", **state)], self.ports[name])

    def router(self, name: str, *flags: str) -> Router:
        own = [f"--model={self.model}", "--device=cpu", *SMALL, "--link=grpc", "--worker-grace-s=60", "--kube-timeout-s=5"]
        own += ["--workers=kubernetes:test/experts", f"--kube-api={self.kubernetes.url}", f"--lease-s={LEASE_S}"]
        process = self._spawn(name, "router_service", [*own, "--max-workers=6", "--rebalance-s=0", *flags])
        process.wait_ready(START_S)
        return Router(process.address)

    def _spawn(self, name: str, module: str, flags: list[str]) -> Process:
        process = Process(name, module, flags, {**os.environ, "OMP_NUM_THREADS": "1"})
        self.processes[name] = process
        process.spawn()
        return process

    def end(self, name: str) -> None:
        """As Kubernetes does: it terminates, then it is gone."""
        self.processes[name].signal(signal.SIGTERM)
        assert self.processes[name].wait(60)
        self.processes.pop(name).end(0.0)
        self.kubernetes.delete(name)

    def kill(self, name: str) -> Process:
        """SIGKILL; the API server hears nothing of it."""
        process = self.processes[name]
        process.signal(signal.SIGKILL)
        process.wait(60)
        process.end(0.0)
        return process

    @contextmanager
    def stub(self, name: str) -> Iterator[expert_pb2_grpc.ExpertServiceStub]:
        with rpc.channel(self.processes[name].address) as channel:
            yield expert_pb2_grpc.ExpertServiceStub(channel)

    def held(self, name: str) -> set[tuple[int, int]]:
        """(layer, expert) of what a worker names."""
        with self.stub(name) as stub:
            layers = stub.Describe(expert_pb2.ExpertServiceDescribeRequest(), timeout=60).layers
        return {(one.layer, expert) for one in layers for expert in one.experts}

    def place(self, name: str, layers: Mapping[int, Sequence[int]], epoch: int) -> None:
        """What a planner of that epoch would say."""
        experts = [expert_pb2.LayerExperts(layer=layer, experts=held) for layer, held in layers.items()]
        with self.stub(name) as stub:
            stub.Place(expert_pb2.PlaceRequest(epoch=epoch, planner="test", experts=experts), timeout=60)

    def moved(self, name: str) -> tuple[int, int]:
        """Experts that a worker loaded and unloaded since it began."""
        with self.stub(name) as stub:
            stats = stub.GetStats(expert_pb2.ExpertServiceGetStatsRequest(), timeout=60)
        return stats.experts_loaded, stats.experts_unloaded

    def leader(self) -> str:
        """Identity of the router that plans."""
        return str(self.kubernetes.leases.get("experts-planner", {}).get("spec", {}).get("holderIdentity", ""))


class Load:
    """Streams one after the other, two at a time, until `finish`; each must be the whole expected answer."""

    def __init__(self, router: Router, prompt: Sequence[int], expected: list[int]) -> None:
        self.router, self.prompt, self.expected = router, prompt, expected
        self.streams: list[Background] = []
        self._stop = threading.Event()
        self._threads = [threading.Thread(target=self._run, daemon=True) for _ in range(2)]
        for thread in self._threads:
            thread.start()

    def _run(self) -> None:
        while not self._stop.is_set():
            stream = Background(self.router, self.prompt, len(self.expected), timeout=120)
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
