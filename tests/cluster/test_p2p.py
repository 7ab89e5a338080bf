"""Link p2p on CPUs: the lanes' protocol between real processes, in shared memory instead of the memory of GPUs."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from cluster_calls import SMALL, TRIES, Background, Router, Start, caught
from reference_model import CASES, Oracle
from waiting import stop, until

from forefetch import rpc, settings, shm
from forefetch.cluster import Cluster
from forefetch.process import Process
from forefetch.v1 import expert_pb2, expert_pb2_grpc

pytestmark = pytest.mark.skipif(bool(shm.unsupported()), reason=shm.unsupported())

CASE = "qwen3"
PROMPT = CASES[CASE].prompt
LONG = 160
FLAGS = (*SMALL, "--worker-grace-s=60", "--p2p-halves-from=4", "--p2p-patience-s=5", "--batch-buckets=1,2,4", "--max-batch=4")


@pytest.fixture(scope="module")
def cluster(start: Start) -> Cluster:
    """Workers with slots for half of their experts: calls over lanes also wait for copies, and hints travel beside them."""
    return start(CASE, link="p2p", router=(*FLAGS, "--hints=plain"), worker=("--slots=50%",))


@pytest.fixture
def router(cluster: Cluster) -> Iterator[Router]:
    """A connection to a router that uses its lanes before the test and, after it, again."""
    client = Router(cluster.address)
    client.lanes_carry(PROMPT)
    yield client
    client.lanes_carry(PROMPT)
    client.close()


def test_answers_are_the_oracles(router: Router, oracle: Callable[[str], Oracle]) -> None:
    """One row, and four that go in two halves."""
    expected = oracle(CASE).greedy(PROMPT, 24)
    assert router.generate(PROMPT, 24).tokens == expected
    before = router.stats()
    streams = [Background(router, PROMPT, 24) for _ in range(4)]
    assert [stream.done().tokens for stream in streams] == [expected] * 4
    after = router.stats()
    assert after.p2p_steps > before.p2p_steps
    assert after.p2p_breaks == before.p2p_breaks


def test_hints_go_by_grpc_while_steps_cross_lanes_and_what_became_of_them_comes_back(router: Router, cluster: Cluster) -> None:
    """What workers count for themselves is what the router was told, by layer."""
    before, began = router.stats(), asked(cluster)

    def in_time() -> int:
        return sum(layer.hits + layer.late for layer in router.stats().hints.layers)

    for _ in range(TRIES):  # hints race with the calls that they are for
        router.generate(PROMPT, 48)
        if in_time() > sum(layer.hits + layer.late for layer in before.hints.layers):
            break
    after, ended = router.stats(), asked(cluster)
    assert after.p2p_steps - before.p2p_steps >= 40
    assert after.hints.sent - before.hints.sent > 40
    assert sum(worker.hints for worker in ended) > sum(worker.hints for worker in began)
    for name in ("hits", "late", "misses", "resident", "copied_bytes"):
        told, known = (sum(getattr(layer, name) for layer in stats.hints.layers) for stats in (after, before))
        counted = sum(getattr(worker, name) for worker in ended) - sum(getattr(worker, name) for worker in began)
        assert told - known == counted, name
    new = [sum(layer.hits + layer.late for layer in stats.hints.layers) for stats in (before, after)]
    assert new[1] > new[0], "hints were there before their layers' calls"
    assert sum(layer.all.found for layer in after.hints.layers) > sum(layer.all.found for layer in before.hints.layers)


def asked(cluster: Cluster) -> list[Any]:
    """What workers say of themselves."""
    found = []
    for name in cluster.worker_names:
        with rpc.channel(cluster.processes[name].address) as channel:
            stub = expert_pb2_grpc.ExpertServiceStub(channel)
            found.append(stub.GetStats(expert_pb2.ExpertServiceGetStatsRequest(), timeout=60))
    return found


@pytest.mark.parametrize("streams", [1, 4])
def test_a_worker_killed_in_a_step_costs_no_token(
    streams: int, router: Router, cluster: Cluster, oracle: Callable[[str], Oracle]
) -> None:
    running = caught(
        lambda: [Background(router, PROMPT, LONG) for _ in range(streams)],
        8,
        strike=lambda: cluster.kill("worker-1"),
        undo=lambda: cluster.restart("worker-1"),
    )
    cluster.restart("worker-1")
    expected = oracle(CASE).greedy(PROMPT, LONG)
    assert [(stream.done().error, stream.tokens) for stream in running] == [(None, expected)] * streams
    assert running[0].finish.usage.replayed_steps >= 1


def test_two_routers_have_lanes_to_the_same_workers(router: Router, cluster: Cluster, oracle: Callable[[str], Oracle]) -> None:
    """Each its own; a worker that is killed is both's, a router that is takes nothing from the other. The second holds a third
    of the experts itself, which the workers hold too: replicas share rows."""
    workers = ",".join(cluster.processes[name].address for name in cluster.worker_names)
    flags = [f"--model={cluster.config.model}", "--device=cpu", "--link=p2p", f"--workers=local,{workers}", *FLAGS]
    other = Process("other", "router_service", flags, settings.child_environment())
    other.spawn()
    try:
        other.wait_ready(240.0)
        second = Router(other.address)
        streams = [Background(each, PROMPT, LONG) for each in (router, second, router)]
        expected = oracle(CASE).greedy(PROMPT, LONG)
        assert [stream.done().tokens for stream in streams] == [expected] * 3
        assert second.stats().p2p_steps > 0
        streams = caught(
            lambda: [Background(each, PROMPT, LONG) for each in (router, second)],
            8,
            strike=lambda: cluster.kill("worker-1"),
            undo=lambda: cluster.restart("worker-1"),
        )
        cluster.restart("worker-1")
        assert [stream.done().tokens for stream in streams] == [expected] * 2
        for each in (router, second):
            each.lanes_carry(PROMPT)
        doomed, kept = Background(second, PROMPT, LONG), Background(router, PROMPT, LONG)
        doomed.wait_for(8)
        breaks = router.stats().p2p_breaks
        other.signal(signal.SIGKILL)
        assert kept.done().tokens == expected
        assert router.stats().p2p_breaks == breaks
        second.close()
    finally:
        other.end(0.0)


def test_a_stalled_worker_ends_the_wait_by_its_bound(router: Router, cluster: Cluster, oracle: Callable[[str], Oracle]) -> None:
    """Longer than the lanes' patience and shorter than the other link's: the step is computed again over that one."""
    before = router.stats().p2p_breaks
    worker = cluster.processes["worker-0"]
    (stream,) = caught(
        lambda: [Background(router, PROMPT, LONG)], 8, strike=lambda: stop(worker), undo=lambda: worker.signal(signal.SIGCONT)
    )
    try:
        until(lambda: router.stats().p2p_breaks > before)
    finally:
        worker.signal(signal.SIGCONT)
    assert stream.done().tokens == oracle(CASE).greedy(PROMPT, LONG)
