"""Cached prefixes on their way from the KV services into a request's pages, in the background.

The engine gives an admitted request here and plans nothing for it until it is back. A load ends after the blocks that arrived
whole and in time, be it none: whatever goes wrong is a miss, counted by its reason, and the rest is computed. The pages are
pinned meanwhile, so that a request that ends early does not leave them to others while bytes still arrive.
"""

from __future__ import annotations

import logging
from collections import Counter, deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from time import monotonic
from typing import TYPE_CHECKING

from forefetch.errors import DeadlineExceeded, ForefetchError
from forefetch.telemetry import names
from forefetch.telemetry.context import SpanContext, to_metadata
from kv_service.client import CALL_S, Buffer, Key, Metadata
from router_service.cost import FetchCost
from router_service.journal import Tail
from router_service.naming import rows_key
from router_service.replicas import Replica, Replicas

if TYPE_CHECKING:
    from forefetch.telemetry.spans import Exporter

_log = logging.getLogger(__name__)
THREADS = 4
"""Loads at a time; more wait, and their waiting counts as time of the load."""
MIB = 1 << 20
SLACK = 8
"""How much larger than expected a block or rows may be, because of sinks, before they are not taken."""
BATCH_BYTES = 16 << 20
"""Most bytes asked for in one call, unless a single block has more: what a load holds in memory."""


@dataclass(eq=False)
class Load:
    """One request's prefix: at most `len(pages)` blocks. `name` gives their keys, on the loading thread, because hashing a long
    prompt takes a while. `rows`: float16 rows are needed behind the last block, and nothing can be used without them.
    `probe`: it is made to measure, whatever it seems to cost.

    The outcome: `blocks` are in the pages, `tail` holds the rows, `missed` says why there is no more, `held` how many blocks
    the services have, with or without rows."""

    request: int
    name: Callable[[], list[Key]]
    pages: Sequence[int]
    deadline: float
    trace: SpanContext | None = None
    rows: bool = False
    probe: bool = False
    cancelled: bool = False
    keys: list[Key] = field(default_factory=list)
    blocks: int = 0
    missed: str = ""
    held: int = 0
    tail: Tail | None = None

    @property
    def left_s(self) -> float:
        """Seconds until it is given up."""
        return self.deadline - monotonic()


@dataclass
class Counts:
    """Since start."""

    loads: int = 0
    blocks: int = 0
    rows: int = 0
    skipped: int = 0
    missed: Counter[str] = field(default_factory=Counter)


class Prefix:
    """`begin` and `finished` are for the engine's thread and never wait. `changed` is called when a load has ended."""

    def __init__(
        self,
        replicas: Replicas,
        cost: FetchCost,
        write_block: Callable[[int, Buffer], None],
        exporter: Exporter | None = None,
        tail_start: Callable[[int], int] = lambda position: position,
    ) -> None:
        """`tail_start(position)`: where the rows begin that a query at `position` reads; before it are whole blocks."""
        self.cost, self.counts = cost, Counts()
        self.changed: Callable[[], None] = lambda: None
        self._replicas, self._write_block, self._exporter = replicas, write_block, exporter
        self._tail_start = tail_start
        self._pool = ThreadPoolExecutor(THREADS, thread_name_prefix="kv-load")
        self._ended: deque[Load] = deque()

    # ---- the engine's thread ----

    def begin(
        self,
        request: int,
        name: Callable[[], list[Key]],
        pages: Sequence[int],
        trace: SpanContext | None = None,
        rows: bool = False,
    ) -> Load | None:
        """Starts loading blocks into pages, which the caller pins until `finished` has it; None: not worth it."""
        if not pages:
            return None
        worth = self.cost.worth(len(pages))
        if not self.cost.before.passes(worth):
            self.counts.skipped += 1
            return None
        load = Load(request, name, pages, monotonic() + self.cost.limit_s(len(pages)), trace, rows, probe=not worth)
        self._pool.submit(self._run, load)
        return load

    def finished(self) -> list[Load]:
        """Loads that have ended, each reported once."""
        loads = []
        while self._ended:
            load = self._ended.popleft()
            self.counts.loads += load.blocks > 0 or load.tail is not None
            self.counts.rows += load.tail is not None
            self.counts.blocks += load.blocks
            if load.missed:
                self.counts.missed[load.missed] += 1
            loads.append(load)
        return loads

    def close(self) -> None:
        """Ends the threads; running calls must have been ended through their clients."""
        self._pool.shutdown(wait=True, cancel_futures=True)

    # ---- the loading threads ----

    def _run(self, load: Load) -> None:
        try:
            with self._span(load) as span:
                load.missed = self._load(load, to_metadata(span))
        except DeadlineExceeded:
            load.missed = "late"
        except ForefetchError as error:
            load.missed = error.code.lower()
        except Exception:
            _log.exception("a cached prefix could not be loaded")
            load.missed = "internal"
        self._ended.append(load)
        self.changed()

    def _span(self, load: Load) -> AbstractContextManager[SpanContext | None]:
        if self._exporter and load.trace:
            return self._exporter.client_span(names.KV_FETCH, load.trace)
        return nullcontext(load.trace)

    def _load(self, load: Load, metadata: Metadata) -> str:
        """Looks up, then loads what is worth it. Returns why there is no more, "" when all blocks were loaded."""
        load.keys = load.name()
        if stop := _stopped(load):
            return stop
        load.held, on_disk = self._replicas.locate(load.keys, min(CALL_S, load.left_s), metadata)
        blocks, holder = load.held, None
        if load.rows:
            blocks, holder = self._find_rows(load, metadata)
        if not blocks:
            return "rows" if load.held else "absent"
        if not load.probe and not self.cost.after.passes(self.cost.worth(blocks, min(blocks, on_disk))):
            return "slow"
        began = monotonic()
        try:
            missed = self._load_behind(load, blocks, holder, metadata)
        finally:
            moved = load.blocks if load.blocks or load.tail else -1
            self.cost.loaded(moved, min(load.blocks, on_disk), monotonic() - began)
        return missed or ("" if blocks == len(load.keys) else "absent")

    def _find_rows(self, load: Load, metadata: Metadata) -> tuple[int, Replica | None]:
        """Behind how many blocks there are rows, and who has them. Rows stand for the last blocks before them, so that these
        need not be held: they may be too new to be sealed."""
        size, most = self.cost.page_size, load.held
        while most < len(load.keys) and self._tail_start((most + 1) * size) <= load.held * size:
            most += 1
        return self._replicas.find_last(load.keys[:most], rows_key, min(CALL_S, max(load.left_s, 0.0)), metadata)

    def _load_behind(self, load: Load, blocks: int, holder: Replica | None, metadata: Metadata) -> str:
        """A prefix of so many blocks: those that the rows, if they are needed, do not stand for, and the rows."""
        size, whole, tail = self.cost.page_size, blocks, None
        if holder is not None:
            whole, position = self._tail_start(blocks * size) // size, blocks * size
            most = SLACK * self.cost.rows_bytes + MIB
            data = holder.client.get([rows_key(load.keys[blocks - 1])], max(load.left_s, 0.0), metadata, most)
            tail = Tail.decode(whole * size, bytes(data[0])) if data else None
            if tail is None or (tail.end, tail.page) != (position, size):
                return _stopped(load) or ("mismatch" if data else "broken")
        for replica, run in self._replicas.runs(load.keys[:whole]):
            if reason := self._load_run(load, replica, run, metadata):
                load.blocks *= holder is None
                return reason
        load.tail = tail
        return ""

    def _load_run(self, load: Load, replica: Replica, run: Sequence[Key], metadata: Metadata) -> str:
        """Blocks of one service, a call's worth at a time."""
        size = self.cost.block_bytes
        batch = max(1, BATCH_BYTES // size)
        for first in range(0, len(run), batch):
            if stop := _stopped(load):
                return stop
            wanted = run[first : first + batch]
            blocks = replica.client.get(wanted, load.left_s, metadata, SLACK * size + MIB)
            for block in blocks:
                try:
                    self._write_block(load.pages[load.blocks], block)
                except ValueError:  # not of a length that a block has
                    return "mismatch"
                load.blocks += 1
            if len(blocks) < len(wanted):
                return _stopped(load) or "broken"
        return ""


def _stopped(load: Load) -> str:
    """Why a load is to end now."""
    return "cancelled" if load.cancelled else "late" if load.left_s <= 0 else ""
