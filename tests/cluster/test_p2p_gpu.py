"""Lanes between GPUs: a router and workers on GPUs of their own. Run with `pytest -m multigpu`, or `-m gpu`: on one GPU the
processes take turns of some milliseconds, which changes no token."""

from __future__ import annotations

import signal
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from typing import Any

import pytest
import torch
from cluster_calls import SMALL, Background, Router

from forefetch.cluster import Cluster, ClusterConfig, Extra

pytestmark = [
    pytest.mark.multigpu,
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
GPUS = "0,1" if torch.cuda.device_count() > 1 else "0,0"
# Sizes that the kernels take, which the oracle's models have not; so one GPU's answers are the ones to equal.
MODEL = "synthetic:qwen3-30b-a3b,layers=3,experts=16,hidden_size=128,moe_intermediate_size=64,vocab_size=500"
PROMPT = list(range(3, 40))
LONG = 400 if GPUS == "0,1" else 300  # past two pages of 128 and their seals
FLOAT32 = ("--dtype=float32",)
SEALED = ("--kv-format=e2m0", "--page-size=128", "--kv-memory-mb=64")  # pages are sealed while streams run
FLAGS = (*SMALL, *SEALED, *FLOAT32, "--worker-grace-s=60", "--p2p-halves-from=4", "--batch-buckets=1,2,4", "--max-batch=4")


def cluster_of(**changes: Any) -> Cluster:
    config = ClusterConfig(model=MODEL, allow_synthetic=True, kv=False, port=0, start_s=120.0, **changes)
    return Cluster.start(config, extra=Extra(router=FLAGS, worker=FLOAT32))


WAYS: dict[str, dict[str, Any]] = {
    "one GPU": {"link": "local", "device": "cuda:0"},
    "apart": {"gpus": GPUS, "apart": True},
    "spread": {"gpus": GPUS},
    "slots": {"gpus": GPUS, "spread": True, "slots": "50%", "hints": "plain"},  # on both sides
}


@pytest.fixture(scope="module")
def clusters() -> Iterator[dict[str, Cluster]]:
    """All started at once: compiling kernels takes most of the time."""
    with ExitStack() as stack, ThreadPoolExecutor() as pool:
        starting = {name: pool.submit(cluster_of, **changes) for name, changes in WAYS.items()}
        for started in starting.values():
            started.add_done_callback(lambda done: done.exception() or stack.callback(done.result().stop, 0.0))
        yield {name: started.result() for name, started in starting.items()}


@pytest.fixture(scope="module")
def expected(clusters: dict[str, Cluster]) -> list[int]:
    """Greedy tokens of one GPU."""
    router = Router(clusters["one GPU"].address)
    tokens = router.generate(PROMPT, LONG).tokens
    router.close()
    return tokens


@pytest.fixture(scope="module", params=["apart", "spread", "slots"])
def cluster(clusters: dict[str, Cluster], request: pytest.FixtureRequest) -> Cluster:
    return clusters[request.param]


@pytest.fixture
def router(cluster: Cluster) -> Iterator[Router]:
    """A connection to a router whose steps cross lanes before the test and, after it, again."""
    client = Router(cluster.address)
    client.lanes_carry(PROMPT)
    yield client
    client.lanes_carry(PROMPT)
    client.close()


def test_answers_are_one_gpus(router: Router, expected: list[int]) -> None:
    """One row, and four in two halves."""
    before = router.stats().p2p_breaks
    assert router.generate(PROMPT, 64).tokens == expected[:64]
    streams = [Background(router, PROMPT, 64) for _ in range(4)]
    assert [stream.done().tokens for stream in streams] == [expected[:64]] * 4
    after = router.stats()
    assert after.p2p_breaks == before
    if after.hints.setting == "plain":
        assert after.hints.sent > 0
        assert after.hints.failures == 0
        for names in (("hits", "late"), ("misses",), ("copied_bytes",)):
            assert sum(getattr(layer, name) for layer in after.hints.layers for name in names) > 0, names


def test_a_worker_killed_in_a_step_costs_no_token(router: Router, cluster: Cluster, expected: list[int]) -> None:
    streams = [Background(router, PROMPT, LONG) for _ in range(2)]
    streams[0].wait_for(20)
    cluster.kill("worker-0")
    assert len(streams[0].tokens) < LONG, "the kill came too late to test anything"
    cluster.restart("worker-0")
    assert [(stream.done().error, stream.tokens) for stream in streams] == [(None, expected)] * 2
    assert streams[0].finish.usage.replayed_steps >= 1


def test_a_stalled_worker_ends_the_wait_by_its_bound(router: Router, cluster: Cluster, expected: list[int]) -> None:
    """Its GPU would go on, but nobody launches the next step there."""
    before, stream = router.stats().p2p_breaks, Background(router, PROMPT, LONG)
    stream.wait_for(20)
    cluster.processes["worker-0"].signal(signal.SIGSTOP)
    time.sleep(3.0)
    stalled = len(stream.tokens)
    cluster.processes["worker-0"].signal(signal.SIGCONT)
    assert stream.done().tokens == expected
    assert stalled < LONG
    assert router.stats().p2p_breaks > before
