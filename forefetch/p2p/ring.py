"""How the hosts agree on steps: a ring of announcements in shared memory, and a bell beside it.

The router writes a step's shape and rings before it launches its own half; the worker launches the matching one. Several may
be under way. Nothing is acknowledged: a worker that does not follow is found out by the first call that it does not answer.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from typing import NamedTuple

from forefetch.errors import LinkDown
from forefetch.p2p.lane import Step
from forefetch.shm import Segment

PLACES = 64
_ENTRY = struct.Struct("<IIIIQ")  # number, rows, parts, 0, the router's number of the step
RING_BYTES = PLACES * _ENTRY.size


class Announced(NamedTuple):
    """A step that is coming. number: the router's, by which hints name it."""

    step: Step
    number: int


class Announcer:
    """The router's end."""

    def __init__(self, segment: Segment) -> None:
        self._segment, self._number = segment, 0

    def announce(self, step: Step, number: int) -> None:
        """The next step is `step`; number: the router's for it."""
        self._number = self._number + 1 & 0xFFFFFFFF
        at = self._number % PLACES * _ENTRY.size
        _ENTRY.pack_into(self._segment.request, at, self._number, step.rows, step.parts, 0, number)
        self._segment.request_bell.ring(self._number)


class Listener:
    """The worker's end."""

    def __init__(self, segment: Segment) -> None:
        self._segment, self._seen = segment, 0

    def steps(self, spin_ns: int) -> Iterator[Announced]:
        """The steps announced since the last look, after a wait of SLICE_S at most for the first. LinkDown: some were
        missed."""
        bell = self._segment.request_bell
        if not bell.wait(self._seen, spin_ns):
            return
        newest = bell.value
        while self._seen != newest:
            self._seen = self._seen + 1 & 0xFFFFFFFF
            number, rows, parts, _, step = _ENTRY.unpack_from(self._segment.request, self._seen % PLACES * _ENTRY.size)
            if number != self._seen:
                raise LinkDown(-1, f"step {self._seen} was announced and is not in the ring any more")
            yield Announced(Step(rows, parts), step)

    def nudge(self) -> None:
        """Ends a wait in `steps`. Any thread."""
        self._segment.request_bell.nudge()
