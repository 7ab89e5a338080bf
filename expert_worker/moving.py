"""Shares of experts that come and go on a GPU: what one lane's calls, or those over other links, use alone, and the turn in
which each chooses and copies experts beside its calls.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from expert_worker.packed import Share
from forefetch.kernels import residency
from forefetch.kernels.residency import COUNTERS, Mover, Residents
from forefetch.wire import Verified


@dataclass(kw_only=True)
class MovingShare(Share):
    """stream: where copies go on beside the calls; None on a CPU, where the interpreter runs one launch after the other."""

    mover: Mover
    stream: Any
    source: str = ""

    def move(self, state: Residents, place: int, targets: int, least: float) -> None:
        """A turn beside whatever comes next: up to `most_copies` experts of the `targets` layers behind number `place`."""
        with self._beside():
            turn(state, self.mover, place, targets, least)

    def join(self) -> None:
        """What comes next comes behind the copies."""
        if self.stream is not None:
            torch.cuda.current_stream(self.counters.device).wait_stream(self.stream)

    @contextmanager
    def _beside(self) -> Iterator[None]:
        if self.stream is None:
            yield
            return
        self.stream.wait_stream(torch.cuda.current_stream(self.counters.device))
        with torch.cuda.stream(self.stream):
            yield


def turn(state: Residents, mover: Mover, place: int, targets: int, least: float, *, afresh: bool = False) -> None:
    """Chooses at number `place`, copies, and looks for the victims of the next. afresh: victims are looked for first, since
    those that are known may be another layer's."""
    residency.grant(state, mover)
    if afresh:
        residency.spare(state, place, mover)
    residency.pick(state, place, targets, least, mover)
    residency.bring(state, place, mover)
    residency.spare(state, (place + 1) % state.layers, mover)
    residency.release(state, mover)


class Teller:
    """Puts counters as a lane tells them (`lane.TOLD`), on their device."""

    def __init__(self, expert_bytes: int, device: torch.device) -> None:
        sources = {"wasted_bytes": ("wasted", expert_bytes), "copied_bytes": ("brought", expert_bytes)}
        words = [sources.get(name, (name, 1)) for name in Verified._fields]
        known = [(COUNTERS.index(name), unit) if name in COUNTERS else (0, 0) for name, unit in words]
        self._places, self._units = torch.tensor(known, dtype=torch.int64, device=device).t().contiguous()

    def tell(self, counters: Tensor, told: Tensor) -> None:
        """counters int64 [len(COUNTERS)] -> told [TOLD_WORDS]."""
        torch.mul(counters[self._places], self._units, out=told)
