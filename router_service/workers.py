"""The table of expert workers: who is connected, who holds which expert, and bringing a lost one back.

The engine's thread owns the table. Connecting happens on a thread per lost worker, which leaves its result to be picked up
by `refresh` between two steps; so a link is only ever used, and replaced, by the engine's thread.
"""

from __future__ import annotations

import logging
import math
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from expert_worker.client import Link
from forefetch.errors import ForefetchError, Mismatch, Unavailable
from forefetch.spec import ModelSpec

log = logging.getLogger("forefetch.router")

FIRST_RETRY_S, LAST_RETRY_S = 0.05, 1.0
MOST_TURNS = 60  # every number of replicas up to 6 shares rows evenly


@dataclass(eq=False)
class Worker:
    """One row of the table. `link` is None while the worker is away; `reason` then says why."""

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


class Workers:
    """`connect(address)` makes a link or raises ForefetchError; it may block for a few seconds."""

    def __init__(self, spec: ModelSpec, addresses: Sequence[str], connect: Callable[[str], Link]) -> None:
        self.spec = spec
        self.rows = [Worker(i, address) for i, address in enumerate(addresses)]
        # [R, L, E] -> worker: row t's pair with expert e goes to owners[(t + e) % R], so that replicas share the rows of a
        # step, always alike. R is 1 unless some expert is held by several workers.
        self.owners: npt.NDArray[np.int64] = np.full((1, spec.layers, spec.num_experts), -1)
        self.load: npt.NDArray[np.int64] = np.zeros((spec.layers, spec.num_experts), dtype=np.int64)  # [L, E] pairs sent
        self._connect = connect
        self._closed = threading.Event()
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
    def complete(self) -> bool:
        """Whether every routed expert has a connected worker."""
        return bool((self.owner[list(self.spec.moe_layers)] >= 0).all())

    def missing(self) -> str:
        """Why the table is not complete, for clients: names workers and reasons, no internals."""
        away = [f"worker {w.address}: {w.reason}" for w in self.rows if w.link is None]
        return "; ".join(away) or "some experts are held by no worker"

    def wait_complete(self, timeout_s: float) -> None:
        """Blocks until every expert is covered. Raises Mismatch at once when a worker cannot ever fit, else Unavailable."""
        waited, pause = 0.0, 0.05
        while not self.refresh():
            for worker in self.rows:
                if worker.reason.startswith("refused"):
                    raise Mismatch(f"worker {worker.address} {worker.reason}")
            if waited >= timeout_s:
                raise Unavailable(self.missing())
            self._news.wait(pause)
            self._news.clear()
            waited += pause

    def refresh(self) -> bool:
        """Takes over links that were made meanwhile; returns `complete`."""
        for worker in self.rows:
            if worker.found:
                worker.link, worker.reason = worker.found.pop(), ""
                worker.reconnects += 1
                log.info("worker %s is connected over %s", worker.address, worker.link.kind)
                self._assign()
        return self.complete

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
            self._start_connecting(worker)

    def close(self) -> None:
        """Ends all links and connecting threads."""
        self._closed.set()
        for worker in self.rows:
            for link in filter(None, (worker.link, *worker.found)):
                link.close()
            worker.link = None

    def _assign(self) -> None:
        """Each expert to the connected workers that hold it, in turn: the same on every router with the same table."""
        holds = np.zeros((len(self.rows), self.spec.layers, self.spec.num_experts), dtype=bool)
        for worker in self.rows:
            if worker.link is not None:
                for layer, experts in worker.link.info.layers.items():
                    holds[worker.index, layer, list(experts)] = True
        counts = holds.sum(axis=0)  # [L, E]
        turns = min(math.lcm(*(int(count) for count in np.unique(counts) if count)), MOST_TURNS)
        ranks = holds.cumsum(axis=0) - 1  # [W, L, E]: which of an expert's replicas a worker has
        self.owners = np.full((turns, *counts.shape), -1)
        for turn in range(turns):
            mine = holds & (ranks == turn % np.maximum(counts, 1))
            self.owners[turn] = np.where(counts > 0, mine.argmax(axis=0), -1)

    def _start_connecting(self, worker: Worker) -> None:
        threading.Thread(target=self._keep_connecting, args=(worker,), name=f"connect-{worker.index}", daemon=True).start()

    def _keep_connecting(self, worker: Worker) -> None:
        pause = FIRST_RETRY_S
        while not self._closed.is_set():
            try:
                link = self._connect(worker.address)
            except Mismatch as error:
                worker.reason, pause = f"refused: {error}", LAST_RETRY_S
            except ForefetchError as error:
                worker.reason = str(error)
            else:
                worker.found.append(link)
                if self._closed.is_set():
                    link.close()
                self._news.set()
                self.changed()
                return
            self._news.set()
            self._closed.wait(pause)
            pause = min(2 * pause, LAST_RETRY_S)
