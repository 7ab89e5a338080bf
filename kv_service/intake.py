"""Chunks of a Put stream -> blocks in the store."""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any

from forefetch.errors import BadRequest
from forefetch.v1 import kv_pb2 as pb
from kv_service.keys import DIGEST_BYTES, Key, child_key
from kv_service.store import Outcome, Reservation, Store

_log = logging.getLogger(__name__)

MAX_TOKENS = 4_096
"""Most tokens in a block."""
MAX_CHUNK = 4 << 20
"""Most bytes in a chunk of Put."""


def read_key(key: pb.BlockKey, field: str) -> Key:
    """A key whose shape is right and, where it can be known, whose digest is that of its parent and tokens."""
    if len(key.digest) != DIGEST_BYTES:
        raise BadRequest(f"{field}.digest", f"must be {DIGEST_BYTES} bytes, is {len(key.digest)}")
    if len(key.parent) not in (0, DIGEST_BYTES):
        raise BadRequest(f"{field}.parent", f"must be empty or {DIGEST_BYTES} bytes, is {len(key.parent)}")
    if not 1 <= len(key.token_ids) <= MAX_TOKENS:
        raise BadRequest(f"{field}.token_ids", f"must be 1 to {MAX_TOKENS} ids, are {len(key.token_ids)}")
    if key.parent and child_key(key.parent, key.token_ids) != key.digest:
        raise BadRequest(f"{field}.digest", "is not the digest of its parent and token_ids")
    return Key(key.digest, key.parent, tuple(key.token_ids))


def read_chain(keys: Sequence[pb.BlockKey], limit: int) -> list[Key]:
    """Keys of which each is the child of the one before."""
    if len(keys) > limit:
        raise BadRequest("keys", f"must be at most {limit}, are {len(keys)}")
    chain = [read_key(key, f"keys[{index}]") for index, key in enumerate(keys)]
    for index in range(1, len(chain)):
        if chain[index].parent != chain[index - 1].digest:
            raise BadRequest(f"keys[{index}].parent", "must be the digest of the key before")
    return chain


@dataclass(slots=True)
class _Arriving:
    """A block of which not all chunks are here. `place` is where it will go, or why it will not be kept."""

    size: int
    place: Reservation | Outcome
    data: bytearray
    hash: Any = field(default_factory=hashlib.sha256)
    got: int = 0

    def add(self, chunk: bytes) -> None:
        if self.got + len(chunk) > self.size:
            raise BadRequest("data", f"more than the block's size of {self.size} bytes")
        if isinstance(self.place, Reservation):
            self.hash.update(chunk)
            if self.data:
                self.data[self.got : self.got + len(chunk)] = chunk
        self.got += len(chunk)


class Intake:
    """Assembles the blocks of one Put stream. Use as a context manager: leaving it drops a block that is not complete."""

    def __init__(self, store: Store, lock: AbstractContextManager[Any], max_block_bytes: int) -> None:
        self.stored = self.refused = 0
        self._store, self._lock, self._max_block_bytes = store, lock, max_block_bytes
        self._arriving: _Arriving | None = None

    def __enter__(self) -> Intake:
        return self

    def __exit__(self, *_: object) -> None:
        self.end()

    def take(self, chunk: pb.PutRequest) -> None:
        """The next chunk of the stream. BadRequest names the field that is wrong."""
        if len(chunk.data) > MAX_CHUNK:
            raise BadRequest("data", f"must be at most {MAX_CHUNK} bytes in a chunk, is {len(chunk.data)}")
        if len(chunk.checksum) != (DIGEST_BYTES if chunk.last else 0):
            raise BadRequest("checksum", f"must be {DIGEST_BYTES} bytes in a block's last chunk and empty in the others")
        if self._arriving is None:
            self._arriving = self._begin(chunk)
        elif chunk.HasField("key") or chunk.size:
            raise BadRequest("key", "must be set in a block's first chunk only, and so must size")
        self._arriving.add(chunk.data)
        if chunk.last:
            self._finish(self._arriving, chunk.checksum)
            self._arriving = None

    def _begin(self, chunk: pb.PutRequest) -> _Arriving:
        if not chunk.HasField("key"):
            raise BadRequest("key", "must be set in a block's first chunk")
        if not 1 <= chunk.size <= self._max_block_bytes:
            raise BadRequest("size", f"must be 1 to {self._max_block_bytes} bytes, is {chunk.size}")
        key = read_key(chunk.key, "key")
        with self._lock:
            place = self._store.reserve(key, chunk.size)
        kept = isinstance(place, Reservation) and not place.held
        return _Arriving(chunk.size, place, bytearray(chunk.size if kept else 0))

    def _finish(self, block: _Arriving, checksum: bytes) -> None:
        whole = block.got == block.size and block.hash.digest() == checksum
        self._settle(block, checksum if whole else b"")

    def end(self) -> None:
        """The stream is over; what had begun and not ended is refused."""
        block, self._arriving = self._arriving, None
        if block is not None:
            self._settle(block, b"")

    def _settle(self, block: _Arriving, checksum: bytes) -> None:
        """Commits a block, or drops it when `checksum` is empty."""
        outcome = block.place
        if isinstance(outcome, Reservation):
            with self._lock:
                outcome = self._store.commit(outcome, block.data, checksum) if checksum else self._store.abort(outcome)
        if outcome is Outcome.CONFLICT:
            _log.error("a block was put whose key holds other bytes or tokens; the key of its bytes is wrong somewhere")
        self.stored += outcome.good
        self.refused += not outcome.good
