"""The hand-over with fake pages to a real KV service, killed and restarted."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from kv_rigs import Engine, block_of
from waiting import stop, until

from forefetch.process import Process
from forefetch.settings import child_environment
from kv_service.client import KvClient, chain
from router_service import lane


@pytest.fixture(scope="module")
def service() -> Iterator[Process]:
    process = Process("kv", "kv_service", ["--budget-mb=16", "--max-block-mb=8"], child_environment(PYTHONWARNINGS="error"))
    process.spawn()
    process.wait_ready(240)
    yield process
    process.end(20)


@pytest.fixture
def client(service: Process) -> Iterator[KvClient]:
    client = KvClient(service.address)
    yield client
    client.close()


@pytest.fixture(params=["grpc", "shm", "lent"])
def start(start: Callable[..., Engine], request: pytest.FixtureRequest) -> Callable[..., Engine]:
    """Over gRPC; through memory shared with the service, as far as it goes, which is four blocks; or out of the pool itself."""

    def shared(address: str, answers: bool = True, **how: Any) -> Engine:
        engine = start(address, shared=4, lend=request.param == "lent", **how)
        if answers:
            until(engine.shares)
        return engine

    def plain(address: str, answers: bool = True, **how: Any) -> Engine:
        return start(address, **how)

    return plain if request.param == "grpc" else shared


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
    assert after.stored - before.stored == 3
    # Asked for before they are sent; in shared memory the service finds by itself what it holds.
    found = after.hits - before.hits + after.duplicates - before.duplicates
    assert (found, after.shared_blocks - before.shared_blocks) == (3, 6 if engine.shares() else 0)


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
    service.wait_ready(240)
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
    stop(service)  # connections stay open and nobody answers
    try:
        engine = start(service.address, answers=False, budget_blocks=6)
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

    def read(page: int, place: object) -> bytes:
        if page == second:
            reading.set()
            go.wait(60)
        return engine.memory[page]

    engine.gate.clear()
    engine.admit(1, 2)
    second = engine.requests[1][1]
    assert engine.seal(1, 2) == [True, False]
    keys = engine.keys(1)
    engine.lane._read_block = read
    engine.gate.set()
    assert reading.wait(60)
    engine.end(1)
    engine.fill(second, bytes(1000))
    go.set()
    until(lambda: engine.status().blocks_waiting == 0)
    assert (engine.status().blocks_sent, engine.status().blocks_dropped) == (1, 1)
    assert client.get(keys) == [block_of([1, 0])]


def test_close_sends_what_is_queued(service: Process, client: KvClient, start: Callable[..., Engine]) -> None:
    engine = start(service.address)
    engine.admit(1, 30)
    engine.seal(1, 30)
    engine.handover.close(timeout_s=60.0)
    assert client.get(engine.keys(1)) == engine.blocks(1)
    assert engine.handover.offer(2, 0, chain(engine.root, [[1, 2]])[0], 1) is False


@pytest.mark.parametrize("start", ["grpc", "shm"], indirect=True)
def test_a_page_that_cannot_be_read_is_dropped(service: Process, client: KvClient, start: Callable[..., Engine]) -> None:
    engine = start(service.address)
    engine.admit(1, 2)
    engine.lane._read_block = lambda page, place: {}[page]
    engine.seal(1, 2)
    until(lambda: engine.status().blocks_dropped == 2)
    until(engine.all_pins_off)
    assert client.look_up(engine.keys(1)) == 0


@pytest.mark.parametrize("start", ["lent"], indirect=True)
def test_a_service_that_stops_over_lent_pages_keeps_neither_them_nor_their_new_bytes(
    service: Process, client: KvClient, start: Callable[..., Engine], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lane, "LEND_S", 0.3)
    engine = start(service.address)
    until(engine.lends)
    broken = client.stats().broken
    engine.admit(1, 3)
    stop(service)
    try:
        assert engine.seal(1, 3) == [True] * 3
        keys, blocks = engine.keys(1), engine.blocks(1)
        pages = engine.requests[1]
        until(engine.all_pins_off)  # the pages are copied, since nobody answers
        engine.end(1)
        for page in pages:  # and belong to others now
            engine.fill(page, bytes(1000))
    finally:
        service.signal(signal.SIGCONT)
    until(lambda: engine.status().blocks_sent == 3)
    assert client.get(keys) == blocks
    assert client.stats().broken - broken in (0, 1)  # the block that was being copied, if the service came to look at the frame
