"""Real clusters for tests: processes on loopback, one thread each."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from cluster_calls import SMALL, Start

from forefetch.cluster import Cluster, ClusterConfig, Extra


@pytest.fixture(autouse=True, scope="session")
def _one_thread() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OMP_NUM_THREADS", "1")
        yield


@pytest.fixture(scope="module")
def start(checkpoint: Callable[[str], Path]) -> Iterator[Start]:
    """start("qwen3", workers=2, link="shm", router=[flags]) -> Cluster; all are stopped when the module's tests are over."""
    with ExitStack() as stack:

        def run(
            case: str,
            *,
            workers: int = 2,
            link: str = "auto",
            kv: bool = False,
            router: tuple[str, ...] = SMALL,
            worker: tuple[str, ...] = (),
            kv_flags: tuple[str, ...] = (),
        ) -> Cluster:
            config = ClusterConfig(
                model=str(checkpoint(case)), workers=workers, link=link, kv=kv, port=0, device="cpu", start_s=90.0
            )
            cluster = Cluster.start(config, extra=Extra(router, worker, kv_flags))
            stack.callback(cluster.stop, 0.0)
            return cluster

        yield run
