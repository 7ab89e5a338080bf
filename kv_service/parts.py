"""Blocks -> messages of one to two MiB, and back. Pure.

A block lies in memory as the pieces in which it came or went: copying them together would cost as much as sending them.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

import xxhash

from forefetch.v1 import kv_pb2 as pb
from kv_service.block_messages import MAX_PARTS, Buffer, Message, Part, wire_key
from kv_service.keys import Key

MESSAGE = 1 << 20
"""A message is sent once it holds this many bytes."""
PIECE = 2 << 20
"""Most bytes in a part."""

Pieces = Sequence[Buffer]


def cut(data: Buffer) -> Pieces:
    """A block in pieces, which are views of it."""
    if len(data) <= PIECE:
        return (data,)
    view = memoryview(data)
    return tuple(view[at : at + PIECE] for at in range(0, len(view), PIECE))


def checksum_of(pieces: Pieces) -> bytes:
    """XXH3 of the whole block, 128 bits."""
    if len(pieces) == 1:
        return xxhash.xxh3_128_digest(pieces[0])
    whole = xxhash.xxh3_128()
    for piece in pieces:
        whole.update(piece)
    return whole.digest()


class Packer:
    """Collects parts: small blocks share a message, large ones take several."""

    def __init__(self) -> None:
        self._parts: list[Part] = []
        self._size = 0

    def add(self, pieces: Pieces, checksum: bytes, *, index: int = 0, key: pb.BlockKey | None = None) -> Iterator[Message]:
        """Takes a block; gives the messages that are complete with it. `key`: for Put, with the size."""
        for at, piece in enumerate(pieces):
            last = at + 1 == len(pieces)
            if self._parts and self._size + len(piece) > PIECE:
                yield self._message()
            head = pb.BlockPart(index=index, last=last, checksum=checksum if last else b"")
            if key is not None and at == 0:
                head.key.CopyFrom(key)
                head.size = sum(map(len, pieces))
            self._parts.append(Part(head, piece))
            self._size += len(piece)
            if self._size >= MESSAGE or len(self._parts) == MAX_PARTS:
                yield self._message()

    def rest(self) -> Iterator[Message]:
        """What has been collected, if anything."""
        if self._parts:
            yield self._message()

    def _message(self) -> Message:
        parts, self._parts, self._size = self._parts, [], 0
        return Message(parts)


def put_messages(blocks: Iterable[tuple[Key, Buffer]], origin: pb.BlockOrigin | None) -> Iterator[Message]:
    """Of a Put stream."""
    packer = Packer()
    if origin is not None:
        yield Message(origin=origin)
    for key, block in blocks:
        pieces = cut(block)
        yield from packer.add(pieces, checksum_of(pieces), key=wire_key(key))
    yield from packer.rest()


class Broken(Exception):
    """What came is not the block it should be."""


def whole_blocks(messages: Iterable[Message], count: int, most_bytes: int) -> Iterator[Buffer]:
    """At most `count` blocks of a Get, of at most `most_bytes` each, whose parts came in order and match their checksum. Raises
    Broken at the first that does not, so that no service makes a caller hold more than it asked for."""
    pieces: list[Buffer] = []
    index = size = 0
    for part, data in (part for message in messages for part in message.parts):
        if part.index != index:
            raise Broken(f"a part of block {part.index} came within block {index}")
        pieces.append(data)
        size += len(pieces[-1])
        if index >= count or size > most_bytes:
            raise Broken(f"block {index} is more than was asked for")
        if part.last:
            if checksum_of(pieces) != part.checksum:
                raise Broken(f"block {index} arrived corrupt")
            yield pieces[0] if len(pieces) == 1 else b"".join(pieces)
            pieces, index, size = [], index + 1, 0
    if pieces:
        raise Broken(f"block {index} ended early")
