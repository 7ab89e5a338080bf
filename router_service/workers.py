"""The table of expert workers: who is connected, who holds which expert, and bringing a lost one back.

The engine's thread owns the table. Connecting happens on a thread per lost worker, which leaves its result to be picked up
by `refresh` between two steps; so a link is only ever used, and replaced, by the engine's thread. `want` and `holds`, called by
whoever follows the cluster, leave their news in the same way.
"""

from __future__ import annotations

import itertools
import logging
import math
import threading
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from time import monotonic
from typing import overload

import numpy as np
import numpy.typing as npt

from expert_worker.client import Link, WorkerInfo
from forefetch.errors import ForefetchError, Mismatch, Unavailable
from forefetch.spec import ModelSpec
from router_service.endpoints import Endpoint

log = logging.getLogger("forefetch.router")

FIRST_RETRY_S, LAST_RETRY_S = 0.05, 1.0
LOCAL = "local"
"""The address of the worker in this process."""
MOST_TURNS = 60  # every number of replicas up to 6 shares rows evenly


@dataclass(eq=False)
class Worker:
    """One row of the table. `link` is None while the worker is away; `reason` then says why. Without an address it is free."""

    index: int
    address: str
    link: Link | None = None
    reason: str = "not connected yet"
    reconnects: int = -1  # the first connection is none
    pairs: int = 0
    calls: int = 0
    copies: bool = False  # it has fewer slots than experts: some call brought one in
    hints_dropped: int = 0  # by links of the past
    found: list[Link] = field(default_factory=list)  # left by the connecting thread
    leaving: bool = False  # the cluster says that it terminates, or does not know it any more
    connecting: int = 0  # number of the thread that does; 0: none


@dataclass
class LaneCounts:
    """What became of p2p lanes: whether they are up, steps that crossed them, steps that they broke off."""

    up: bool = False
    steps: int = 0
    breaks: int = 0


class Names(Sequence[str]):
    """The rows' addresses as they are now."""

    def __init__(self, rows: Sequence[Worker]) -> None:
        self._rows = rows

    def __len__(self) -> int:
        return len(self._rows)

    @overload
    def __getitem__(self, index: int) -> str: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[str]: ...
    def __getitem__(self, index: int | slice) -> str | Sequence[str]:
        if isinstance(index, slice):
            return [worker.address for worker in self._rows[index]]
        return self._rows[index].address


class Workers:
    """`connect(address)` makes a link or raises ForefetchError; it may block for a few seconds. room: rows in all, for workers
    that come later."""

    def __init__(self, spec: ModelSpec, addresses: Sequence[str], connect: Callable[[str], Link], *, room: int = 0) -> None:
        self.spec = spec
        free = [""] * max(0, room - len(addresses))
        self.rows = [Worker(i, address) for i, address in enumerate((*addresses, *free))]
        self.names = Names(self.rows)
        self._wanted: deque[Sequence[Endpoint]] = deque(maxlen=1)  # left by another thread
        self._roster: Sequence[Endpoint] = ()  # what was last wanted
        self._told: deque[tuple[Link, WorkerInfo]] = deque()  # left by another thread: what workers hold by now
        self._freed = False  # a row was: somebody of the roster may be waiting for it
        self._fixed = not free
        # [R, L, E] -> worker: row t's pair with expert e goes to owners[(t + e) % R], so that replicas share the rows of a
        # step, always alike. R is 1 unless some expert is held by several workers.
        self.owners: npt.NDArray[np.int64] = np.full((1, spec.layers, spec.num_experts), -1)
        self.load: npt.NDArray[np.int64] = np.zeros((spec.layers, spec.num_experts), dtype=np.int64)  # [L, E] pairs sent
        self._connect = connect
        self.lanes = LaneCounts()
        self._closed = threading.Event()
        self._threads = itertools.count(1)
        self._news = threading.Event()
        self.changed: Callable[[], None] = lambda: None  # called from a connecting thread when it has news
        for worker in self.rows:
            self._start_connecting(worker)

    @property
    def owner(self) -> npt.NDArray[np.int64]:
        """[L, E] -> a worker that holds the expert, -1 if none does."""
        owner: npt.NDArray[np.int64] = self.owners[0]
        return owner

    @property
    def known(self) -> list[Worker]:
        """The rows that are not free."""
        return [worker for worker in self.rows if worker.address]

    def want(self, endpoints: Sequence[Endpoint]) -> None:
        """From the next step on the table is to have these workers. Any thread; does not block."""
        self._wanted.append(endpoints)
        self._news.set()
        self.changed()

    def holds(self, link: Link, info: WorkerInfo) -> None:
        """The worker behind this link holds something else now: from the next step on the table goes by that. Any thread."""
        self._told.append((link, info))
        self._news.set()
        self.changed()

    @property
    def complete(self) -> bool:
        """Whether every routed expert has a connected worker."""
        return bool((self.owner[list(self.spec.moe_layers)] >= 0).all())

    def missing(self) -> str:
        """Why the table is not complete, for clients: names workers and reasons, no internals."""
        away = [f"worker {w.address}: {w.reason}" for w in self.known if w.link is None]
        return "; ".join(away) or "some experts are held by no worker"

    def wait_complete(self, timeout_s: float) -> None:
        """Blocks until every expert is covered, and the worker in this process, if there is one, has loaded what it holds.

        Raises Mismatch at once when a worker cannot ever fit, else Unavailable."""
        until = monotonic() + timeout_s
        while not self.refresh() or any(worker.link is None for worker in self.rows if worker.address == LOCAL):
            for worker in self.rows if self._fixed else ():
                if worker.reason.startswith("refused"):
                    raise Mismatch(f"worker {worker.address} {worker.reason}")
            if monotonic() >= until:
                raise Unavailable(self.missing())
            self._news.wait(0.05)
            self._news.clear()

    def refresh(self) -> bool:
        """Takes over links that were made meanwhile; returns `complete`."""
        if self._wanted or self._freed:
            self._freed = False
            self._roster = self._wanted.popleft() if self._wanted else self._roster
            self._take_over({endpoint.address: endpoint for endpoint in self._roster})
        if self._told:
            while self._told:
                link, info = self._told.popleft()
                link.info = info  # of no effect where the link was given up meanwhile
            self._assign()
        for worker in self.rows:
            if worker.leaving and worker.link is not None and not worker.link.alive:
                self.lost(worker.index, "it has left")  # no step would notice: its experts are elsewhere
            if worker.found:
                self._replace(worker, worker.found.pop())
                self._assign()
        return self.complete

    def _take_over(self, wanted: dict[str, Endpoint]) -> None:
        for worker in self.known:
            endpoint = wanted.pop(worker.address, None)
            worker.leaving = endpoint is None or endpoint.leaving
            if endpoint is None and worker.link is None:
                self._free(worker)
            elif not worker.leaving and worker.link is None:
                self._start_connecting(worker)
        for endpoint in wanted.values():
            row = next((worker for worker in self.rows if not worker.address), None)
            if row is None:
                log.error("no row is left for worker %s: raise --max-workers", endpoint.address)
            elif not endpoint.leaving:
                row.address, row.leaving, row.reconnects = endpoint.address, False, -1
                self._start_connecting(row)
        self._assign()

    def _free(self, worker: Worker) -> None:
        log.info("worker %s has left", worker.address)
        self._freed = True
        worker.address, worker.reason, worker.pairs, worker.calls = "", "not connected yet", 0, 0

    def _replace(self, worker: Worker, link: Link) -> None:
        """Takes a link into use."""
        if worker.link is not None:  # of a connecting thread that came too late
            worker.hints_dropped += worker.link.hints_dropped
            worker.link.close()
        worker.reconnects += 1
        log.info("worker %s is connected over %s", worker.address, link.kind)
        worker.link, worker.reason = link, ""

    def sweep(self) -> None:
        """Drops links whose other side is known to be gone. For idle times: a step finds out by itself."""
        for worker in self.rows:
            if worker.link is not None and not worker.link.alive:
                self.lost(worker.index, "the worker's process ended or its connection broke")

    def lost(self, index: int, reason: str) -> None:
        """Drops a worker's link and starts bringing it back."""
        worker = self.rows[index]
        if worker.link is not None:
            log.warning("worker %s is lost: %s", worker.address, reason)
            worker.hints_dropped += worker.link.hints_dropped
            worker.link.close()
            worker.link, worker.reason, worker.copies = None, reason, False
            self._assign()
            if worker.leaving:
                self._free(worker)
            else:
                self._start_connecting(worker)

    def close(self) -> None:
        """Ends all links and connecting threads."""
        self._closed.set()
        for worker in self.rows:
            for link in filter(None, (worker.link, *worker.found)):
                link.close()
            worker.link = None

    def _assign(self) -> None:
        """Each expert to the connected workers that hold it, in turn, those that leave only where there is no other: the same
        on every router with the same table."""
        holds = np.zeros((len(self.rows), self.spec.layers, self.spec.num_experts), dtype=bool)
        for worker in self.rows:
            if worker.link is not None:
                for layer, experts in worker.link.info.layers.items():
                    holds[worker.index, layer, list(experts)] = True
        staying = holds & ~np.array([worker.leaving for worker in self.rows])[:, None, None]
        holds = np.where(staying.any(axis=0), staying, holds)
        counts = holds.sum(axis=0)  # [L, E]
        turns = min(math.lcm(*(int(count) for count in np.unique(counts) if count)), MOST_TURNS)
        ranks = holds.cumsum(axis=0) - 1  # [W, L, E]: which of an expert's replicas a worker has
        self.owners = np.full((turns, *counts.shape), -1)
        for turn in range(turns):
            mine = holds & (ranks == turn % np.maximum(counts, 1))
            self.owners[turn] = np.where(counts > 0, mine.argmax(axis=0), -1)

    def _start_connecting(self, worker: Worker) -> None:
        if worker.connecting or not worker.address:
            return
        worker.connecting = number = next(self._threads)
        name = f"connect-{worker.index}"
        threading.Thread(target=self._keep_connecting, args=(worker, number), name=name, daemon=True).start()

    def _keep_connecting(self, worker: Worker, number: int) -> None:
        pause, address = FIRST_RETRY_S, worker.address
        try:
            while not self._closed.is_set() and worker.address == address and not worker.leaving:
                if self._connected(worker, address):
                    return
                self._news.set()
                self._closed.wait(pause)
                pause = LAST_RETRY_S if worker.reason.startswith("refused") else min(2 * pause, LAST_RETRY_S)
        finally:
            if worker.connecting == number:
                worker.connecting = 0

    def _connected(self, worker: Worker, address: str) -> bool:
        """One try."""
        try:
            link = self._connect(address)
        except Mismatch as error:
            worker.reason = f"refused: {error}"
            return False
        except ForefetchError as error:
            worker.reason = str(error)
            return False
        if worker.address != address or self._closed.is_set():
            link.close()
            return True
        worker.connecting = 0  # before it is found: the link may be lost, and another made, before this thread has ended
        worker.found.append(link)
        self._news.set()
        self.changed()
        return True
