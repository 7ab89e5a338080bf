"""The hand-over with fake pages: against a real KV service, killed and restarted, and against a slow one."""

from __future__ import annotations

import hashlib
import os
import signal
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import grpc
import pytest

from forefetch import rpc
from forefetch.errors import BadRequest, Unavailable
from forefetch.process import Process
from forefetch.settings import child_environment
from forefetch.telemetry.context import new_root
from forefetch.v1 import kv_pb2 as pb
from forefetch.v1 import kv_pb2_grpc as pb_grpc
from kv_service.client import Geometry, Key, KvClient, chain, next_key, root_key
from router_service import lane as module
from router_service.handover import Handover
from router_service.pages import PagePool
from router_service.replicas import Replicas

BLOCK = 1000


def until(condition: Callable[[], Any], timeout_s: float = 10.0) -> None:
    limit = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < limit
        time.sleep(0.005)


class Engine:
    """What the engine does with pages and blocks, without a model: a page's bytes are a function of the tokens in it."""

    def __init__(self, address: str, *, budget_blocks: int = 100, pages: int = 64, transfer_s: float = 5.0) -> None:
        # A root of its own, so that tests can share a service.
        self.root = root_key(os.urandom(8), "model", Geometry(2, 2, 8), "rope", "float32", "", 2)
        self.pool = PagePool(pages)
        self.memory: dict[int, bytes] = {}
        self.requests: dict[int, tuple[int, ...]] = {}
        self.sealed: Counter[int] = Counter()
        self.named: defaultdict[int, list[Any]] = defaultdict(list)
        self.gate = threading.Event()
        self.gate.set()
        self.replicas = Replicas([address])
        self.handover = Handover(
            self.replicas,
            block_bytes=BLOCK,
            budget_bytes=budget_blocks * BLOCK,
            read_block=self.read,
            transfer_s=transfer_s,
        )
        (self.lane,) = self.handover.lanes

    def status(self) -> Any:
        (status,) = self.handover.status()
        return status

    def read(self, page: int) -> bytes:
        self.gate.wait(10)
        return self.memory[page]

    def tokens(self, request: int, block: int) -> list[int]:
        return [request, block]

    def keys(self, request: int) -> list[Key]:
        return chain(self.root, [self.tokens(request, block) for block in range(self.sealed[request])])

    def blocks(self, request: int) -> list[bytes]:
        return [content(self.tokens(request, block)) for block in range(self.sealed[request])]

    def admit(self, request: int, pages: int) -> None:
        allocated = self.pool.allocate(pages)
        assert allocated is not None
        self.requests[request] = allocated

    def seal(self, request: int, count: int = 1, **how: Any) -> list[bool]:
        accepted = []
        for _ in range(count):
            block = self.sealed[request]
            page = self.requests[request][block]
            self.memory[page] = content(self.tokens(request, block))
            self.sealed[request] += 1
            self.pool.pin(page)
            self.named[request].append(next_key(self.root, (self.named[request] or [None])[-1], self.tokens(request, block)))
            key = self.named[request][-1]
            accepted.append(self.handover.offer(request, block, key, page, **how))
            if not accepted[-1]:
                self.pool.unpin(page)
        return accepted

    def end(self, request: int) -> None:
        self.pool.release(self.requests.pop(request))
        self.handover.forget(request)

    def step(self) -> None:
        for page in self.handover.unpinned():
            self.pool.unpin(page)

    def all_pins_off(self) -> bool:
        self.step()
        return not self.pool._pins


def content(tokens: list[int]) -> bytes:
    return (hashlib.sha256(repr(tokens).encode()).digest() * 32)[:BLOCK]


@pytest.fixture(scope="module")
def service() -> Iterator[Process]:
    process = Process("kv", "kv_service", ["--budget-mb=16", "--max-block-mb=8"], child_environment(PYTHONWARNINGS="error"))
    process.spawn()
    process.wait_ready(30)
    yield process
    process.end(5)


@pytest.fixture
def client(service: Process) -> Iterator[KvClient]:
    client = KvClient(service.address)
    yield client
    client.close()


@pytest.fixture
def start() -> Iterator[Callable[..., Engine]]:
    engines: list[Engine] = []

    def build(address: str, **how: Any) -> Engine:
        engines.append(Engine(address, **how))
        return engines[-1]

    yield build
    for engine in engines:
        engine.gate.set()
        engine.handover.close(timeout_s=0.5)
        engine.replicas.close()
        assert not engine.lane._copier.is_alive()
        assert not engine.lane._sender.is_alive()


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "HEARTBEAT_S", 0.1)
    monkeypatch.setattr(module, "BACKOFF_S", (0.02, 0.1))


# A real service


def test_sealed_blocks_arrive_and_pins_come_off(service: Process, client: KvClient, start: Callable[..., Engine]) -> None:
    engine = start(service.address)
    engine.admit(1, 5)
    engine.admit(2, 3)
    assert engine.seal(1, 3) + engine.seal(2, 3) + engine.seal(1, 2) == [True] * 8
    until(lambda: engine.status().blocks_sent == 8)
    assert client.get(engine.keys(1)) == engine.blocks(1)
    assert client.get(engine.keys(2)) == engine.blocks(2)
    until(engine.all_pins_off)
    status = engine.status()
    assert (status.address, status.up, status.blocks_waiting, status.blocks_dropped) == (service.address, True, 0, 0)


def test_blocks_of_an_ended_request_are_still_sent(service: Process, client: KvClient, start: Callable[..., Engine]) -> None:
    engine = start(service.address)
    engine.gate.clear()
    engine.admit(1, 4)
    engine.seal(1, 4)
    keys, blocks = engine.keys(1), engine.blocks(1)
    engine.end(1)
    assert engine.pool.used == 4  # pinned
    engine.gate.set()
    until(lambda: engine.status().blocks_sent == 4)
    until(engine.all_pins_off)
    assert client.get(keys) == blocks


def test_a_common_prefix_is_sent_once(service: Process, client: KvClient, start: Callable[..., Engine]) -> None:
    engine, before = start(service.address), client.stats()
    engine.tokens = lambda request, block: [0, block]  # type: ignore[method-assign]
    for request in (1, 2):
        engine.admit(request, 3)
        engine.seal(request, 3)
        until(lambda request=request: engine.status().blocks_sent == 3 * request)
    after = client.stats()
    assert (after.stored - before.stored, after.hits - before.hits) == (3, 3)


def test_live_blocks_are_handed_over_again_after_a_restart(
    service: Process, client: KvClient, start: Callable[..., Engine]
) -> None:
    engine = start(service.address)
    for request in (1, 2):
        engine.admit(request, 8)
        engine.seal(request, 4)
    until(lambda: engine.status().blocks_sent == 8)
    service.signal(signal.SIGKILL)
    service.end(5)
    until(lambda: not engine.status().up)
    engine.end(2)  # ends while the service is away: gone with it
    engine.seal(1, 2)
    service.spawn()
    service.wait_ready(30)
    until(lambda: engine.status().reconnects == 1)
    until(lambda: client.look_up(engine.keys(1)) == 6)
    assert client.get(engine.keys(1)) == engine.blocks(1)
    assert client.look_up(engine.keys(2)) == 0
    engine.seal(1, 2)
    until(lambda: client.look_up(engine.keys(1)) == 8)
    until(lambda: engine.status().blocks_waiting == 0)
    assert engine.status().blocks_dropped == 0
    until(engine.all_pins_off)


def test_while_the_service_is_away_pages_are_not_held(service: Process, start: Callable[..., Engine]) -> None:
    service.signal(signal.SIGSTOP)  # connections stay open and nobody answers
    try:
        engine = start(service.address, budget_blocks=6, transfer_s=0.3)
        engine.admit(1, 10)
        assert engine.seal(1, 10) == [True] * 6 + [False] * 4
        until(engine.all_pins_off)
        assert engine.status().blocks_waiting == 10
        assert not engine.status().up
        engine.end(1)
        assert (engine.status().blocks_dropped, engine.status().blocks_waiting) == (4, 6)
        assert engine.pool.used == 0
    finally:
        service.signal(signal.SIGCONT)
    until(lambda: engine.status().blocks_sent == 6)


def test_blocks_without_room_follow_in_order(service: Process, client: KvClient, start: Callable[..., Engine]) -> None:
    engine = start(service.address, budget_blocks=2)
    engine.gate.clear()
    engine.admit(1, 10)
    engine.admit(2, 2)
    assert engine.seal(1, 5) == [True, True, False, False, False]
    assert engine.seal(2, 2) == [False, False]
    engine.gate.set()
    until(lambda: engine.status().blocks_sent == 7)
    engine.seal(1, 5)
    until(lambda: engine.status().blocks_sent == 12)
    assert client.get(engine.keys(1)) == engine.blocks(1)
    assert client.get(engine.keys(2)) == engine.blocks(2)
    assert engine.status().blocks_dropped == 0


def test_a_page_that_is_used_again_during_its_copy_is_not_sent(
    service: Process, client: KvClient, start: Callable[..., Engine]
) -> None:
    """Blocks that follow later are copied without a pin; what they hold counts only while their request lives."""
    engine = start(service.address, budget_blocks=1)
    reading, go = threading.Event(), threading.Event()

    def read(page: int) -> bytes:
        if page == second:
            reading.set()
            go.wait(10)
        return engine.memory[page]

    engine.gate.clear()
    engine.admit(1, 2)
    second = engine.requests[1][1]
    assert engine.seal(1, 2) == [True, False]
    keys = engine.keys(1)
    engine.lane._read_block = read
    engine.gate.set()
    assert reading.wait(5)
    engine.end(1)
    engine.memory[second] = b"something else"
    go.set()
    until(lambda: engine.status().blocks_waiting == 0)
    assert (engine.status().blocks_sent, engine.status().blocks_dropped) == (1, 1)
    assert client.get(keys) == [content([1, 0])]


def test_close_sends_what_is_queued(service: Process, client: KvClient, start: Callable[..., Engine]) -> None:
    engine = start(service.address)
    engine.admit(1, 30)
    engine.seal(1, 30)
    engine.handover.close(timeout_s=5.0)
    assert client.get(engine.keys(1)) == engine.blocks(1)
    assert engine.handover.offer(2, 0, chain(engine.root, [[1, 2]])[0], 1) is False


def test_a_page_that_cannot_be_read_is_dropped(service: Process, client: KvClient, start: Callable[..., Engine]) -> None:
    engine = start(service.address)
    engine.admit(1, 2)
    engine.lane._read_block = {}.__getitem__
    engine.seal(1, 2)
    until(lambda: engine.status().blocks_dropped == 2)
    until(engine.all_pins_off)
    assert client.look_up(engine.keys(1)) == 0


# A service that misbehaves


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
        self.release.wait(5)
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
    engine = start(address, transfer_s=0.1)
    engine.admit(1, 3)
    engine.seal(1, 3)
    until(engine.all_pins_off)
    until(lambda: engine.status().blocks_dropped == 3)
    assert servicer.puts == module.ATTEMPTS
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
    assert time.perf_counter() - started < 0.5


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
    time.sleep(0.7)
    assert servicer.puts == module.ATTEMPTS
    assert servicer.describes < 20


def test_close_does_not_wait_for_a_blocked_service(slow: tuple[Slow, str], start: Callable[..., Engine]) -> None:
    _, address = slow
    engine = start(address, transfer_s=30.0)
    engine.admit(1, 1)
    engine.seal(1)
    until(lambda: slow[0].puts == 1)
    started = time.perf_counter()
    engine.handover.close(timeout_s=0.2)
    assert time.perf_counter() - started < 1.0
    assert not engine.lane._sender.is_alive()


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
