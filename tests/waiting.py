"""Waiting in tests: for a condition, for a process to stand still. And a port that stays as it is meanwhile."""

from __future__ import annotations

import signal
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from forefetch.process import Process

PATIENCE_S = 60.0
"""Only what is broken takes so long: where tests run, processes can be ten times slower, and get no core for seconds."""


def until(condition: Callable[[], Any], timeout_s: float = PATIENCE_S, every: float = 0.01) -> None:
    """Returns when the condition holds; fails after `timeout_s` seconds."""
    end = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < end, "did not happen in time"
        time.sleep(every)


def stop(process: Process) -> None:
    """SIGSTOP; returns when every thread has stopped. One that waits for a core would still answer a call."""
    process.signal(signal.SIGSTOP)
    until(lambda: all(_state(thread) in "Tt" for thread in Path(f"/proc/{process.pid}/task").iterdir()), every=0.002)


def _state(thread: Path) -> str:
    """The kernel's letter for it; T also for one that has just ended."""
    try:
        return (thread / "stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return "T"


@contextmanager
def kept_port() -> Iterator[int]:
    """A port of the loopback that refuses connections and is given to nobody else; servers, which set SO_REUSEADDR, may still
    listen on it."""
    with socket.socket() as keeper:
        keeper.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        keeper.bind(("127.0.0.1", 0))
        yield int(keeper.getsockname()[1])
