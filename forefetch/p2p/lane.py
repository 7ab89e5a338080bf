"""How a lane's memory is laid out, and how a step is cut into calls. Pure."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

FLAG = 0
"""Where an area's signal word lies: u32, the number of the last call (inbox) or reply (outbox)."""
TOLD, TOLD_WORDS = 128, 8
"""Where a worker tells what its lane's calls found, in the outbox's first line: i64 each, totals since the lane was opened: the
fields of `wire.Verified` in their order."""
_LINE = 256


@dataclass(frozen=True)
class Step:
    """A step's agreed shape: `rows`, padding included, sent as `parts` calls per layer (2: half-batch ping-pong)."""

    rows: int
    parts: int

    def cuts(self) -> Iterator[tuple[int, int]]:
        """(first row, rows) of each part, in the order of the calls; all alike but for the last."""
        size = -(-self.rows // self.parts)
        for first in range(0, self.rows, size):
            yield first, min(size, self.rows - first)


@dataclass(frozen=True)
class LaneShape:
    """Sizes of a lane: up to `rows` rows of `hidden` elements of `itemsize` bytes, `top_k` experts each, `layers` MoE layers.

    Inbox: signal | ids [layers, rows, top_k] i32 | weights [rows, top_k] f32 | rows [rows, hidden]. Ids have a place for each
    layer, so that a worker can count a step's choices at its end. Outbox: signal, totals (`TOLD`) | rows [rows, hidden].
    """

    rows: int
    hidden: int
    top_k: int
    layers: int
    itemsize: int

    @property
    def ids(self) -> int:
        """Offset of the ids in the inbox, bytes."""
        return _LINE

    @property
    def weights(self) -> int:
        """Offset of the gate weights in the inbox."""
        return _up(self.ids + 4 * self.layers * self.rows * self.top_k)

    @property
    def x(self) -> int:
        """Offset of the rows in the inbox."""
        return _up(self.weights + 4 * self.rows * self.top_k)

    @property
    def inbox_bytes(self) -> int:
        """Bytes of the inbox."""
        return _up(self.x + self.rows * self.hidden * self.itemsize)

    @property
    def results(self) -> int:
        """Offset of the rows in the outbox."""
        return _LINE

    @property
    def outbox_bytes(self) -> int:
        """Bytes of the outbox."""
        return _up(self.results + self.rows * self.hidden * self.itemsize)


def behind(number: int, wanted: int) -> bool:
    """Whether a u32 counter has not reached `wanted`; counters wrap, and are never 2^31 apart."""
    return ((number - wanted) & 0xFFFFFFFF) >= 1 << 31


def _up(size: int) -> int:
    return -(-size // _LINE) * _LINE
