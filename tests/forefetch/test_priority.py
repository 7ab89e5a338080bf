"""What the kernel says of threads that give way."""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable

import pytest

from forefetch import priority

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="schedulers are Linux's")


def in_a_thread(do: Callable[[], None]) -> tuple[int, int]:
    """Policy and niceness of a thread that is made by one that did it."""
    found: list[tuple[int, int]] = []

    def child() -> None:
        found.append((os.sched_getscheduler(0), os.getpriority(os.PRIO_PROCESS, threading.get_native_id())))

    def parent() -> None:
        do()
        thread = threading.Thread(target=child)
        thread.start()
        thread.join()

    thread = threading.Thread(target=parent)
    thread.start()
    thread.join()
    return found[0]


@pytest.mark.parametrize("call", [priority._SET_ATTR, None], ids=["slices", "no slices"])
def test_threads_give_way_with_those_they_make_and_nobody_else(monkeypatch: pytest.MonkeyPatch, call: int | None) -> None:
    monkeypatch.setattr(priority, "_SET_ATTR", call)
    before = os.sched_getscheduler(0), os.getpriority(os.PRIO_PROCESS, 0)
    assert in_a_thread(priority.give_way) == (os.SCHED_BATCH, before[1])
    assert in_a_thread(lambda: priority.give_way(19)) == (os.SCHED_BATCH, 19)
    assert (os.sched_getscheduler(0), os.getpriority(os.PRIO_PROCESS, 0)) == before


def test_a_kernel_that_refuses_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise PermissionError

    monkeypatch.setattr(priority, "_SET_ATTR", None)
    monkeypatch.setattr(os, "sched_setscheduler", refuse)
    assert in_a_thread(lambda: priority.give_way(5))[0] == os.sched_getscheduler(0)
