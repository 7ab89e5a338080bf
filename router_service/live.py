"""A running answer of a session, as the engine, the API and the log's writer share it."""

from __future__ import annotations

from concurrent.futures import Future
from dataclasses import dataclass, field

import torch

from router_service.journal import Cursor, Tail
from router_service.replicas import Replica
from router_service.scheduler import Request


@dataclass(frozen=True)
class Snapshot:
    """Rows of the cache behind a request's last block; see Tail."""

    start: int
    end: int
    page: int
    rows: torch.Tensor  # flat, uint8, on the device

    def tail(self) -> Tail:
        """Its bytes; waits for the device."""
        return Tail(self.start, self.end, self.page, self.rows.cpu().numpy().tobytes())


@dataclass(eq=False)
class Live:
    """A running answer of a session. `saved` tells, once it has ended, whether all of it is in the log."""

    name: str
    epoch: int
    replica: Replica
    request: Request
    cursor: Cursor
    saved: Future[bool] = field(default_factory=Future)
    ended: float | None = None  # monotonic seconds
    snapshot: Snapshot | None = None  # left by the engine for the writing thread
    asked: float = 0.0  # when a snapshot was last asked for, monotonic seconds
    covered: int = 0  # positions that the log's tail reaches

    def __post_init__(self) -> None:
        self.saved.set_running_or_notify_cancel()  # a caller who waits and is cancelled does not cancel what he waits for

    @property
    def urgent(self) -> bool:
        """Somebody waits for the log."""
        return self.ended is not None
