"""In what order blocks go: GreedyDual-Size. Pure.

A block's rank is the clock at its last use plus what computing it again costs per byte. The least rank goes first and becomes
the clock, so what is not used sinks, costly and small blocks more slowly (Cao and Irani, "Cost-aware WWW proxy caching
algorithms", 1997). Equal ranks go in the order of their last use.

A use of a block is one of every block before it in its chain. None of those can go before it does, so they hear of it only
then: a block that goes hands on its rank, and a use of a thousand blocks costs no more than one of the last.
"""

from __future__ import annotations

import heapq
import struct
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum

ATTENTION_TOKENS = 8192
"""Position at which attending to what is before a token costs about as much as all else of computing it."""


ENTRY_BYTES = 700
"""What the index takes for a block beside its tokens, measured."""


class State(Enum):
    """Of a block in the index."""

    RESERVED = "room is set aside; its bytes are on their way"
    SEALED = "whole, verified, visible"
    GONE = "out of the index: evicted, dropped or given up"


@dataclass(slots=True, eq=False)
class Entry:
    """A block. `name` is the tenant's tag and the digest, `parent` likewise; `tokens` its ids, 4 bytes each, little-endian."""

    name: bytes
    tag: bytes
    parent: bytes
    tokens: bytes
    position: int
    size: int
    checksum: bytes = b""
    origin: bytes = b""
    deadline: float = 0.0
    state: State = State.RESERVED
    leases: int = 0
    in_memory: bool = False
    on_disk: bool = False
    dirty: bool = False  # to be written, or being written
    rank: float = 0.0
    seen: float = 0.0  # the clock at its last use
    used: int = 0  # number of its last use
    queued: bool = False
    worth: float = 0.0

    def __post_init__(self) -> None:
        # Recompute cost per byte, in tokens of a first block.
        self.worth = len(self.tokens) / 4 * (1 + self.position / ATTENTION_TOKENS) / self.size

    def use(self, clock: float, number: int) -> None:
        """It is used at this time of the clock."""
        self.used, self.seen = number, clock
        self.rank = max(self.rank, clock + self.worth)

    def inherit(self, entry: Entry) -> None:
        """The block after this one goes: what it was worth, and its uses, are this one's now."""
        self.used, self.seen = max(self.used, entry.used), max(self.seen, entry.seen)
        self.rank = max(self.rank, entry.rank, self.seen + self.worth)

    @property
    def indexed(self) -> int:
        """Bytes that it takes in the index."""
        return ENTRY_BYTES + len(self.tokens)

    @property
    def token_ids(self) -> tuple[int, ...]:
        """The block's tokens."""
        return struct.unpack(f"<{len(self.tokens) // 4}I", self.tokens)


@dataclass(slots=True)
class Order:
    """Blocks that may go, least rank first. Ranks only rise, so they are looked at again when a block is up."""

    _heap: list[tuple[float, int, bytes, Entry]] = field(default_factory=list)

    def add(self, entry: Entry) -> None:
        """Makes `entry` a candidate, if it is none yet."""
        if not entry.queued:
            entry.queued = True
            heapq.heappush(self._heap, (entry.rank, entry.used, entry.name, entry))

    def first(self, may_go: Callable[[Entry], bool]) -> Entry | None:
        """The next to go; it stays a candidate. What may not go stops being one until it is added again."""
        while self._heap:
            rank, used, _, entry = self._heap[0]
            if not may_go(entry):
                heapq.heappop(self._heap)
                entry.queued = False
            elif (rank, used) != (entry.rank, entry.used):
                heapq.heapreplace(self._heap, (entry.rank, entry.used, entry.name, entry))
            else:
                return entry
        return None
