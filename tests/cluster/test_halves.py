"""Steps in two halves over shm and grpc, against real processes: equal tokens, and a worker lost with halves under way."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator

import pytest
from cluster_calls import SMALL, Background, Router, Start, caught
from reference_model import CASES, Oracle
from waiting import stop

from forefetch import settings, shm
from forefetch.cluster import Cluster
from forefetch.process import Process

CASE = "qwen3"
PROMPT = CASES[CASE].prompt
LONG = 160
FLAGS = (*SMALL, "--worker-grace-s=60", "--halves-from=2", "--hints=off")
LINKS = ("grpc",) if shm.unsupported() else ("grpc", "shm")


@pytest.fixture(scope="module")
def cluster(start: Start) -> Cluster:
    return start(CASE, link="grpc", router=FLAGS)


@pytest.fixture(scope="module")
def routers(cluster: Cluster) -> Iterator[list[Router]]:
    """One for each link, at the same workers."""
    workers = ",".join(cluster.processes[name].address for name in cluster.worker_names)
    more = []
    try:
        for link in LINKS[1:]:
            flags = [f"--model={cluster.config.model}", "--device=cpu", f"--link={link}", f"--workers={workers}", *FLAGS]
            more.append(Process(link, "router_service", flags, settings.child_environment()))
            more[-1].spawn()
        for process in more:
            process.wait_ready(240.0)
        clients = [Router(address) for address in (cluster.address, *(process.address for process in more))]
        yield clients
        for client in clients:
            client.close()
    finally:
        for process in more:
            process.end(0.0)


def test_answers_are_the_oracles(routers: list[Router], oracle: Callable[[str], Oracle]) -> None:
    expected = oracle(CASE).greedy(PROMPT, 24)
    for router, link in zip(routers, LINKS, strict=True):
        assert [worker.link for worker in router.stats().workers] == [link] * 2
        assert router.generate(PROMPT, 24).tokens == expected  # one row: not divided
        single = sum(worker.calls for worker in router.stats().workers)
        streams = [Background(router, PROMPT, 24) for _ in range(3)]
        assert [stream.done().tokens for stream in streams] == [expected] * 3
        assert sum(worker.calls for worker in router.stats().workers) > 2 * single, "more calls than undivided steps have"


def test_a_worker_lost_with_both_halves_under_way_costs_no_token(
    routers: list[Router], cluster: Cluster, oracle: Callable[[str], Oracle]
) -> None:
    lost = cluster.processes["worker-1"]
    running = caught(  # every router's next layer waits for it, with its first half or both sent
        lambda: [Background(router, PROMPT, LONG) for router in routers for _ in range(2)],
        8,
        strike=lambda: stop(lost),
        undo=lambda: lost.signal(signal.SIGCONT),
    )
    cluster.kill("worker-1")
    cluster.restart("worker-1")
    expected = oracle(CASE).greedy(PROMPT, LONG)
    assert [(stream.done().error, stream.tokens) for stream in running] == [(None, expected)] * len(running)
    assert all(stream.finish.usage.replayed_steps >= 1 for stream in running)
