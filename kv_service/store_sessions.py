"""What the records of a session add up to. Pure: the caller holds a lock and keeps the log.

A session belongs to one router at a time, the one whose epoch it has. A router that goes on with a session claims it, which
raises the epoch; what the router before still sends is refused. Under one epoch a record only ever adds, so sending it twice
changes nothing; the first record under a newer epoch may also take tokens and blocks back.
"""

from __future__ import annotations

from array import array
from collections.abc import MutableSequence, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

SESSION_BYTES = 600
"""What a session takes in memory beside what it holds, its name and its place among others included."""


def memory_of(token_ids: Sequence[int], block_digests: Sequence[bytes], state: bytes | None, tail: bytes | None) -> int:
    """What these take in a session: a token 4 bytes, a digest an object of its own."""
    return 4 * len(token_ids) + 80 * len(block_digests) + len(state or b"") + len(tail or b"")


class Verdict(Enum):
    """What became of a record."""

    APPENDED = 1
    STALE_EPOCH = 2
    GAP = 3
    CONFLICT = 4
    NO_ROOM = 5


@dataclass(frozen=True, slots=True)
class SessionRecord:
    """What is new in a session; see SessionRecord in kv.proto. None means that the record says nothing about it."""

    position: int
    token_ids: Sequence[int] = ()
    first_block: int | None = None
    block_digests: Sequence[bytes] = ()
    state: bytes | None = None
    tail: bytes | None = None
    tail_position: int = 0


@dataclass(slots=True)
class Session:
    """A session as it stands. `written` is the epoch of its latest record, `epoch` that of its latest claim or record."""

    epoch: int = 0
    written: int = 0
    token_ids: array[int] = field(default_factory=lambda: array("I"))
    block_digests: list[bytes] = field(default_factory=list)
    state: bytes = b""
    tail: bytes = b""
    tail_position: int = 0

    @property
    def bytes(self) -> int:
        """About what it takes as one record."""
        return 4 * len(self.token_ids) + 32 * len(self.block_digests) + len(self.state) + len(self.tail) + 64

    @property
    def memory(self) -> int:
        """What it takes in memory, measured."""
        return SESSION_BYTES + memory_of(self.token_ids, self.block_digests, self.state, self.tail)

    def verdict(self, epoch: int, record: SessionRecord) -> Verdict:
        """What `apply` would mean for this record; nothing is changed."""
        if epoch < self.epoch:
            return Verdict.STALE_EPOCH
        blocks = record.first_block or 0
        if record.position > len(self.token_ids) or blocks > len(self.block_digests):
            return Verdict.GAP
        if epoch > self.written:
            return Verdict.APPENDED
        if not _agree(self.token_ids, record.position, array("I", record.token_ids)):
            return Verdict.CONFLICT
        return Verdict.APPENDED if _agree(self.block_digests, blocks, list(record.block_digests)) else Verdict.CONFLICT

    def apply(self, epoch: int, record: SessionRecord) -> None:
        """Adds a record whose verdict is APPENDED."""
        fresh = epoch > self.written
        self.epoch = self.written = epoch
        repeated = not fresh and record.position + len(record.token_ids) < len(self.token_ids)
        _write(self.token_ids, record.position, array("I", record.token_ids), cut=fresh)
        if record.first_block is not None:
            _write(self.block_digests, record.first_block, list(record.block_digests), cut=fresh)
        if repeated:  # a later record has been here: its state and tail are the newer ones
            return
        if record.state is not None:
            self.state = record.state
        if record.tail is not None:
            self.tail, self.tail_position = record.tail, record.tail_position
        elif self.tail_position > len(self.token_ids):
            self.tail, self.tail_position = b"", 0


def _agree(held: Sequence[Any], at: int, new: Sequence[Any]) -> bool:
    overlap = min(len(held) - at, len(new))
    return held[at : at + overlap] == new[:overlap]


def _write(held: MutableSequence[Any], at: int, new: Sequence[Any], *, cut: bool) -> None:
    if cut or at + len(new) > len(held):
        held[at:] = new
