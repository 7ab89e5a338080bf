"""Routers without a model, as far as KV services see them: blocks handed over, prefixes loaded."""

from __future__ import annotations

import hashlib
import os
import threading
from collections import Counter, defaultdict
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from waiting import PATIENCE_S, until

from forefetch.lending import Lent
from kv_service.client import Buffer, Geometry, Key, Pool, chain, next_key, root_key
from router_service.admission import Admitted, SamplingParams
from router_service.cache import Place, no_place
from router_service.cost import FetchCost
from router_service.handover import Handover
from router_service.kv import KvSide
from router_service.naming import Naming
from router_service.pages import PagePool
from router_service.prefix import Prefix
from router_service.replicas import Replicas
from router_service.rows import Rows
from router_service.scheduler import Request, Scheduler
from router_service.sessions import Sessions

SMALL_BLOCK = 1000
PAGE, BLOCK = 4, 100_000


class Engine:
    """What the engine does with pages and blocks, without a model: a page's bytes are a function of the tokens in it."""

    def __init__(
        self,
        address: str,
        *,
        budget_blocks: int = 100,
        pages: int = 64,
        transfer_s: float = PATIENCE_S,
        shared: int = 0,
        lend: bool = False,
    ) -> None:
        """`shared`: blocks of room in memory shared with the service. `lend`: it reads pages where they are."""
        # A root of its own, so that tests can share a service.
        self.root = root_key(os.urandom(8), "model", Geometry(2, 2, 8), "rope", "float32", "", 2)
        self.pool = PagePool(pages)
        self.memory: dict[int, bytes] = {}
        self.requests: dict[int, tuple[int, ...]] = {}
        self.sealed: Counter[int] = Counter()
        self.named: defaultdict[int, list[Any]] = defaultdict(list)
        self.gate = threading.Event()
        self.gate.set()
        self.lent = Lent(pages * SMALL_BLOCK) if lend else None
        self.replicas = Replicas([address])
        self.handover = Handover(
            self.replicas,
            block_bytes=SMALL_BLOCK,
            budget_bytes=budget_blocks * SMALL_BLOCK,
            read_block=self.read,
            transfer_s=transfer_s,
            shared_bytes=shared * SMALL_BLOCK,
            pool=Pool(self.lent.name, 2, pages * SMALL_BLOCK // 2, SMALL_BLOCK // 2, pages) if self.lent else None,
        )
        (self.lane,) = self.handover.lanes
        put = self.lane._put_pages
        self.lane._put_pages = lambda *how: put(*how) if self.gate.wait(PATIENCE_S) else 0  # type: ignore[method-assign]

    def shares(self) -> bool:
        """Whether blocks go through shared memory."""
        return self.lane._client.shares

    def lends(self) -> bool:
        """Whether pages are read where they are."""
        return self.lane._client.lends

    def status(self) -> Any:
        (status,) = self.handover.status()
        return status

    def read(self, page: int, place: Place = no_place) -> Buffer:
        self.gate.wait(PATIENCE_S)
        data = self.memory[page]
        if (into := place(len(data))) is None:
            return data
        into[:] = data
        return into

    def tokens(self, request: int, block: int) -> list[int]:
        return [request, block]

    def keys(self, request: int) -> list[Key]:
        return chain(self.root, [self.tokens(request, block) for block in range(self.sealed[request])])

    def blocks(self, request: int) -> list[bytes]:
        return [block_of(self.tokens(request, block)) for block in range(self.sealed[request])]

    def admit(self, request: int, pages: int) -> None:
        allocated = self.pool.allocate(pages)
        assert allocated is not None
        self.requests[request] = allocated

    def seal(self, request: int, count: int = 1, **how: Any) -> list[bool]:
        accepted = []
        for _ in range(count):
            block = self.sealed[request]
            page = self.requests[request][block]
            self.fill(page, block_of(self.tokens(request, block)))
            self.sealed[request] += 1
            self.pool.pin(page)
            self.named[request].append(next_key(self.root, (self.named[request] or [None])[-1], self.tokens(request, block)))
            key = self.named[request][-1]
            accepted.append(self.handover.offer(request, block, key, page, **how))
            if not accepted[-1]:
                self.pool.unpin(page)
        return accepted

    def fill(self, page: int, data: bytes) -> None:
        """What a page holds from now on."""
        self.memory[page] = data
        if self.lent is not None:
            half, pages = SMALL_BLOCK // 2, len(self.lent.memory) // SMALL_BLOCK
            for part, begin in enumerate((page * half, (pages + page) * half)):
                self.lent.memory[begin : begin + half] = data[part * half : (part + 1) * half]

    def end(self, request: int) -> None:
        self.pool.release(self.requests.pop(request))
        self.handover.forget(request)

    def step(self) -> None:
        for page in self.handover.unpinned():
            self.pool.unpin(page)

    def all_pins_off(self) -> bool:
        self.step()
        return not self.pool._pins


def block_of(tokens: list[int]) -> bytes:
    return (hashlib.sha256(repr(tokens).encode()).digest() * 32)[:SMALL_BLOCK]


def page_of(tokens: tuple[int, ...]) -> bytes:
    return hashlib.shake_128(repr(tokens).encode()).digest(BLOCK)


@dataclass
class FakeLanes:
    """Rows of the cache behind blocks: a row is its token, four bytes. `committed`: positions of a lane, if a test says so; its
    tail begins accordingly, and only what is committed may be read."""

    recent: int
    lanes: dict[int, list[int]] = field(default_factory=dict)
    written: tuple[int, int, list[int]] | None = None
    committed: dict[int, int] = field(default_factory=dict)

    def tail_start(self, computed: int, loaded: int) -> int:
        return max(max(0, computed - self.recent) // PAGE, loaded) * PAGE

    def read_tail(self, pages: Any, lane: int, start: int, end: int) -> torch.Tensor:
        if (committed := self.committed.get(lane)) is not None:
            assert (start, end <= committed) == (self.tail_start(committed, 0), True)
        return torch.tensor(self.lanes[lane][start:end], dtype=torch.int32).view(torch.uint8)

    def write_tail(self, pages: Any, lane: int, start: int, end: int, data: bytes) -> None:
        if len(data) != 4 * (end - start):
            raise ValueError("another size")
        self.written = start, end, torch.frombuffer(bytearray(data), dtype=torch.int32).tolist()


@dataclass
class Rig:
    """A router without a model: a page's bytes are a function of all tokens up to its end."""

    addresses: list[str]
    digest: str
    pages: int = 200
    timeout_s: float = PATIENCE_S
    recent: int = 0
    memory: dict[int, bytes] = field(default_factory=dict)
    count: int = 0
    writing: threading.Event = field(default_factory=threading.Event)

    def __post_init__(self) -> None:
        self.scheduler = Scheduler(
            PagePool(self.pages), page_size=PAGE, max_batch=8, max_step_tokens=64, max_waiting=8, recent=self.recent
        )
        self.replicas = Replicas(self.addresses)
        naming = Naming(self.digest, Geometry(1, 1, 8), "rope", "float32", "", PAGE)
        handover = Handover(self.replicas, block_bytes=BLOCK, budget_bytes=100 * BLOCK, read_block=self.read)
        prefix = Prefix(self.replicas, FetchCost(BLOCK, PAGE, self.timeout_s), self.write)
        self.writing.set()
        cache: Any = FakeLanes(self.recent)
        prefix._tail_start = partial(cache.tail_start, loaded=0)
        rows = Rows(1 << 20) if self.recent else None
        sessions, windowed = Sessions(self.replicas, 0.1), bool(self.recent)
        self.kv = KvSide(naming, self.replicas, handover, prefix, sessions, cache, self.scheduler.pool, windowed, rows)
        self.cache = cache
        until(lambda: all(replica.up for replica in self.replicas.all if replica.address not in self.away))

    away: tuple[str, ...] = ()

    def read(self, page: int, place: Place = no_place) -> Buffer:
        return self.memory[page]

    def write(self, page: int, data: bytes) -> None:
        if len(data) != BLOCK:
            raise ValueError("another size")
        self.writing.wait(PATIENCE_S)
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
        for block in range(request.loaded_blocks):
            assert self.memory[request.pages[block]] == page_of(request.prompt[: (block + 1) * PAGE])
        return request.cached

    def compute(self, request: Request) -> None:
        """The prompt's remaining tokens in one step."""
        before = request.computed // PAGE
        self.cache.lanes[request.lane] = list(request.tokens)
        for block in range(before, len(request.tokens) // PAGE):
            self.memory[request.pages[block]] = page_of(request.prompt[: (block + 1) * PAGE])
        request.computed = len(request.tokens)
        self.kv.sealed(request, before, len(request.tokens) // PAGE, None)

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


def tokens(count: int, seed: int = 0) -> list[int]:
    return [(7 * i + seed) % 1000 for i in range(count)]
