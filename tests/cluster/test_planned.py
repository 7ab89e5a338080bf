"""Workers of a plain list that a router plans for: `forefetch up --planned`. Two holders of each expert, a worker is killed."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from cluster_calls import SMALL, TRIES, Background, Router
from reference_model import CASES, Oracle
from waiting import until

from forefetch.cluster import Cluster, ClusterConfig, Extra

CASE = "qwen3"
PROMPT = CASES[CASE].prompt
LONG = 200
EXPERTS = 3 * 8


@pytest.fixture
def cluster(checkpoint: Callable[[str], Path]) -> Iterator[Cluster]:
    config = ClusterConfig(model=str(checkpoint(CASE)), workers=3, planned=True, link="shm", kv=False, port=0, start_s=240.0)
    extra = Extra(router=(*SMALL, "--expert-copies=2", "--worker-grace-s=60"), worker=("--max-experts=24",))
    with Cluster.start(config, extra=extra) as cluster:
        yield cluster


def held(router: Router) -> list[int]:
    return [worker.experts for worker in router.stats().workers if worker.up]


def test_a_worker_whose_experts_others_hold_is_killed_and_streams_go_on(
    cluster: Cluster, oracle: Callable[[str], Oracle]
) -> None:
    router = Router(cluster.address)
    until(lambda: sum(held(router)) == 2 * EXPERTS)
    assert all(0 < count < EXPERTS for count in held(router)), "each has a part"
    expected = oracle(CASE).greedy(PROMPT, LONG)
    for _ in range(TRIES):  # the stream may have ended, or nearly, before the kill
        stream = Background(router, PROMPT, LONG)
        stream.wait_for(10)
        before = router.stats().replayed_steps
        cluster.kill("worker-1")
        seen = len(stream.tokens)
        until(lambda: not router.describe().workers[1].up)
        assert stream.done().tokens == expected
        assert router.stats().replayed_steps - before <= 2
        assert not router.describe().workers[1].up, "it is still away, and tokens came"
        cluster.restart("worker-1")
        until(lambda: sum(held(router)) >= 2 * EXPERTS and len(held(router)) == 3)
        until(lambda: min(held(router)) > 0)
        if seen < LONG - 20:
            break
    assert seen < LONG - 20
    assert router.generate(PROMPT, LONG).tokens == expected
    router.close()
