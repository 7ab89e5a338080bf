"""Prefixes from real KV services into fake pages, through everything that the engine uses; and from services that misbehave."""

from __future__ import annotations

import hashlib
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import grpc
import pytest
import xxhash

from forefetch import rpc
from forefetch.errors import Unavailable
from forefetch.process import Process
from forefetch.settings import child_environment
from forefetch.v1 import kv_pb2 as pb
from forefetch.v1 import kv_pb2_grpc as pb_grpc
from kv_service.client import Geometry
from router_service import lane
from router_service.admission import Admitted, SamplingParams
from router_service.cost import FetchCost
from router_service.handover import Handover
from router_service.kv import KvSide
from router_service.naming import Naming
from router_service.pages import PagePool
from router_service.prefix import Prefix
from router_service.replicas import Replicas
from router_service.scheduler import Request, Scheduler
from router_service.sessions import Sessions

PAGE, BLOCK = 4, 100_000


def until(condition: Callable[[], Any], timeout_s: float = 10.0) -> None:
    limit = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < limit
        time.sleep(0.005)


def content(tokens: tuple[int, ...]) -> bytes:
    return hashlib.shake_128(repr(tokens).encode()).digest(BLOCK)


@dataclass
class Rig:
    """A router without a model: a page's bytes are a function of all tokens up to its end."""

    addresses: list[str]
    digest: str
    pages: int = 200
    timeout_s: float = 5.0
    memory: dict[int, bytes] = field(default_factory=dict)
    count: int = 0
    writing: threading.Event = field(default_factory=threading.Event)

    def __post_init__(self) -> None:
        self.scheduler = Scheduler(PagePool(self.pages), page_size=PAGE, max_batch=8, max_step_tokens=64, max_waiting=8)
        self.replicas = Replicas(self.addresses)
        naming = Naming(self.digest, Geometry(1, 1, 8), "rope", "float32", "", PAGE)
        handover = Handover(self.replicas, block_bytes=BLOCK, budget_bytes=100 * BLOCK, read_block=self.memory.__getitem__)
        prefix = Prefix(self.replicas, FetchCost(BLOCK, PAGE, self.timeout_s), self.write)
        self.writing.set()
        self.kv = KvSide(naming, self.replicas, handover, prefix, Sessions(self.replicas, 0.1), None, self.scheduler.pool)  # type: ignore[arg-type]
        until(lambda: all(replica.up for replica in self.replicas.all if replica.address not in self.away))

    away: tuple[str, ...] = ()

    def write(self, page: int, data: bytes) -> None:
        if len(data) != BLOCK:
            raise ValueError("another size")
        self.writing.wait(10)
        self.memory[page] = data

    def admit(self, tokens: list[int], tenant: str = "") -> Request:
        self.count += 1
        admitted = Admitted(tuple(tokens), 8, False, SamplingParams(), (), frozenset(), f"r{self.count}")
        request = Request(self.count, f"r{self.count}", tuple(tokens), admitted, arrival=0.0, tenant=tenant)
        self.scheduler.submit(request)
        assert self.scheduler.admit(0.0) == [request]
        self.kv.admitted(request, None)
        return request

    def settle(self) -> bool:
        """False, for conditions."""
        self.kv.settle()
        return False

    def loaded(self, request: Request) -> int:
        """Tokens that came from the store, after checking that their pages hold what they must."""
        until(lambda: self.settle() or not request.loading)
        for block in range(-(-request.cached // PAGE)):
            assert self.memory[request.pages[block]] == content(request.prompt[: (block + 1) * PAGE])
        return request.cached

    def compute(self, request: Request) -> None:
        """The prompt's remaining tokens in one step."""
        before = request.computed // PAGE
        for block in range(before, len(request.tokens) // PAGE):
            self.memory[request.pages[block]] = content(request.prompt[: (block + 1) * PAGE])
        request.computed = len(request.tokens)
        self.kv.sealed(request, before, None)

    def end(self, request: Request) -> None:
        self.scheduler.remove(request, 0.0)
        self.kv.ended(request)

    def fill(self, tokens: list[int], tenant: str = "") -> None:
        """Computes a prompt and waits until all services that are there hold its blocks."""
        request = self.admit(tokens, tenant)
        self.loaded(request)
        self.compute(request)
        until(lambda: all(s.blocks_waiting == 0 for s in self.kv.status().replicas if s.address not in self.away))
        self.end(request)
        until(lambda: self.settle() or not self.scheduler.pool._pins)

    def close(self) -> None:
        self.writing.set()
        self.kv.close(0.3)


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lane, "HEARTBEAT_S", 0.1)
    monkeypatch.setattr(lane, "BACKOFF_S", (0.02, 0.1))


@pytest.fixture(scope="module")
def services() -> Iterator[list[Process]]:
    flags = ["--budget-mb=64", "--max-block-mb=8"]
    processes = [Process(f"kv-{i}", "kv_service", flags, child_environment(PYTHONWARNINGS="error")) for i in range(3)]
    for process in processes:
        process.spawn()
    for process in processes:
        process.wait_ready(60)
    yield processes
    for process in processes:
        process.end(5)


@pytest.fixture
def make() -> Iterator[Callable[..., Rig]]:
    rigs: list[Rig] = []

    def build(addresses: list[str], digest: str = "", **how: Any) -> Rig:
        rigs.append(Rig(addresses, digest or os.urandom(8).hex(), **how))
        return rigs[-1]

    yield build
    for rig in rigs:
        rig.close()


def tokens(count: int, seed: int = 0) -> list[int]:
    return [(7 * i + seed) % 1000 for i in range(count)]


# Real services


@pytest.mark.parametrize("count", [1, PAGE - 1, PAGE, PAGE + 1, 2 * PAGE - 1, 2 * PAGE, 9 * PAGE, 9 * PAGE + 1])
def test_all_full_pages_are_loaded_and_the_last_token_is_computed(
    count: int, services: list[Process], make: Callable[..., Rig]
) -> None:
    rig = make([services[0].address])
    rig.fill(tokens(count))
    again = rig.admit(tokens(count))
    assert rig.loaded(again) == min(count // PAGE * PAGE, count - 1)
    assert rig.scheduler.plan().tokens == count - again.cached  # type: ignore[union-attr]
    assert rig.kv.status().blocks_loaded == count // PAGE
    assert rig.kv.status().bytes_loaded == count // PAGE * BLOCK
    rig.end(again)
    until(lambda: rig.settle() or rig.scheduler.pool.used == 0)


def test_another_router_of_the_same_model_gets_them_and_another_model_or_tenant_does_not(
    services: list[Process], make: Callable[..., Rig]
) -> None:
    first = make([services[0].address])
    first.fill(tokens(20), tenant="a")
    second, other = make([services[0].address], first.digest), make([services[0].address])
    assert second.loaded(second.admit(tokens(20), tenant="a")) == 19
    assert second.loaded(second.admit(tokens(20), tenant="b")) == 0
    assert other.loaded(other.admit(tokens(20), tenant="a")) == 0
    assert other.kv.status().prefix_misses["absent"] == 1


def test_a_longer_prompt_gets_the_common_part_and_hands_over_only_the_rest(
    services: list[Process], make: Callable[..., Rig]
) -> None:
    rig = make([services[0].address])
    rig.fill(tokens(12))
    sent = rig.kv.status().blocks_sent
    longer = rig.admit([*tokens(12), 5, 5, 5, 5, 5])
    assert rig.loaded(longer) == 12
    rig.compute(longer)
    until(lambda: rig.kv.status().blocks_sent == sent + 1)
    assert rig.kv.status().blocks_dropped == 0
    final = rig.admit([*tokens(12), 5, 5, 5, 5, 5])
    assert rig.loaded(final) == 16


def test_loaded_blocks_go_to_a_service_that_lost_them(services: list[Process], make: Callable[..., Rig]) -> None:
    rig = make([services[2].address])
    rig.fill(tokens(12))
    live = rig.admit(tokens(12))
    assert rig.loaded(live) == 11
    rig.compute(live)
    services[2].signal(signal.SIGKILL)
    services[2].end(5)
    until(lambda: not rig.kv.status().up)
    services[2].spawn()
    services[2].wait_ready(30)
    until(lambda: rig.kv.status().replicas[0].reconnects == 1 and rig.kv.status().blocks_waiting == 0)
    assert rig.loaded(rig.admit(tokens(12))) == 11


def test_a_cancelled_load_leaves_its_pages_alone_until_it_has_stopped(
    services: list[Process], make: Callable[..., Rig]
) -> None:
    rig = make([services[0].address], pages=8)
    rig.fill(tokens(16))
    rig.writing.clear()
    request = rig.admit(tokens(16))
    pages = set(request.pages)
    rig.end(request)
    rig.settle()
    held = 4  # the blocks that may still be written; the page for the answer is free at once
    assert rig.scheduler.pool.used == held
    taken = rig.scheduler.pool.allocate(3)
    assert taken is not None
    assert len(pages & set(taken)) <= len(pages) - held
    rig.writing.set()
    until(lambda: rig.settle() or rig.scheduler.pool.used == 3)
    assert request.computed == 0


def test_several_services_share_and_one_away_costs_its_share_only(services: list[Process], make: Callable[..., Rig]) -> None:
    addresses = [process.address for process in services[:2]]
    rig = make(addresses)
    prompts = [tokens(70 * PAGE + 1, seed) for seed in range(100, 108)]
    for prompt in prompts:
        rig.fill(prompt)
    sent = [service.blocks_sent for service in rig.kv.status().replicas]
    assert sum(sent) == 8 * 70
    assert min(sent) > 0
    for prompt in prompts:
        request = rig.admit(prompt)
        assert rig.loaded(request) == 70 * PAGE
        rig.end(request)
    services[1].signal(signal.SIGKILL)
    services[1].end(5)
    until(lambda: not rig.replicas.all[1].up)
    cached = []
    for prompt in prompts:
        keys = rig.kv.naming.extend([], "", prompt, 70)
        request = rig.admit(prompt)
        cached.append(rig.loaded(request))
        whose = [replica.address for replica, run in rig.replicas.runs(keys) for _ in run]
        lost = whose.index(addresses[1]) if addresses[1] in whose else 70
        assert cached[-1] == lost * PAGE
        rig.end(request)
    assert any(cached), cached
    services[1].spawn()
    services[1].wait_ready(30)


def test_sessions_are_spread_over_services_and_one_away_costs_its_own_only(
    services: list[Process], make: Callable[..., Rig]
) -> None:
    rig = make([process.address for process in services[:2]])
    sessions, prefix = rig.kv.sessions, os.urandom(4).hex()
    names = [f"{prefix}-{i}" for i in range(8)]
    holders = {name: rig.replicas.of_session(name).address for name in names}
    assert set(holders.values()) == {process.address for process in services[:2]}
    epochs = {name: sessions.claim(name, 5.0).epoch for name in names}
    services[1].signal(signal.SIGKILL)
    services[1].end(5)
    for name in names:
        if holders[name] == services[0].address:
            assert sessions.claim(name, 5.0).epoch == epochs[name] + 1
        else:
            with pytest.raises(Unavailable):
                sessions.claim(name, 1.0)
    services[1].spawn()
    services[1].wait_ready(30)


# A service that misbehaves


class Bad(pb_grpc.KvServiceServicer):
    """Says that it holds everything, then does as `how` says."""

    def __init__(self) -> None:
        self.how = ""
        self.release = threading.Event()
        self.gets = self.look_ups = 0

    @rpc.sync_handler
    def Describe(self, request: Any, context: Any) -> pb.KvServiceDescribeResponse:
        return pb.KvServiceDescribeResponse(instance_id="one")

    @rpc.sync_handler
    def LookUp(self, request: Any, context: Any) -> pb.LookUpResponse:
        self.look_ups += 1
        if self.how == "no look-up":
            raise Unavailable("not now")
        return pb.LookUpResponse(held=len(request.digests))

    @rpc.sync_handler
    def Put(self, request: Any, context: Any) -> pb.PutResponse:
        return pb.PutResponse(stored=sum(part.last for message in request for part in message.parts))

    @rpc.sync_handler
    def Get(self, request: Any, context: Any) -> Iterator[pb.GetResponse]:
        self.gets += 1
        for index, _ in enumerate(request.keys):
            data = content(tuple(tokens((index + 1) * PAGE)))
            checksum = xxhash.xxh3_128_digest(data)
            if index == 2:
                if self.how == "slow":
                    self.release.wait(5)
                if self.how == "ends":
                    return
                if self.how == "breaks":
                    raise Unavailable("gone")
                if self.how == "flips":
                    data = bytes([data[0] ^ 1]) + data[1:]
                if self.how == "short":
                    data = data[:-1]
                if self.how == "another size":
                    data, checksum = data[:-1], xxhash.xxh3_128_digest(data[:-1])
                if self.how == "half":
                    yield pb.GetResponse(parts=[pb.BlockPart(index=index, data=data[:10])])
                    return
            yield pb.GetResponse(parts=[pb.BlockPart(index=index, data=data, last=True, checksum=checksum)])


@pytest.fixture
def bad() -> Iterator[tuple[Bad, str]]:
    servicer, server = Bad(), grpc.server(ThreadPoolExecutor(8))
    pb_grpc.add_KvServiceServicer_to_server(servicer, server)
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    yield servicer, f"127.0.0.1:{port}"
    servicer.release.set()
    server.stop(None).wait()


@pytest.mark.parametrize(
    ("how", "blocks", "reason"),
    [
        ("", 5, ""),
        ("no look-up", 0, "unavailable"),
        ("slow", 0, "late"),
        ("ends", 2, "broken"),
        ("breaks", 2, "broken"),
        ("flips", 2, "broken"),
        ("short", 2, "broken"),
        ("half", 2, "broken"),
        ("another size", 2, "mismatch"),
    ],
)
def test_what_goes_wrong_is_a_miss(how: str, blocks: int, reason: str, bad: tuple[Bad, str], make: Callable[..., Rig]) -> None:
    servicer, address = bad
    servicer.how = how
    rig = make([address], timeout_s=0.5 if how == "slow" else 5.0)
    request = rig.admit(tokens(21))
    assert rig.loaded(request) == (blocks if how != "slow" else request.cached // PAGE) * PAGE
    assert request.cached < 21
    assert dict(rig.kv.status().prefix_misses) == ({reason: 1} if reason else {})


def test_a_service_that_is_away_is_not_waited_for(make: Callable[..., Rig], bad: tuple[Bad, str]) -> None:
    rig = make(["127.0.0.1:9"], away=("127.0.0.1:9",))
    started = time.monotonic()
    assert rig.loaded(rig.admit(tokens(21))) == 0
    assert time.monotonic() - started < 1.0
    assert dict(rig.kv.status().prefix_misses) == {"unavailable": 1}


def test_where_computing_is_faster_nothing_is_asked(make: Callable[..., Rig], bad: tuple[Bad, str]) -> None:
    servicer, address = bad
    rig = make([address])
    assert rig.kv.prefix is not None
    rig.kv.prefix.cost.prefill.add(1e9, 1.0)
    rig.kv.prefix.cost.load.add(1.0, 1.0)
    request = rig.admit(tokens(21))
    assert not request.loading
    assert (servicer.look_ups, rig.kv.status().prefix_skipped) == (0, 1)
