"""Workers as real processes, and calls to send them."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from worker_calls import Model

from forefetch import settings
from forefetch.process import Process


@pytest.fixture(scope="session")
def model(checkpoint: Callable[[str], Path]) -> Model:
    return Model(checkpoint("qwen3"))


@pytest.fixture(scope="session")
def start_worker(model: Model) -> Iterator[Callable[..., Process]]:
    """start_worker(*flags) -> a running worker process, ended with the session."""
    with ExitStack() as stack:

        def start(*flags: str) -> Process:
            environment = settings.child_environment(OMP_NUM_THREADS="1")
            process = Process("worker", "expert_worker", [f"--model={model.folder}", *flags], environment)
            stack.callback(process.end, 20.0)
            process.spawn()
            process.wait_ready(240.0)
            return process

        yield start


@pytest.fixture(scope="session")
def worker(start_worker: Callable[..., Process]) -> Process:
    """A worker for the tests that leave it as it is."""
    return start_worker("--metrics-listen=127.0.0.1:0", "--max-rows=256")
