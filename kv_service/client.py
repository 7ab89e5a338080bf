"""What a router uses of the KV service. The only module of this package that another service imports."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import grpc

from forefetch import rpc
from forefetch.errors import Cancelled, DeadlineExceeded, NotFound, Overloaded, Unavailable
from forefetch.v1 import kv_pb2 as pb
from forefetch.v1 import kv_pb2_grpc as pb_grpc
from kv_service.keys import Geometry, Key, chain, child_key, next_key, root_key

__all__ = ["Geometry", "Key", "KvClient", "KvInfo", "chain", "child_key", "next_key", "root_key"]

CHUNK = 1 << 20
"""Bytes in a chunk of Put."""
CALL_S = 5.0
"""Deadline of calls that move no blocks, seconds."""
TRANSFER_S = 30.0
"""Deadline of calls that move blocks, seconds, unless the caller says otherwise."""

Metadata = Sequence[tuple[str, str]]


@dataclass(frozen=True)
class KvInfo:
    """What a KV service says of itself. `instance_id` changes with every start of the process."""

    instance_id: str
    budget_bytes: int
    max_block_bytes: int
    version: str


class KvClient:
    """One channel to one KV service. Thread-safe. Calls raise ForefetchError (Unavailable, DeadlineExceeded, ...).

    `broken_reads` counts gets that ended early for another reason than a block that is not held.
    """

    def __init__(self, address: str, tls: rpc.Tls | None = None) -> None:
        self.broken_reads = 0
        self._channel = rpc.channel(address, tls)
        self._stub = pb_grpc.KvServiceStub(self._channel)

    def close(self) -> None:
        """Ends running calls with Cancelled and refuses new ones."""
        self._channel.close()

    def describe(self, timeout_s: float = CALL_S) -> KvInfo:
        """Identity and limits."""
        with _errors():
            reply = self._stub.Describe(pb.KvServiceDescribeRequest(), timeout=timeout_s)
        return KvInfo(reply.instance_id, reply.budget_bytes, reply.max_block_bytes, reply.version)

    def put(
        self, blocks: Iterable[tuple[Key, bytes]], timeout_s: float = TRANSFER_S, metadata: Metadata = ()
    ) -> tuple[int, int]:
        """Sends blocks, parents before children; (held now, refused). Safe to repeat."""
        with _errors():
            reply = self._stub.Put(_put_chunks(blocks), timeout=timeout_s, metadata=tuple(metadata))
        return reply.stored, reply.refused

    def look_up(self, keys: Sequence[Key], timeout_s: float = CALL_S, metadata: Metadata = ()) -> int:
        """Of a chain of keys, how many from the first on are held."""
        request = pb.LookUpRequest(keys=map(_wire_key, keys))
        with _errors():
            return self._stub.LookUp(request, timeout=timeout_s, metadata=tuple(metadata)).held

    def get(self, keys: Sequence[Key], timeout_s: float = TRANSFER_S, metadata: Metadata = ()) -> list[bytes]:
        """The blocks of a chain of keys up to the first that is not held, or did not arrive whole and in time.

        A service that is away, a deadline, a short or corrupt block: what came before is returned, and counted.
        """
        blocks: list[bytes] = []
        request = pb.GetRequest(keys=map(_wire_key, keys))
        with _errors():
            stream = self._stub.Get(request, timeout=timeout_s, metadata=tuple(metadata))
        try:
            with _errors():
                for block in _whole_blocks(stream):
                    blocks.append(block)
        except _MISSES:
            stream.cancel()
            self.broken_reads += 1
        return blocks

    def stats(self, timeout_s: float = CALL_S) -> pb.KvServiceGetStatsResponse:
        """Counters since the service's start."""
        with _errors():
            return self._stub.GetStats(pb.KvServiceGetStatsRequest(), timeout=timeout_s)


_MISSES = (Unavailable, DeadlineExceeded, Cancelled, Overloaded, NotFound)


@contextmanager
def _errors() -> Iterator[None]:
    try:
        yield
    except grpc.RpcError as error:
        raise rpc.error_of(error) from None
    except ValueError:  # what gRPC says of a closed channel
        raise Cancelled("the client is closed") from None


def _wire_key(key: Key) -> pb.BlockKey:
    return pb.BlockKey(digest=key.digest, parent=key.parent, token_ids=key.token_ids)


def _put_chunks(blocks: Iterable[tuple[Key, bytes]]) -> Iterator[pb.PutRequest]:
    for key, block in blocks:
        view, digest = memoryview(block), hashlib.sha256(block).digest()
        for at in range(0, len(block), CHUNK):
            chunk = pb.PutRequest(data=bytes(view[at : at + CHUNK]), last=at + CHUNK >= len(block))
            if at == 0:
                chunk.key.CopyFrom(_wire_key(key))
                chunk.size = len(block)
            if chunk.last:
                chunk.checksum = digest
            yield chunk


def _whole_blocks(chunks: Iterable[pb.GetResponse]) -> Iterator[bytes]:
    """Blocks whose chunks came in order and match their checksum; NotFound at the first that does not."""
    parts: list[bytes] = []
    index = 0
    for chunk in chunks:
        parts.append(chunk.data)
        if chunk.index != index:
            raise NotFound(f"a chunk of block {chunk.index} came within block {index}")
        if chunk.last:
            block = b"".join(parts)
            if hashlib.sha256(block).digest() != chunk.checksum:
                raise NotFound(f"block {index} arrived corrupt")
            yield block
            parts, index = [], index + 1
    if parts:
        raise NotFound(f"block {index} ended early")
