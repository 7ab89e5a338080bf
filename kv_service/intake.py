"""Parts of a Put stream, or blocks in shared memory -> blocks in the vault."""

from __future__ import annotations

import logging
import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import xxhash

from forefetch.errors import BadRequest, Cancelled
from forefetch.v1 import kv_pb2 as pb
from kv_service.block_messages import Buffer, Part
from kv_service.keys import DIGEST_BYTES, Key, child_key
from kv_service.parts import Pieces, cut
from kv_service.store import Outcome, Reservation
from kv_service.store_order import State

_log = logging.getLogger(__name__)

MAX_TOKENS = 4_096
"""Most tokens in a block."""
MAX_PART = 4 << 20
"""Most bytes in a part of a block."""
CHUNK = 64 << 10
"""What is kept in smaller pieces than this is copied together, so that what is held is what is counted."""
MAX_PIECES = 1_024
"""Most parts of a block beyond one for each CHUNK."""
CHECKSUM_BYTES = 16
LEFT_OUT = 16_384
"""Blocks of a stream without room whose children are known to be unreachable; of those beyond, children are tried."""


class Keeper(Protocol):
    """Where whole blocks go; see Vault."""

    def commit(self, place: Reservation, pieces: Pieces, checksum: bytes, origin: bytes = b"") -> Outcome:
        """Makes a whole block visible."""

    def abort(self, place: Reservation) -> Outcome:
        """Gives up a block that did not arrive whole."""

    def refuse(self, outcome: Outcome) -> Outcome:
        """Counts a block that is not taken."""


def check_digest(digest: bytes, field: str) -> None:
    """BadRequest unless it has a digest's size."""
    if len(digest) != DIGEST_BYTES:
        raise BadRequest(field, f"must be {DIGEST_BYTES} bytes, is {len(digest)}")


def read_digests(packed: bytes, limit: int) -> tuple[bytes, ...]:
    """Digests of a LookUp."""
    count, rest = divmod(len(packed), DIGEST_BYTES)
    if rest:
        raise BadRequest("digests", f"must be {DIGEST_BYTES} bytes each, are {len(packed)} in all")
    if count > limit:
        raise BadRequest("digests", f"must be at most {limit}, are {count}")
    return struct.unpack(f"{DIGEST_BYTES}s" * count, packed)


def read_key(key: pb.BlockKey, field: str) -> Key:
    """A key whose shape is right. That its digest is that of its parent and tokens is for `check_key`."""
    check_digest(key.digest, f"{field}.digest")
    check_digest(key.parent, f"{field}.parent")
    if not 1 <= len(key.token_ids) <= MAX_TOKENS:
        raise BadRequest(f"{field}.token_ids", f"must be 1 to {MAX_TOKENS} ids, are {len(key.token_ids)}")
    return Key(key.digest, key.parent, tuple(key.token_ids), key.position)


def check_key(key: Key, field: str) -> Key:
    """BadRequest unless the digest follows from parent and tokens."""
    if child_key(key.parent, key.token_ids) != key.digest:
        raise BadRequest(f"{field}.digest", "is not the digest of its parent and token_ids")
    return key


def read_keys(keys: Sequence[pb.BlockKey], limit: int) -> list[Key]:
    """Keys of a Get."""
    if len(keys) > limit:
        raise BadRequest("keys", f"must be at most {limit}, are {len(keys)}")
    return [read_key(key, f"keys[{index}]") for index, key in enumerate(keys)]


@dataclass(slots=True)
class _Arriving:
    """A block of which not all parts are here. `place` is where it will go, or why it will not be kept."""

    size: int
    place: Reservation | Outcome
    pieces: list[Buffer] = field(default_factory=list)
    hash: Any = field(default_factory=xxhash.xxh3_128)
    got: int = 0

    def add(self, piece: Buffer, shared: bool = False) -> None:
        """`shared`: the sender may still write to it."""
        self.got += len(piece)
        if self.got > self.size:
            raise BadRequest("parts.data", f"more than the block's size of {self.size} bytes")
        if isinstance(self.place, Reservation):
            if self.place.kept:
                if len(self.pieces) == MAX_PIECES + self.size // CHUNK:
                    raise BadRequest("parts.data", f"more than {len(self.pieces)} parts of a block of {self.size} bytes")
                piece = bytes(piece) if shared else piece
                self.pieces.append(piece)
            self.hash.update(piece)

    def whole(self) -> Pieces:
        """Its bytes as they are kept."""
        return self.pieces if len(self.pieces) <= 1 + self.size // CHUNK else (b"".join(self.pieces),)


class Intake:
    """Assembles the blocks of one Put stream, or frame. Use as a context manager: leaving it gives up a block that is not
    complete.

    `reserve(key, size)` is Vault.reserve for the caller's tenant.
    """

    def __init__(self, keeper: Keeper, reserve: Callable[[Key, int], Reservation | Outcome], max_block_bytes: int) -> None:
        self.stored = self.refused = 0
        self.origin = b""
        self._keeper, self._reserve, self._max_block_bytes = keeper, reserve, max_block_bytes
        self._arriving: _Arriving | None = None
        self._left_out: set[bytes] = set()  # digests of this stream's blocks that found no room

    def __enter__(self) -> Intake:
        return self

    def __exit__(self, *_: object) -> None:
        block, self._arriving = self._arriving, None
        if block is not None:
            self._settle(block, b"")

    def take(self, part: Part) -> None:
        """The next part of the stream. BadRequest names the field that is wrong."""
        head, data = part
        if len(data) > MAX_PART:
            raise BadRequest("parts.data", f"must be at most {MAX_PART} bytes in a part, is {len(data)}")
        if not data and not head.last:
            raise BadRequest("parts.data", "must not be empty")
        if len(head.checksum) != (CHECKSUM_BYTES if head.last else 0):
            raise BadRequest("parts.checksum", f"must be {CHECKSUM_BYTES} bytes in a block's last part and empty in the others")
        if self._arriving is None:
            self._arriving = self._begin(head, "parts")
        elif head.HasField("key") or head.size:
            raise BadRequest("parts.key", "must be set in a block's first part only, and so must size")
        self._arriving.add(data)
        if head.last:
            self._end(head.checksum)

    def take_shared(self, block: pb.SharedBlock, data: Buffer) -> None:
        """A whole block in memory that its sender may still write to: a copy is kept, and the copy is what is checked."""
        if len(block.checksum) != CHECKSUM_BYTES:
            raise BadRequest("blocks.checksum", f"must be {CHECKSUM_BYTES} bytes")
        self._arriving = self._begin(block, "blocks")
        if self._held():
            return
        for piece in cut(data):
            self._arriving.add(piece, shared=True)
        self._end(block.checksum)

    def take_page(self, block: pb.SharedBlock, parts: Sequence[Buffer], whole: Callable[[], bool]) -> None:
        """A block that lies in parts in its sender's pool. `whole()`, asked behind the copy: it was not written to
        meanwhile. Raises Cancelled if it may have been."""
        if block.size != sum(map(len, parts)):
            raise BadRequest("blocks.size", "is not that of a page")
        self._arriving = self._begin(block, "blocks")
        if self._held():
            return
        for piece in cut(b"".join(parts)):
            self._arriving.add(piece)
        if not whole():
            raise Cancelled("the caller has given the page up")
        self._end(self._arriving.hash.digest())

    def _held(self) -> bool:
        """Whether the arriving block is held already. Then it ends here, as for a caller that asked before it sent."""
        block = self._arriving
        assert block is not None
        if not isinstance(block.place, Reservation) or block.place.kept or block.place.entry.state is not State.SEALED:
            return False
        self._arriving = None
        self._settle(block, block.place.entry.checksum)
        return True

    def _end(self, checksum: bytes) -> None:
        """All parts of the arriving block are here."""
        block, self._arriving = self._arriving, None
        assert block is not None
        whole = block.got == block.size and block.hash.digest() == checksum
        self._settle(block, checksum if whole else b"")

    def _begin(self, part: pb.BlockPart | pb.SharedBlock, where: str) -> _Arriving:
        if not part.HasField("key"):
            raise BadRequest(f"{where}.key", "must be set in a block's first part")
        if not 1 <= part.size <= self._max_block_bytes:
            raise BadRequest(f"{where}.size", f"must be 1 to {self._max_block_bytes} bytes, is {part.size}")
        key = check_key(read_key(part.key, f"{where}.key"), f"{where}.key")
        if key.parent in self._left_out:  # nobody could reach it; what is held must not give way to it
            place: Reservation | Outcome = self._keeper.refuse(Outcome.NO_ROOM)
        else:
            place = self._reserve(key, part.size)
        if isinstance(place, Outcome) and len(self._left_out) < LEFT_OUT:
            self._left_out.add(key.digest)
        return _Arriving(part.size, place)

    def _settle(self, block: _Arriving, checksum: bytes) -> None:
        """Commits a block, or gives it up when `checksum` is empty."""
        outcome = block.place
        if isinstance(outcome, Reservation):
            keeper = self._keeper
            outcome = keeper.commit(outcome, block.whole(), checksum, self.origin) if checksum else keeper.abort(outcome)
        if outcome is Outcome.CONFLICT:
            _log.warning(
                "a block was put whose key holds other bytes; those stay. Once in a while that is rounding in another batch"
            )
        self.stored += outcome.good
        self.refused += not outcome.good
