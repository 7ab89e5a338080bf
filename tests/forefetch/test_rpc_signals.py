"""Signals and drains, with real processes."""

from __future__ import annotations

import contextlib
import json
import logging
import signal
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import grpc
import grpc.aio
import pytest
import rpc_calls
from rpc_servers import Stub, serving
from waiting import until

from forefetch import errors, rpc
from forefetch.v1 import router_pb2 as pb


@contextlib.contextmanager
def process(kind: str, *flags: str) -> Iterator[tuple[subprocess.Popen[str], dict[str, str]]]:
    child = subprocess.Popen(
        [sys.executable, "-W", "error", rpc_calls.__file__, kind, *flags],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        assert child.stdout
        yield child, json.loads(child.stdout.readline() or "{}")
    finally:
        child.kill()
        child.communicate()


@contextlib.contextmanager
def call_in_flight(address: str, text: str) -> Iterator[Any]:
    """A future of what a Generate call ends in, once its first token is here."""
    with contextlib.closing(Stub(address)) as stub, ThreadPoolExecutor(1) as pool:
        stream = stub.router.Generate(pb.GenerateRequest(text=text), timeout=100)
        next(stream)
        yield pool.submit(lambda: [str(message.WhichOneof("event")) for message in stream])
        stream.cancel()


def refuses(address: str) -> bool:
    """Whether new calls are turned away."""
    with contextlib.closing(Stub(address)) as late:
        try:
            late.ids("hello")
        except grpc.RpcError as error:
            return error.code() is grpc.StatusCode.UNAVAILABLE
        return False


@pytest.mark.parametrize(("kind", "number"), [("sync", signal.SIGTERM), ("aio", signal.SIGINT)])
def test_a_signal_drains(kind: str, number: signal.Signals) -> None:
    with process(kind, "--drain-s=60") as (child, ready):
        with call_in_flight(ready["address"], "sleep 1") as running:
            child.send_signal(number)
            until(lambda: refuses(ready["address"]))
            assert running.result(60) == ["finish"]
        assert child.wait(60) == 0
        assert child.communicate()[1] == ""


def test_what_outlasts_the_drain_ends_as_unavailable(kind: str) -> None:
    with process(kind, "--drain-s=0.2") as (child, ready), call_in_flight(ready["address"], "sleep 60") as running:
        child.terminate()
        with pytest.raises(grpc.RpcError) as caught:
            running.result(60)
        assert isinstance(rpc.error_of(caught.value), errors.Unavailable)
        assert child.wait(60) in (0, 1)


def test_a_second_signal_ends_the_drain(kind: str) -> None:
    with process(kind, "--drain-s=120") as (child, ready), call_in_flight(ready["address"], "sleep 120"):
        child.terminate()
        until(lambda: refuses(ready["address"]))  # else the two would be one
        child.terminate()
        assert child.wait(60) == 0


def test_a_stuck_thread_does_not_keep_the_process() -> None:
    with process("sync-impatient", "--drain-s=0") as (child, ready), call_in_flight(ready["address"], "stuck 120"):
        child.terminate()
        assert child.wait(60) == 1
        assert "did not end in time" in child.communicate()[1]


def test_health_watchers_do_not_hold_a_drain(kind: str) -> None:
    from grpc_health.v1 import health_pb2, health_pb2_grpc

    with process(kind, "--drain-s=120") as (child, ready), grpc.insecure_channel(ready["address"]) as channel:
        states = health_pb2_grpc.HealthStub(channel).Watch(health_pb2.HealthCheckRequest(), timeout=60)
        assert next(states).status == health_pb2.HealthCheckResponse.SERVING
        child.terminate()
        assert next(states).status == health_pb2.HealthCheckResponse.NOT_SERVING
        assert child.wait(60) == 0


def test_a_signal_that_lands_on_another_thread_is_seen(kind: str) -> None:
    """The kernel picks any thread that does not block the signal, one of gRPC's for instance."""
    with process(f"{kind}-masked") as (child, _):
        child.terminate()
        assert child.wait(60) == 0


def test_a_wrong_setting_exits_with_2() -> None:
    with serving("aio") as server, process("aio", f"--listen={server.address}") as (child, ready):
        assert ready == {}
        assert child.wait(60) == 2
        assert child.communicate()[1].strip().splitlines()[-1].startswith("test: error: --listen: cannot serve on 127.0.0.1")


def test_logs_are_one_line_per_record(capsys: pytest.CaptureFixture[str]) -> None:
    handlers, level = logging.root.handlers[:], logging.root.level
    try:
        rpc.setup_logging("info")
        try:
            raise ValueError("a\nb")
        except ValueError:
            logging.exception("oh\nno")
    finally:
        logging.root.handlers[:] = handlers
        logging.root.setLevel(level)
    (line,) = capsys.readouterr().err.splitlines()
    assert "oh | no" in line
    assert "ValueError: a | b" in line
