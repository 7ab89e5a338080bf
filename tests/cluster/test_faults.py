"""The failure contract, against real processes that are really killed."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import grpc
import pytest
from cluster_calls import SMALL, TRIES, Background, Router, Start, assert_fit_for_a_client, caught, details
from google.rpc import error_details_pb2
from reference_model import CASES, Oracle
from waiting import stop, until

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
    until(lambda: client.stats().running == client.stats().waiting == 0)
    assert len(client.generate(PROMPT, 3).tokens) == 3
    until(lambda: client.stats().pages_used == 0)  # a hand-over may hold sealed pages for a moment longer
    client.close()
    assert cluster.processes["router"].running
    assert cluster.processes["router"].pid == pid


def idle(router: Router) -> bool:
    stats = router.stats()
    return stats.running == 0 and stats.waiting == 0 and stats.pages_used == 0


def fill(router: Router) -> list[Background]:
    """MAX_BATCH long streams, all of them running."""
    for _ in range(TRIES):
        streams = [Background(router, PROMPT, LONG) for _ in range(MAX_BATCH)]
        until(lambda streams=streams: router.stats().running == MAX_BATCH or ended(streams))  # type: ignore[misc]
        if not ended(streams):
            return streams
    raise AssertionError("they never run side by side")


def ended(streams: list[Background]) -> bool:
    """Whether any of them has."""
    return any(not stream.thread.is_alive() for stream in streams)


def test_a_cancelled_request_frees_its_pages(router: Router) -> None:
    for _ in range(TRIES):  # one may have ended before it is cancelled
        before = router.stats()
        stream = Background(router, PROMPT, LONG)
        stream.wait_for(3)
        held = router.stats().pages_used
        stream.call.cancel()
        stream.done()
        until(lambda: idle(router))
        after = router.stats()
        if after.requests_ok == before.requests_ok:
            break
    assert held > 0
    assert stream.error is not None
    assert stream.error.code() == grpc.StatusCode.CANCELLED
    assert after.requests_failed["CANCELLED"] == before.requests_failed["CANCELLED"] + 1
    assert len(stream.tokens) <= after.completion_tokens - before.completion_tokens < LONG, "it was not computed to its end"


def test_a_waiting_request_can_be_cancelled(router: Router) -> None:
    for _ in range(TRIES):
        running = fill(router)
        waiting = Background(router, PROMPT, LONG)
        until(lambda running=running: router.stats().waiting == 1 or ended(running))  # type: ignore[misc]
        waiting.call.cancel()
        waiting.done()
        until(lambda: router.stats().waiting == 0)
        for stream in running:
            assert len(stream.done().tokens) == LONG
        if not waiting.tokens:
            break
    assert waiting.error is not None
    assert (waiting.error.code(), waiting.tokens) == (grpc.StatusCode.CANCELLED, [])


def test_a_deadline_ends_the_request_and_frees_its_pages(router: Router, cluster: Cluster) -> None:
    stopped = cluster.processes["worker-0"]
    stop(stopped)  # so the answer cannot be complete before the deadline
    try:
        stream = Background(router, PROMPT, LONG, timeout=1.0).done()
    finally:
        stopped.signal(signal.SIGCONT)
    assert stream.error is not None
    assert stream.error.code() == grpc.StatusCode.DEADLINE_EXCEEDED
    until(lambda: idle(router))


def test_overload_is_refused_with_a_time_to_come_back(router: Router, oracle: Callable[[str], Oracle]) -> None:
    expected = oracle(CASE).greedy(PROMPT, LONG)
    for _ in range(TRIES):  # where one ends meanwhile there is room, and nobody is refused
        streams = fill(router) + [Background(router, PROMPT, LONG) for _ in range(MAX_WAITING)]
        until(lambda streams=streams: router.stats().waiting == MAX_WAITING or ended(streams))  # type: ignore[misc]
        refused = _refusal(router, LONG)
        assert [stream.done().tokens for stream in streams] == [expected] * len(streams), "running streams are not disturbed"
        if refused is not None:
            break
    assert refused is not None
    assert refused.code() == grpc.StatusCode.RESOURCE_EXHAUSTED
    assert_fit_for_a_client(refused)
    retry = next(detail for detail in details(refused) if isinstance(detail, error_details_pb2.RetryInfo))
    assert 0 < retry.retry_delay.ToNanoseconds() < 60e9


@pytest.mark.parametrize("name", ["worker-0", "worker-1"])
def test_a_worker_killed_and_restarted_costs_no_token(
    name: str, router: Router, cluster: Cluster, oracle: Callable[[str], Oracle]
) -> None:
    streams = caught(
        lambda: [Background(router, PROMPT, LONG) for _ in range(3)],
        10,
        strike=lambda: cluster.kill(name),
        undo=lambda: cluster.restart(name),
    )
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
        return int(stub.GetStats(kv_pb2.KvServiceGetStatsRequest(), timeout=60).blocks)


def test_the_kv_service_killed_and_back_gets_live_blocks_again(
    router: Router, cluster: Cluster, oracle: Callable[[str], Oracle]
) -> None:
    prompt = (PROMPT * 5)[:100]  # 6 sealed pages of 16 at once, more while it generates
    before = router.stats().kv
    assert before.up
    held = cluster.processes["worker-0"]
    (stream,) = caught(  # so that its blocks stay live
        lambda: [Background(router, prompt, 150)], 5, strike=lambda: stop(held), undo=lambda: held.signal(signal.SIGCONT)
    )
    try:
        until(lambda: kv_blocks(cluster) >= 6)
        cluster.kill("kv")
        until(lambda: not router.stats().kv.up)
        cluster.restart("kv")
        until(lambda: router.stats().kv.up)
        until(lambda: kv_blocks(cluster) >= 6)
    finally:
        held.signal(signal.SIGCONT)
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
    streams = caught(
        lambda: [Background(router, PROMPT, LONG) for _ in range(2)],
        5,
        strike=lambda: cluster.kill("worker-1"),
        undo=lambda: cluster.restart("worker-1"),
    )
    for stream in streams:
        stream.done()
        assert stream.error is not None
        assert stream.error.code() == grpc.StatusCode.UNAVAILABLE
        assert "worker" in stream.error.details()
        assert_fit_for_a_client(stream.error)
        assert stream.tokens == oracle(CASE).greedy(PROMPT, LONG)[: len(stream.tokens)], "what came is a prefix of the answer"
    refused = _refusal(router, 5)
    assert refused is not None
    assert refused.code() == grpc.StatusCode.UNAVAILABLE, "new requests are refused at once"
    assert_fit_for_a_client(refused)
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
    config = ClusterConfig(model=str(checkpoint(CASE)), workers=1, kv=False, port=0, device="cpu", start_s=240.0)
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
    until(lambda: not cluster.processes["router"].running or _refusal(router, 1) is not None)
    refused = _refusal(router, 1)
    assert refused is not None
    assert refused.code() == grpc.StatusCode.UNAVAILABLE
    expected = oracle(CASE).greedy(PROMPT, LONG)
    assert [stream.done().tokens for stream in streams] == [expected] * MAX_BATCH
    assert cluster.processes["router"].wait(60.0)
    assert cluster.processes["router"].ending().startswith("ended with status 0")
    router.close()


def _refusal(router: Router, n: int) -> grpc.RpcError | None:
    try:
        router.generate(PROMPT, n)
    except grpc.RpcError as error:
        return error
    return None
