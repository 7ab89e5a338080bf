"""The hand-over to a KV service that is slow, refuses, or fails."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import grpc
import pytest
from kv_rigs import Engine
from waiting import PATIENCE_S, until

from forefetch import rpc
from forefetch.errors import BadRequest, Unavailable
from forefetch.telemetry.context import new_root
from forefetch.v1 import kv_pb2 as pb
from forefetch.v1 import kv_pb2_grpc as pb_grpc
from router_service import lane as module


class Slow(pb_grpc.KvServiceServicer):
    """Describes itself at once; Put waits, or fails with `error`."""

    def __init__(self) -> None:
        self.release = threading.Event()
        self.error: Exception | None = None
        self.puts = self.describes = 0
        self.metadata: list[Any] = []

    @rpc.sync_handler
    def Describe(self, request: Any, context: Any) -> pb.KvServiceDescribeResponse:
        self.describes += 1
        return pb.KvServiceDescribeResponse(instance_id="one")

    @rpc.sync_handler
    def LookUp(self, request: Any, context: Any) -> pb.LookUpResponse:
        return pb.LookUpResponse(held=0)

    @rpc.sync_handler
    def Put(self, request: Any, context: Any) -> pb.PutResponse:
        self.puts += 1
        self.metadata = list(context.invocation_metadata())
        if self.error:
            raise self.error
        self.release.wait(PATIENCE_S)
        return pb.PutResponse(stored=sum(part.last for message in request for part in message.parts))


@pytest.fixture
def slow() -> Iterator[tuple[Slow, str]]:
    servicer, server = Slow(), grpc.server(ThreadPoolExecutor(8))
    pb_grpc.add_KvServiceServicer_to_server(servicer, server)
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    yield servicer, f"127.0.0.1:{port}"
    servicer.release.set()
    server.stop(None).wait()


def test_a_blocked_send_ends_at_its_deadline_and_attempts_are_bounded(
    slow: tuple[Slow, str], start: Callable[..., Engine], caplog: pytest.LogCaptureFixture
) -> None:
    servicer, address = slow
    engine = start(address)
    until(lambda: engine.status().up)
    engine.lane._transfer_s, sends = 0.1, list[int]()
    put = engine.lane._put_bytes
    engine.lane._put_bytes = lambda *what: sends.append(1) or put(*what)  # type: ignore[func-returns-value, method-assign]
    engine.admit(1, 3)
    engine.seal(1, 3)
    until(engine.all_pins_off)
    until(lambda: engine.status().blocks_dropped == 3)
    assert len(sends) == module.ATTEMPTS
    engine.lane._transfer_s = PATIENCE_S
    assert "3 blocks for the KV service are given up" in caplog.text
    servicer.release.set()
    engine.admit(2, 2)
    engine.seal(2, 2)
    until(lambda: engine.status().blocks_sent == 2)


def test_the_engine_never_waits(slow: tuple[Slow, str], start: Callable[..., Engine]) -> None:
    _, address = slow
    engine = start(address, budget_blocks=5, pages=600)
    engine.admit(1, 500)
    started = time.perf_counter()
    engine.seal(1, 500)
    engine.end(1)
    engine.step()
    assert time.perf_counter() - started < 30.0, "the service answers in a minute"


def test_a_refusal_is_final(slow: tuple[Slow, str], start: Callable[..., Engine]) -> None:
    servicer, address = slow
    servicer.error = BadRequest("size", "too large")
    engine = start(address)
    engine.admit(1, 1)
    engine.seal(1)
    until(lambda: engine.status().blocks_dropped == 1)
    assert servicer.puts == 1


def test_no_busy_loop_while_the_service_fails(slow: tuple[Slow, str], start: Callable[..., Engine]) -> None:
    servicer, address = slow
    servicer.error = Unavailable("not now")
    engine = start(address)
    engine.admit(1, 1)
    engine.seal(1)
    until(lambda: servicer.puts >= module.ATTEMPTS)
    time.sleep(0.3)
    assert servicer.puts == module.ATTEMPTS
    assert servicer.describes < 20


def test_close_does_not_wait_for_a_blocked_service(slow: tuple[Slow, str], start: Callable[..., Engine]) -> None:
    _, address = slow
    engine = start(address)
    engine.admit(1, 1)
    engine.seal(1)
    until(lambda: slow[0].puts == 1)
    started = time.perf_counter()
    engine.handover.close(timeout_s=0.2)
    assert time.perf_counter() - started < 30.0
    until(lambda: not engine.lane._sender.is_alive())


def test_a_sampled_request_s_trace_goes_along(slow: tuple[Slow, str], start: Callable[..., Engine]) -> None:
    servicer, address = slow
    servicer.release.set()
    engine = start(address)
    engine.admit(1, 2)
    context = new_root(sampled=True)
    engine.seal(1, trace=new_root(sampled=False))
    until(lambda: engine.status().blocks_sent == 1)
    assert "traceparent" not in dict(servicer.metadata)
    engine.seal(1, trace=context)
    until(lambda: engine.status().blocks_sent == 2)
    assert dict(servicer.metadata)["traceparent"] == context.traceparent


def test_memory_is_bounded(slow: tuple[Slow, str], start: Callable[..., Engine]) -> None:
    _, address = slow
    engine = start(address, budget_blocks=7, pages=200)
    for request in range(20):
        engine.admit(request, 5)
        engine.seal(request, 5)
        engine.step()
        engine.end(request)
    outbox = engine.lane._outbox
    until(engine.all_pins_off)
    assert outbox.used <= 7
    assert engine.status().blocks_waiting <= 7
    assert engine.status().blocks_dropped >= 93
    assert not outbox._chains
