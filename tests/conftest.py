"""Shared fixtures: checkpoints and oracles, each built once per session."""

from __future__ import annotations

import importlib.util
import os
import signal
import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from hypothesis import HealthCheck, settings

sys.path.insert(0, str(Path(__file__).parent))
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    # A shell's background job, as which tests may be run, ignores Ctrl-C, and so would the processes whose Ctrl-C is tested.
    signal.signal(signal.SIGINT, signal.default_int_handler)
os.environ["no_proxy"] = os.environ["NO_PROXY"] = "127.0.0.1,localhost"  # nobody else is talked to
if not Path("/dev/nvidiactl").exists():
    os.environ.setdefault("TRITON_INTERPRET", "1")  # kernels run in the interpreter; Triton looks when it is first imported
    if importlib.util.find_spec("triton"):
        from triton_interpreter import complete_interpreter

        complete_interpreter()

# Examples have no deadline, which would be the machine's and not the code's; and they are the same ones every time: a new one
# may be looked for with --hypothesis-profile=wander, and is no reason why a change should not land.
settings.register_profile("steady", deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("wander", deadline=None)
settings.load_profile("steady")

if TYPE_CHECKING:
    from reference_model import Oracle


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--crash-rounds", type=int, default=4, help="rounds of each of tests/cluster/test_crashes.py (default: 4)")


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """checkpoint("qwen3") -> folder of that case of reference_model.CASES."""
    folder = tmp_path_factory.mktemp("checkpoints")

    @cache
    def build(name: str) -> Path:
        import reference_model

        return reference_model.build(reference_model.CASES[name], folder)

    return build


@pytest.fixture(scope="session")
def oracle(checkpoint: Callable[[str], Path]) -> Callable[[str], Oracle]:
    """oracle("qwen3") -> transformers on that case's checkpoint."""

    @cache
    def load(name: str) -> Oracle:
        import reference_model

        return reference_model.Oracle(checkpoint(name))

    return load
