"""The failure contract, against real processes that are really killed."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import grpc
import pytest
from cluster_calls import SMALL, Background, Router, Start, assert_fit_for_a_client, details, until
from google.rpc import error_details_pb2
from reference_model import CASES, Oracle

from forefetch import rpc
from forefetch.cluster import Cluster, ClusterConfig, Extra
from forefetch.errors import Unavailable
from forefetch.v1 import kv_pb2, kv_pb2_grpc

CASE = "qwen3"
PROMPT = CASES[CASE].prompt
LONG = 220
MAX_BATCH, MAX_WAITING = 4, 2
FLAGS = (*SMALL, f"--max-batch={MAX_BATCH}", f"--max-waiting={MAX_WAITING}")


@pytest.fixture(scope="module")
def cluster(start: Start) -> Cluster:
    return start(CASE, link="shm", kv=True, router=(*FLAGS, "--worker-grace-s=60"))


@pytest.fixture
def router(cluster: Cluster) -> Iterator[Router]:
    """A connection; afterwards the router must be the process it was, be idle, and answer."""
    pid = cluster.processes["router"].pid
    client = Router(cluster.address)
    yield client
    until(lambda: client.stats().running == 0)
    assert client.stats().waiting == 0
    assert len(client.generate(PROMPT, 3).tokens) == 3
    until(lambda: client.stats().pages_used == 0)  # a hand-over may hold sealed pages for a moment longer
    client.close()
    assert cluster.processes["router"].running
    assert cluster.processes["router"].pid == pid


def idle(router: Router) -> bool:
    stats = router.stats()
    return stats.running == 0 and stats.waiting == 0 and stats.pages_used == 0


def fill(router: Router) -> list[Background]:
    """MAX_BATCH long streams, all of them running. One after the other: a burst would find the short queue full."""
    streams = []
    for count in range(1, MAX_BATCH + 1):
        streams.append(Background(router, PROMPT, LONG))
        until(lambda wanted=count: router.stats().running == wanted)  # type: ignore[misc]
    return streams


def test_a_cancelled_request_frees_its_pages(router: Router) -> None:
    before = router.stats().requests_failed["CANCELLED"]
    stream = Background(router, PROMPT, LONG)
    stream.wait_for(3)
    assert router.stats().pages_used > 0
    stream.call.cancel()
    stream.done()
    assert stream.error is not None
    assert stream.error.code() == grpc.StatusCode.CANCELLED
    until(lambda: idle(router), 1.0)
    assert len(stream.tokens) < LONG
    assert router.stats().requests_failed["CANCELLED"] == before + 1


def test_a_waiting_request_can_be_cancelled(router: Router) -> None:
    running = fill(router)
    waiting = Background(router, PROMPT, LONG)
    until(lambda: router.stats().waiting == 1)
    waiting.call.cancel()
    until(lambda: router.stats().waiting == 0, 1.0)
    for stream in running:
        assert len(stream.done().tokens) == LONG


def test_a_deadline_ends_the_request_and_frees_its_pages(router: Router, cluster: Cluster) -> None:
    stopped = cluster.processes["worker-0"]
    stream = Background(router, PROMPT, LONG, timeout=1.0)
    stream.wait_for(2)
    stopped.signal(signal.SIGSTOP)  # the answer cannot be complete before the deadline now
    try:
        stream.done()
    finally:
        stopped.signal(signal.SIGCONT)
    assert stream.error is not None
    assert stream.error.code() == grpc.StatusCode.DEADLINE_EXCEEDED
    until(lambda: idle(router), 2.0)


def test_overload_is_refused_with_a_time_to_come_back(router: Router, oracle: Callable[[str], Oracle]) -> None:
    streams = fill(router)
    streams += [Background(router, PROMPT, LONG) for _ in range(MAX_WAITING)]
    until(lambda: router.stats().waiting == MAX_WAITING)
    with pytest.raises(grpc.RpcError) as caught:
        router.generate(PROMPT, LONG)
    assert caught.value.code() == grpc.StatusCode.RESOURCE_EXHAUSTED
    assert_fit_for_a_client(caught.value)
    retry = next(detail for detail in details(caught.value) if isinstance(detail, error_details_pb2.RetryInfo))
    assert 0 < retry.retry_delay.ToNanoseconds() < 60e9
    expected = oracle(CASE).greedy(PROMPT, LONG)
    assert [stream.done().tokens for stream in streams] == [expected] * len(streams), "running streams are not disturbed"


@pytest.mark.parametrize("name", ["worker-0", "worker-1"])
def test_a_worker_killed_and_restarted_costs_no_token(
    name: str, router: Router, cluster: Cluster, oracle: Callable[[str], Oracle]
) -> None:
    streams = [Background(router, PROMPT, LONG) for _ in range(3)]
    streams[0].wait_for(10)
    cluster.kill(name)
    time.sleep(0.3)
    frozen = [len(stream.tokens) for stream in streams]
    assert all(count < LONG for count in frozen), "the kill came too late to test anything"
    cluster.restart(name)
    expected = oracle(CASE).greedy(PROMPT, LONG)
    assert [(stream.done().error, stream.tokens) for stream in streams] == [(None, expected)] * 3
    assert all(stream.finish.usage.replayed_steps >= 1 for stream in streams)
    stats = router.stats()
    assert stats.replayed_steps >= 1
    assert all(worker.up for worker in stats.workers)
    assert sum(worker.reconnects for worker in stats.workers) >= 1


def test_a_worker_killed_while_idle_is_taken_back(router: Router, cluster: Cluster, oracle: Callable[[str], Oracle]) -> None:
    cluster.kill("worker-1")
    cluster.restart("worker-1")
    assert router.generate(PROMPT, 20).tokens == oracle(CASE).greedy(PROMPT, 20)


def kv_blocks(cluster: Cluster) -> int:
    with rpc.channel(cluster.processes["kv"].address) as channel:
        stub = kv_pb2_grpc.KvServiceStub(channel)
        return int(stub.GetStats(kv_pb2.KvServiceGetStatsRequest(), timeout=10).blocks)


def test_the_kv_service_killed_and_back_gets_live_blocks_again(
    router: Router, cluster: Cluster, oracle: Callable[[str], Oracle]
) -> None:
    prompt = (PROMPT * 5)[:100]  # 6 sealed pages of 16 at once, more while it generates
    before = router.stats().kv
    assert before.up
    stream = Background(router, prompt, 150)
    stream.wait_for(5)
    until(lambda: kv_blocks(cluster) >= 6)
    cluster.processes["worker-0"].signal(signal.SIGSTOP)  # hold the stream, so that its blocks stay live
    try:
        cluster.kill("kv")
        until(lambda: not router.stats().kv.up)
        cluster.restart("kv")
        until(lambda: router.stats().kv.up)
        until(lambda: kv_blocks(cluster) >= 6)
    finally:
        cluster.processes["worker-0"].signal(signal.SIGCONT)
    assert stream.done().tokens == oracle(CASE).greedy(prompt, 150)
    assert router.stats().kv.reconnects == before.reconnects + 1


def test_generation_goes_on_without_the_kv_service(router: Router, cluster: Cluster, oracle: Callable[[str], Oracle]) -> None:
    cluster.kill("kv")
    try:
        assert router.generate(PROMPT, 64).tokens == oracle(CASE).greedy(PROMPT, 64)
        until(lambda: not router.stats().kv.up)
    finally:
        cluster.restart("kv")
    until(lambda: router.stats().kv.up)


def test_a_worker_that_stays_away_ends_requests_with_the_reason(start: Start, oracle: Callable[[str], Oracle]) -> None:
    cluster = start(CASE, link="grpc", router=(*FLAGS, "--worker-grace-s=1"))
    address = cluster.processes["worker-1"].address
    router = Router(cluster.address)
    streams = [Background(router, PROMPT, LONG) for _ in range(2)]
    streams[0].wait_for(5)
    cluster.kill("worker-1")
    for stream in streams:
        stream.done(20.0)  # the bound: 1 s of grace, plus detection
        assert stream.error is not None
        assert stream.error.code() == grpc.StatusCode.UNAVAILABLE
        assert "worker" in stream.error.details()
        assert_fit_for_a_client(stream.error)
        assert stream.tokens == oracle(CASE).greedy(PROMPT, LONG)[: len(stream.tokens)], "what came is a prefix of the answer"
    with pytest.raises(grpc.RpcError) as caught:
        router.generate(PROMPT, 5, timeout=5)
    assert caught.value.code() == grpc.StatusCode.UNAVAILABLE, "new requests are refused at once"
    assert_fit_for_a_client(caught.value)
    assert not all(worker.up for worker in router.stats().workers)
    assert cluster.processes["router"].running
    cluster.restart("worker-1")
    assert cluster.processes["worker-1"].address == address
    until(lambda: all(worker.up for worker in router.stats().workers))
    assert router.generate(PROMPT, 20).tokens == oracle(CASE).greedy(PROMPT, 20)
    router.close()


def test_a_worker_of_another_model_is_refused(start: Start, checkpoint: Callable[[str], Path]) -> None:
    other = start("olmoe-clip", workers=1, router=(*SMALL,))
    address = other.processes["worker-0"].address
    flags = (*SMALL, f"--workers={address}", "--start-timeout-s=5")
    config = ClusterConfig(model=str(checkpoint(CASE)), workers=1, kv=False, port=0, device="cpu", start_s=60.0)
    with pytest.raises(Unavailable, match=r"(?i)router ended with status [12](.|\n)*(model|digest|checkpoint)"):
        Cluster.start(config, extra=Extra(router=flags))
    client = Router(other.address)
    assert len(client.generate(CASES["olmoe-clip"].prompt, 5).tokens) == 5, "the other model's cluster is not disturbed"
    client.close()


def test_a_stopped_router_finishes_what_runs_and_refuses_the_rest(start: Start, oracle: Callable[[str], Oracle]) -> None:
    cluster = start(CASE, link="shm", router=FLAGS)
    router = Router(cluster.address)
    streams = fill(router)
    for stream in streams:
        stream.wait_for(3)
    cluster.processes["router"].signal(signal.SIGTERM)
    refused = None
    until(lambda: not cluster.processes["router"].running or _refusal(router) is not None)
    refused = _refusal(router)
    assert refused is not None
    assert refused.code() == grpc.StatusCode.UNAVAILABLE
    expected = oracle(CASE).greedy(PROMPT, LONG)
    assert [stream.done().tokens for stream in streams] == [expected] * MAX_BATCH
    assert cluster.processes["router"].wait(15.0)
    assert cluster.processes["router"].ending().startswith("ended with status 0")
    router.close()


def _refusal(router: Router) -> grpc.RpcError | None:
    try:
        router.generate(PROMPT, 1, timeout=5)
    except grpc.RpcError as error:
        return error
    return None
