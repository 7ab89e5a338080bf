"""What the engine tells the KV services and hears from them: prefixes in, sealed blocks out.

All methods are for the engine's thread, unless they say otherwise, and none of them waits.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from forefetch.telemetry.context import SpanContext
from forefetch.v1 import router_pb2
from kv_service.client import Key
from router_service.handover import Handover
from router_service.journal import Tail
from router_service.live import Live, Snapshot
from router_service.naming import Naming
from router_service.pages import PagePool
from router_service.prefix import Load, Prefix
from router_service.replicas import Replicas
from router_service.scheduler import Plan, Request
from router_service.sessions import Sessions
from router_service.trunk import Cache

log = logging.getLogger("forefetch.router")


@dataclass
class KvSide:
    """One per router with `--kv`. `prefix` is None where prefixes are not fetched. `sessions` works on its own.

    `recent`: newest tokens that no block holds. `whole`: nothing is ever written to a block again, so none is loaded that holds
    the last token, which is always computed."""

    naming: Naming
    replicas: Replicas
    handover: Handover
    prefix: Prefix | None
    sessions: Sessions
    cache: Cache
    pool: PagePool
    recent: int = 0
    whole: bool = False
    _keys: dict[Request, list[Key]] = field(default_factory=dict)
    _loads: dict[Request, Load] = field(default_factory=dict)
    _requests: dict[int, Request] = field(default_factory=dict)

    def on_change(self, wake: Callable[[], None]) -> None:
        """`wake` is called, from any thread, when `settle` has something to do that requests wait for."""
        if self.prefix is not None:
            self.prefix.changed = wake

    def settle(self) -> list[Request]:
        """Takes note of what happened in the background: pages that are free of pins, prefixes that are loaded. Returns the
        requests that wait no longer."""
        loaded = []
        for page in self.handover.unpinned():
            self.pool.unpin(page)
        for load in self.prefix.finished() if self.prefix is not None else ():
            for page in load.pages:
                self.pool.unpin(page)
            loaded += self._loaded(load)
        for live in self.sessions.wanting():
            self._snapshot(live)
        return loaded

    def _snapshot(self, live: Live) -> None:
        """Copies, on the device, what a session's log needs of the cache behind the request's last block."""
        request = live.request
        if not request.pages or request.loading or not request.decoding:  # it has ended, or not begun
            return
        end = request.computed
        start = self.cache.tail_start(end, request.loaded_blocks)
        if start < end:
            rows = self.cache.read_tail(request.pages, request.lane, start, end)
            live.snapshot = Snapshot(start, end, self.naming.page_size, rows)

    def admitted(self, request: Request, trace: SpanContext | None) -> None:
        """A request has its pages: its cached prefix is looked for, and it is `loading` until that has ended.

        Where blocks are approximate, an answer that is gone on with takes those before its session's tail, or without a tail
        those that it began with, and no other: its tokens were chosen by the rows themselves, not by what a block has of them.
        """
        tail, size = self._usable_tail(request), self.naming.page_size
        tokens, tenant = tuple(request.tokens), request.tenant
        if self.whole and request.loads is not None:
            blocks = tail.start // size if tail is not None else request.loads
        else:
            blocks = (len(tokens) - self.whole) // size
        pages, load = request.pages[:blocks], None
        if self.prefix is not None:
            load = self.prefix.begin(request.key, lambda: self.naming.extend([], tenant, tokens, blocks), pages, trace)
        if load is None:
            self._restore(request, 0)
            return
        self._loads[request], self._requests[request.key], request.loading = load, request, True
        for page in pages:
            self.pool.pin(page)

    def _loaded(self, load: Load) -> list[Request]:
        """A load is over; its request may have ended meanwhile."""
        request = self._requests.pop(load.request, None)
        if request is None:
            return []
        del self._loads[request]
        blocks = self._restore(request, load.blocks)
        self._keys[request] = load.keys
        self.handover.adopt(request.key, load.keys[:blocks], load.pages[:blocks])
        return [request]

    def _usable_tail(self, request: Request) -> Tail | None:
        """The request's tail, if it fits the pages here and ends before its last token. Where blocks are approximate it belongs
        to the answer that it was computed in."""
        tail = request.tail if request.loads is not None or not self.whole else None
        fits = tail is not None and tail.page == self.naming.page_size and tail.start <= tail.end < len(request.tokens)
        return tail if fits else None

    def _restore(self, request: Request, blocks: int) -> int:
        """So many blocks are in the request's pages: it goes on behind them, and behind its tail if that begins there. Returns
        how many count."""
        size, tail = self.naming.page_size, self._usable_tail(request)
        request.tail, reached = None, blocks * size
        if tail is not None and tail.start == reached:
            try:
                self.cache.write_tail(request.pages, request.lane, tail.start, tail.end, tail.data)
                reached = tail.end
            except ValueError:
                log.warning("the tail of a session does not fit and is computed again")
        if self.whole and tail is not None and reached != tail.end:
            blocks = min(blocks, request.loads or 0)  # see `admitted`
            reached = blocks * size
        request.loaded_blocks = blocks
        request.resume_at(reached)
        return blocks

    def sealed(self, request: Request, first: int, blocks: int, trace: SpanContext | None) -> None:
        """Blocks `first` .. `blocks` are sealed now: offered, their pages pinned until the bytes are copied."""
        keys = self.naming.extend(self._keys.setdefault(request, []), request.tenant, request.tokens, blocks)
        for block in range(max(first, request.loaded_blocks), blocks):
            page = request.pages[block]
            self.pool.pin(page)
            if not self.handover.offer(request.key, block, keys[block], page, trace):
                self.pool.unpin(page)

    def computed(self, plan: Plan, total_ns: int) -> None:
        """A step took so long: what loading a prefix is weighed against."""
        if plan.prefills and self.prefix is not None:
            self.prefix.cost.prefill.add(plan.tokens, total_ns * 1e-9)

    def ended(self, request: Request) -> None:
        """A request is over. To be called before anything else is written to its pages."""
        if load := self._loads.pop(request, None):
            load.cancelled = True
            del self._requests[request.key]
        self._keys.pop(request, None)
        self.handover.forget(request.key)

    def status(self) -> router_pb2.KvStatus:
        """Counters since start. Any thread."""
        services: Sequence[router_pb2.KvReplica] = self.handover.status()
        status = router_pb2.KvStatus(
            address=",".join(service.address for service in services),
            up=all(service.up for service in services),
            blocks_sent=sum(service.blocks_sent for service in services),
            blocks_dropped=sum(service.blocks_dropped for service in services),
            blocks_waiting=sum(service.blocks_waiting for service in services),
            reconnects=sum(service.reconnects for service in services),
            replicas=services,
        )
        status.sessions, status.session_records = self.sessions.live, self.sessions.counts.records
        status.session_failures.update(dict(self.sessions.counts.failures))
        if self.prefix is not None:
            counts = self.prefix.counts
            status.prefix_loads, status.prefix_skipped = counts.loads, counts.skipped
            status.blocks_loaded, status.bytes_loaded = counts.blocks, counts.blocks * self.prefix.cost.block_bytes
            status.prefix_misses.update(dict(counts.missed))
        return status

    def close(self, timeout_s: float) -> None:
        """Sends what is queued, for at most `timeout_s`, and ends all threads."""
        self.handover.close(timeout_s)
        self.sessions.close()
        self.replicas.close()
        if self.prefix is not None:
            self.prefix.close()
