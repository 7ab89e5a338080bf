"""Processes that die, stop or leave, on either side of a link."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest
from waiting import stop, until
from worker_calls import WIRED, Model

from expert_worker import client
from forefetch import rpc, shm
from forefetch.errors import LinkDown, Unavailable
from forefetch.hints import ExpertHint
from forefetch.process import Process
from forefetch.v1 import expert_pb2, expert_pb2_grpc

# How soon a death must be noticed. A few milliseconds on an idle machine; tests run on busy ones. Unnoticed it takes minutes.
NOTICED_S = 40.0


def collect_late(link: client.Link, timeout_s: float) -> tuple[float, str]:
    """(seconds until LinkDown, its text)."""
    began = time.monotonic()
    with pytest.raises(LinkDown) as caught:
        link.collect(timeout_s)
    return time.monotonic() - began, str(caught.value)


@pytest.fixture(scope="module")
def mortal(start_worker: Callable[..., Process]) -> Process:
    return start_worker("--drain-s=120")


def revive(process: Process) -> None:
    process.end(0.0)
    process.spawn()
    process.wait_ready(240.0)


@pytest.mark.parametrize("kind", WIRED)
def test_a_worker_killed_during_a_call(kind: str, model: Model, mortal: Process) -> None:
    with closing(model.connect(mortal.address, kind)) as link:
        old = link.info.instance_id
        stop(mortal)  # so that the call is under way when it dies
        link.submit(model.call())
        threading.Timer(0.3, mortal.signal, (signal.SIGKILL,)).start()
        took, reason = collect_late(link, 200.0)
        assert took < 0.3 + NOTICED_S
        assert "/" not in reason
        with pytest.raises(Unavailable):
            model.connect(mortal.address, kind)
        link.hint(ExpertHint(1, 0, 0, 0, np.array([1], np.int32), np.ones(1, np.float32), 0))
        assert link.hints_dropped == 1, "a dead worker's hints are dropped without an error"
        link.submit(model.call())
        took, _ = collect_late(link, 200.0)  # it stays down, at once
        assert took < NOTICED_S
    revive(mortal)
    with closing(model.connect(mortal.address, kind)) as link:
        assert link.info.instance_id != old
        link.submit(model.call())
        link.collect(60.0)


@pytest.mark.parametrize("kind", WIRED)
def test_a_worker_that_hangs_is_given_up_in_time(kind: str, model: Model, mortal: Process) -> None:
    with closing(model.connect(mortal.address, kind)) as link:
        stop(mortal)
        try:
            link.submit(model.call())
            took, reason = collect_late(link, 0.4)
        finally:
            mortal.signal(signal.SIGCONT)
        assert 0.4 <= took < 0.4 + NOTICED_S
        assert reason == "no answer within 0.4 s"
        link.submit(model.call())
        assert collect_late(link, 60.0)[1] == reason  # a late answer must not be taken for the next one
    with closing(model.connect(mortal.address, kind)) as link:
        link.submit(model.call())
        link.collect(60.0)


ROUTER = """
import sys, torch
from pathlib import Path
sys.path.insert(0, {here!r})
from worker_calls import Model
model = Model(Path({folder!r}))
link = model.connect({address!r}, {kind!r})
print("connected", flush=True)
while True:
    link.submit(model.call())
    link.collect(60.0)
"""


@pytest.mark.parametrize("kind", WIRED)
def test_a_router_killed_leaves_nothing_behind(kind: str, model: Model, mortal: Process) -> None:
    def routers() -> int:
        with rpc.channel(mortal.address) as channel:
            stub = expert_pb2_grpc.ExpertServiceStub(channel)
            return stub.GetStats(expert_pb2.ExpertServiceGetStatsRequest(), timeout=60.0).routers

    code = ROUTER.format(here=os.path.dirname(__file__), folder=str(model.folder), address=mortal.address, kind=kind)
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) as router:
        try:
            assert router.stdout
            assert router.stdout.readline() == "connected\n"
            until(lambda: routers() == 1)  # those of tests before this one may just be leaving
            time.sleep(0.2)
        finally:
            router.kill()
    until(lambda: routers() == 0)
    assert mortal.running
    with closing(model.connect(mortal.address, kind)) as link:
        link.submit(model.call())
        link.collect(60.0)
        if kind == "shm":
            maps = Path(f"/proc/{mortal.pid}/maps")
            until(lambda: maps.read_text().count(shm.PREFIX) == 1)  # the dead router's segment is not mapped any more


@pytest.mark.parametrize("kind", WIRED)
def test_closing_a_link_ends_a_collect_under_way(kind: str, model: Model, mortal: Process) -> None:
    link = model.connect(mortal.address, kind)
    stop(mortal)
    try:
        link.submit(model.call())
        threading.Timer(0.2, link.close).start()
        took, _ = collect_late(link, 200.0)
        assert took < 0.2 + NOTICED_S
    finally:
        mortal.signal(signal.SIGCONT)


def test_a_worker_asked_to_leave_does_not_wait_for_idle_routers(model: Model, mortal: Process) -> None:
    links = [model.connect(mortal.address, kind) for kind in ("auto", "grpc")]
    mortal.signal(signal.SIGTERM)
    assert mortal.wait(60.0), "its drain time is 120 s"
    for link in links:
        with closing(link):
            link.submit(model.call())
            collect_late(link, 60.0)
    revive(mortal)


def test_a_starting_worker_removes_stale_segments(mortal: Process) -> None:
    if shm.unsupported():
        pytest.skip(shm.unsupported())
    code = "from forefetch.shm import Segment\nprint(Segment.create(10, 10).name, flush=True)\ninput()"
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, stdin=subprocess.PIPE, text=True) as router:
        assert router.stdout
        stale = router.stdout.readline().strip()
        assert (shm.FOLDER / stale).exists()
        router.kill()
    revive(mortal)
    assert not (shm.FOLDER / stale).exists()
