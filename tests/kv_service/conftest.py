"""KV services in this process."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))
from kv_calls import Kv, running

from kv_service.config import KvConfig


@pytest.fixture
def kv() -> Iterator[Kv]:
    """Budget 8 MiB, blocks of at most 2."""
    with running(KvConfig(budget_mb=8, max_block_mb=2)) as kv:
        yield kv


@pytest.fixture
def start_kv() -> Iterator[Callable[[KvConfig], Kv]]:
    with contextlib.ExitStack() as stack:
        yield lambda config: stack.enter_context(running(config))
