"""Blocks -> messages of one to two MiB, and back. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import xxhash

from forefetch.v1 import kv_pb2 as pb

MESSAGE = 1 << 20
"""A message is sent once it holds this many bytes; no part has more."""


class Packer:
    """Collects parts: small blocks share a message, large ones take several."""

    def __init__(self) -> None:
        self._parts: list[pb.BlockPart] = []
        self._size = 0

    def add(
        self, data: bytes | bytearray | memoryview, checksum: bytes, *, index: int = 0, key: pb.BlockKey | None = None
    ) -> Iterator[list[pb.BlockPart]]:
        """Takes a block; gives the messages' parts that are complete with it. `key`: for Put, with the size."""
        view, size = memoryview(data), len(data)
        for at in range(0, size, MESSAGE):
            last = at + MESSAGE >= size
            part = pb.BlockPart(index=index, data=bytes(view[at : at + MESSAGE]), last=last, checksum=checksum if last else b"")
            if key is not None and at == 0:
                part.key.CopyFrom(key)
                part.size = size
            self._parts.append(part)
            self._size += len(part.data)
            if self._size >= MESSAGE:
                yield self.rest()

    def rest(self) -> list[pb.BlockPart]:
        """What has been collected, perhaps nothing."""
        parts, self._parts, self._size = self._parts, [], 0
        return parts


class Broken(Exception):
    """What came is not the block it should be."""


def whole_blocks(messages: Iterable[pb.GetResponse]) -> Iterator[bytes]:
    """Blocks of a Get whose parts came in order and match their checksum. Raises Broken at the first that does not."""
    pieces: list[bytes] = []
    index = 0
    for part in (part for message in messages for part in message.parts):
        if part.index != index:
            raise Broken(f"a part of block {part.index} came within block {index}")
        pieces.append(part.data)
        if part.last:
            block = pieces[0] if len(pieces) == 1 else b"".join(pieces)
            if xxhash.xxh3_128_digest(block) != part.checksum:
                raise Broken(f"block {index} arrived corrupt")
            yield block
            pieces, index = [], index + 1
    if pieces:
        raise Broken(f"block {index} ended early")
