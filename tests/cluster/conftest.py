"""Real clusters for tests: processes on loopback, one thread each."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from cluster_calls import SMALL, Start
from forks import ForkServer
from waiting import PATIENCE_S

from forefetch.cluster import MALLOC, Cluster, ClusterConfig, Extra
from forefetch.process import Process

START_S = 240.0  # in a new environment kernels are compiled by the first, for whom all others wait
# What services load only where they need it.
LATER = ["router_service.compiled", "router_service.discovery", "grpc_health.v1.health", "grpc_reflection.v1alpha.reflection"]


@pytest.fixture(autouse=True, scope="session")
def _one_thread() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OMP_NUM_THREADS", "1")
        yield


@pytest.fixture(scope="session")
def fork_server() -> Iterator[ForkServer]:
    environment = {**MALLOC, "GRPC_VERBOSITY": "ERROR", "OMP_WAIT_POLICY": "PASSIVE"}
    # Every prompt's blocks are loaded if there are any: else what is faster is, by the clock of a busy machine.
    loading = {"router_service.cost.PROBE": 1, "router_service.cost.LEAST_S": PATIENCE_S}
    server = ForkServer(["router_service", "expert_worker", "kv_service"], LATER, loading, **environment)
    yield server
    server.close()


@pytest.fixture(autouse=True, scope="module")
def _forked(request: pytest.FixtureRequest, fork_server: ForkServer) -> Iterator[None]:
    """Services of a module's clusters are forks, which saves seconds of imports each. Not where the module is about commands,
    nor with a GPU, which a fork cannot have."""
    with pytest.MonkeyPatch.context() as patch:
        if not request.module.__name__.endswith("test_commands") and not Path("/dev/nvidiactl").exists():
            patch.setattr(Process, "launch", staticmethod(fork_server.launch))
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
            # The machine's other tests would starve a service that gives way to them.
            ours = {"kv_nice": 0, "port": 0, "device": "cpu", "start_s": START_S}
            config = ClusterConfig(model=str(checkpoint(case)), workers=workers, link=link, kv=kv, **ours)  # type: ignore[arg-type]
            cluster = Cluster.start(config, extra=Extra(router, worker, kv_flags))
            stack.callback(cluster.stop, 0.0)
            return cluster

        yield run
