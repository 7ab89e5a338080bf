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
from router_service.rows import Rows
from router_service.scheduler import Plan, Request
from router_service.sessions import Sessions
from router_service.trunk import Cache

log = logging.getLogger("forefetch.router")


@dataclass(slots=True)
class _Followed:
    """A request whose rows are handed over: its pages, which it has no more when it has ended, and its landed positions."""

    pages: tuple[int, ...]
    end: int = 0


@dataclass
class KvSide:
    """One per router with `--kv`. `prefix` is None where prefixes are not fetched. `sessions` works on its own.

    `whole`: nothing is ever written to a block again, so none is loaded that holds the last token, which is always computed.
    `rows`: where the newest tokens are in no block, takes them where requests may go on."""

    naming: Naming
    replicas: Replicas
    handover: Handover
    prefix: Prefix | None
    sessions: Sessions
    cache: Cache
    pool: PagePool
    whole: bool = False
    rows: Rows | None = None
    _keys: dict[Request, list[Key]] = field(default_factory=dict)
    _loads: dict[Request, Load] = field(default_factory=dict)
    _requests: dict[int, Request] = field(default_factory=dict)
    _followed: dict[Request, _Followed] = field(default_factory=dict)

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
        if start < end and self._counts(end - start):
            rows = self.cache.read_tail(request.pages, request.lane, start, end)
            live.snapshot = Snapshot(start, end, self.naming.page_size, rows)

    def _counts(self, tokens: int) -> bool:
        """Whether a tail of so many tokens is worth its bytes: where more than the tail is computed again without it, and where
        computing it takes longer than the log lags behind the stream, which is to be generated again in any case."""
        if self.rows is not None or self.prefix is None:
            return True
        seconds = self.prefix.cost.prefill.time(tokens)
        return seconds is None or seconds > self.sessions.lag_s

    def admitted(self, request: Request, trace: SpanContext | None) -> None:
        """A request has its pages: its cached prefix is looked for, and it is `loading` until that has ended."""
        tail, size = self._usable_tail(request), self.naming.page_size
        tokens, tenant = tuple(request.tokens), request.tenant
        blocks = (len(tokens) - self.whole) // size
        if self.rows is not None:
            self._followed[request] = _Followed(request.pages)
            request.rows_due = [blocks * size] if blocks else []
            blocks = tail.start // size if tail is not None else blocks
        pages, load = request.pages[:blocks], None
        if self.prefix is not None:
            wanted = self.rows is not None and tail is None
            load = self.prefix.begin(
                request.key, lambda: self.naming.extend([], tenant, tokens, blocks), pages, trace, rows=wanted
            )
        if load is None:
            self._restore(request, 0, tail)
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
        blocks = self._restore(request, load.blocks, load.tail or self._usable_tail(request))
        parted = load.held * self.naming.page_size  # other prompts went on here, and this one does so in its own way
        if load.rows and request.computed < parted and parted not in request.rows_due:
            request.rows_due.insert(0, parted)
        self._keys[request] = load.keys
        self.handover.adopt(request.key, load.keys[:blocks], load.pages[:blocks])
        return [request]

    def _usable_tail(self, request: Request) -> Tail | None:
        """The tail of the request's session, if it fits the pages here and ends before the last token."""
        tail = request.tail
        fits = tail is not None and tail.page == self.naming.page_size and tail.start <= tail.end < len(request.tokens)
        return tail if fits else None

    def _restore(self, request: Request, blocks: int, tail: Tail | None) -> int:
        """So many blocks are in the request's pages: it goes on behind them, and behind the tail if that begins there. Returns
        how many count: where rows are needed and there are none, none."""
        size = self.naming.page_size
        request.tail, reached = None, blocks * size
        if tail is not None and tail.start == reached:
            try:
                self.cache.write_tail(request.pages, request.lane, tail.start, tail.end, tail.data)
                reached = tail.end
            except ValueError:
                log.warning("rows behind blocks do not fit and are computed again")
        if self.rows is not None and (tail is None or reached != tail.end):
            blocks = reached = 0
        request.loaded_blocks = blocks
        request.resume_at(reached)
        request.rows_due = [position for position in request.rows_due if position > reached]
        return blocks

    def _same_tail(self, one: int, other: int) -> bool:
        """Whether a request's tail begins at the same token when so many positions are committed, or so many."""
        return self.cache.tail_start(one, 0) == self.cache.tail_start(other, 0)

    def _hand_rows(self, request: Request, pages: Sequence[int], position: int, end: int) -> None:
        """Offers the rows that a query at `position`, a multiple of the page, reads beside `pages`, if they are still there
        when positions up to `end` are committed."""
        if self.rows is None or not position or not self._same_tail(position, end):
            return
        start = self.cache.tail_start(position, 0)
        blocks, keys = position // self.naming.page_size, self._keys.setdefault(request, [])
        self.naming.extend(keys, request.tenant, request.tokens, blocks)
        rows = self.cache.read_tail(pages, request.lane, start, position)
        holder = self.replicas.holder(keys, blocks - 1)
        self.rows.offer(holder, keys[blocks - 1], Snapshot(start, position, self.naming.page_size, rows))

    def sealed(self, request: Request, first: int, blocks: int, trace: SpanContext | None) -> None:
        """Blocks `first` .. `blocks` are sealed now: offered, their pages pinned until the bytes are copied."""
        keys = self.naming.extend(self._keys.setdefault(request, []), request.tenant, request.tokens, blocks)
        for block in range(max(first, request.loaded_blocks), blocks):
            page = request.pages[block]
            self.pool.pin(page)
            if not self.handover.offer(request.key, block, keys[block], page, trace):
                self.pool.unpin(page)

    def computed(self, plan: Plan, total_ns: int) -> None:
        """A step is committed and took so long, which is what loading a prefix is weighed against."""
        for chunk in plan.chunks:
            request = chunk.request
            if request in self._followed:
                self._followed[request].end = chunk.end
            while request.rows_due and request.rows_due[0] <= chunk.end:
                self._hand_rows(request, self._followed[request].pages, request.rows_due.pop(0), chunk.end)
        if plan.prefills and self.prefix is not None:
            self.prefix.cost.prefill.add(plan.tokens, total_ns * 1e-9)

    def ended(self, request: Request) -> None:
        """A request is over. To be called before anything else is written to its pages."""
        self.handover.forget(request.key)  # first: what fails behind it must not leave pages to be read as another's
        if load := self._loads.pop(request, None):
            load.cancelled = True
            del self._requests[request.key]
        followed = self._followed.pop(request, None)
        try:
            # Whoever goes on with the answer begins here. A step behind it may have been launched, and be committed or not.
            if followed is not None and request.generated and self._same_tail(followed.end, request.computed):
                whole = followed.end // self.naming.page_size * self.naming.page_size
                self._hand_rows(request, followed.pages, whole, followed.end)
        finally:
            self._keys.pop(request, None)

    def status(self) -> router_pb2.KvStatus:
        """Counters since start. Any thread."""
        services: Sequence[router_pb2.KvReplica] = self.handover.status()
        status = router_pb2.KvStatus(
            address=",".join(service.address for service in services),
            up=all(service.up for service in services),
            blocks_sent=sum(service.blocks_sent for service in services),
            blocks_dropped=sum(service.blocks_dropped for service in services),
            blocks_waiting=sum(service.blocks_waiting for service in services) + (self.rows.waiting if self.rows else 0),
            reconnects=sum(service.reconnects for service in services),
            replicas=services,
        )
        status.sessions, status.session_records = self.sessions.live, self.sessions.counts.records
        status.session_failures.update(dict(self.sessions.counts.failures))
        if self.rows is not None:
            status.rows_sent, status.rows_dropped = self.rows.sent, self.rows.dropped
        if self.prefix is not None:
            counts = self.prefix.counts
            status.rows_loaded = counts.rows
            status.prefix_loads, status.prefix_skipped = counts.loads, counts.skipped
            status.blocks_loaded, status.bytes_loaded = counts.blocks, counts.blocks * self.prefix.cost.block_bytes
            status.prefix_misses.update(dict(counts.missed))
        return status

    def close(self, timeout_s: float) -> None:
        """Sends what is queued, for at most `timeout_s`, and ends all threads."""
        self.handover.close(timeout_s)
        if self.rows is not None:
            self.rows.close(timeout_s)
        self.sessions.close()
        self.replicas.close()
        if self.prefix is not None:
            self.prefix.close()
