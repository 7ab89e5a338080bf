"""What a router uses of the KV service. The only module of this package that another service imports."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from itertools import groupby
from typing import Any

import grpc

from forefetch import rpc
from forefetch.errors import (
    Cancelled,
    DeadlineExceeded,
    ForefetchError,
    Mismatch,
    NotFound,
    Overloaded,
    StaleEpoch,
    Unavailable,
)
from forefetch.telemetry.context import TRACEPARENT
from forefetch.v1 import kv_pb2 as pb
from forefetch.v1 import kv_pb2_grpc as pb_grpc
from kv_service.answers import KvInfo, SessionAck, SessionState
from kv_service.block_messages import Buffer, Message, wire_key, wire_origin
from kv_service.keys import Geometry, Key, Origin, chain, child_key, next_key, root_key
from kv_service.parts import Broken, put_messages, whole_blocks
from kv_service.shared_frames import Pool
from kv_service.sharing import Sharing
from kv_service.store_sessions import SessionRecord, Verdict

__all__ = [
    "Buffer",
    "Geometry",
    "Key",
    "KvClient",
    "KvInfo",
    "Origin",
    "Pool",
    "SessionAck",
    "SessionRecord",
    "SessionState",
    "Verdict",
    "chain",
    "child_key",
    "next_key",
    "root_key",
]

CALL_S = 5.0
"""Deadline of calls that move no blocks, seconds."""
TRANSFER_S = 30.0
"""Deadline of calls that move blocks, seconds, unless the caller says otherwise."""

PUT, GET = "/forefetch.v1.KvService/Put", "/forefetch.v1.KvService/Get"

Metadata = Sequence[tuple[str, str]]


class KvClient:
    """One channel to one KV service. Thread-safe. Calls raise ForefetchError (Unavailable, DeadlineExceeded, ...).

    `broken_reads` counts gets that ended early for another reason than a block that is not held. `bearer`: who this caller
    is, as metadata (rpc.auth.bearer reads it from a file). `origin`: what the blocks it puts are, for operators.
    """

    def __init__(
        self,
        address: str,
        tls: rpc.Tls | None = None,
        bearer: Callable[[], Metadata] = tuple,
        origin: Origin | None = None,
    ) -> None:
        self.broken_reads = 0
        self._bearer = bearer
        self._origin = wire_origin(origin) if origin else None
        self._channel = rpc.channel(address, tls)
        self._stub = pb_grpc.KvServiceStub(self._channel)
        self._put, self._get = _block_stubs(self._channel)
        self._sharing: Sharing | None = None

    def close(self) -> None:
        """Ends running calls with Cancelled and refuses new ones."""
        if self._sharing is not None:
            self._sharing.close()
        self._channel.close()

    def _metadata(self, more: Metadata = ()) -> tuple[tuple[str, str], ...]:
        return (*more, *self._bearer())

    def describe(self, timeout_s: float = CALL_S) -> KvInfo:
        """Identity and limits."""
        with _errors():
            reply = self._stub.Describe(pb.KvServiceDescribeRequest(), timeout=timeout_s, metadata=self._metadata())
        return KvInfo(reply.instance_id, reply.budget_bytes, reply.max_block_bytes, reply.version, reply.shm_domain)

    # ---- blocks through shared memory ----

    def share(self, slots: int, slot_bytes: int, timeout_s: float = CALL_S, pool: Pool | None = None) -> None:
        """From now on there is `room` for `slots` blocks, of at most `slot_bytes` each, where the service reads them. Raises
        Mismatch where it cannot be (another host), Overloaded, Unavailable: blocks can be put all the same. `pool`: memory of
        this process in which the service may read blocks, if it can."""

        def open_shm(requests: Any) -> Any:
            return self._stub.OpenShm(requests, metadata=self._metadata())

        with _errors():
            sharing = Sharing(open_shm, slots, slot_bytes, self._origin, pool)
            try:
                sharing.open(timeout_s)
            except ForefetchError:
                sharing.close()
                raise
        self._sharing = sharing

    @property
    def shares(self) -> bool:
        """Whether blocks can go through shared memory now."""
        return self._sharing is not None and self._sharing.alive

    @property
    def lends(self) -> bool:
        """Whether the service reads pages of the pool now: `put_pages` works."""
        return self._sharing is not None and self._sharing.lends

    def put_pages(
        self, pages: Sequence[tuple[Key, int]], timeout_s: float = CALL_S, metadata: Metadata = ()
    ) -> tuple[int, int]:
        """`put` of blocks that are pages of the pool. Until it returns or raises nobody may write to them."""
        if self._sharing is None or not self._sharing.lends:
            raise Unavailable("the KV service does not read this pool")
        return self._sharing.put_pages(pages, timeout_s, dict(metadata).get(TRACEPARENT, ""))

    def room(self, size: int) -> memoryview | None:
        """Memory for a block that is going to be put, where the service reads it; None: there is none left. It is free again
        when nobody refers to it."""
        return self._sharing.room(size) if self._sharing is not None else None

    def in_room(self, data: Buffer) -> bool:
        """Whether a block lies in `room` that the service still reads."""
        return self._sharing is not None and self._sharing.holds(data)

    def ping(self, timeout_s: float = CALL_S) -> None:
        """Asks, through shared memory, whether the service is there."""
        if self._sharing is None:
            raise Unavailable("no memory is shared")
        self._sharing.put((), timeout_s)

    # ---- blocks ----

    def put(
        self, blocks: Iterable[tuple[Key, Buffer]], timeout_s: float = TRANSFER_S, metadata: Metadata = ()
    ) -> tuple[int, int]:
        """Sends blocks, parents before children; (held now, refused). Safe to repeat. What lies in `room` is not copied."""
        sharing = self._sharing
        if sharing is None or not sharing.alive:
            return self._put_stream(blocks, timeout_s, metadata)
        stored = refused = 0
        runs = [(shared, list(run)) for shared, run in groupby(blocks, lambda pair: sharing.holds(pair[1]))]
        for shared, run in runs:
            if shared:
                more = sharing.put(run, timeout_s, dict(metadata).get(TRACEPARENT, ""))
            else:
                more = self._put_stream(run, timeout_s, metadata)
            stored, refused = stored + more[0], refused + more[1]
        return stored, refused

    def _put_stream(self, blocks: Iterable[tuple[Key, Buffer]], timeout_s: float, metadata: Metadata) -> tuple[int, int]:
        with _errors():
            reply = self._put(put_messages(blocks, self._origin), timeout=timeout_s, metadata=self._metadata(metadata))
        return reply.stored, reply.refused

    def look_up(self, keys: Sequence[Key], timeout_s: float = CALL_S, metadata: Metadata = ()) -> int:
        """Of keys of one chain, in its order, how many from the first on are held."""
        return self.locate(keys, timeout_s, metadata)[0]

    def locate(self, keys: Sequence[Key], timeout_s: float = CALL_S, metadata: Metadata = ()) -> tuple[int, int]:
        """`look_up`, and how many of these blocks would have to be read from disk."""
        request = pb.LookUpRequest(digests=_digests(keys))
        with _errors():
            reply = self._stub.LookUp(request, timeout=timeout_s, metadata=self._metadata(metadata))
        return reply.held, reply.on_disk

    def find_last(self, keys: Sequence[Key], timeout_s: float = CALL_S, metadata: Metadata = ()) -> int:
        """How many keys there are up to the last that is held, whatever is missing before it; 0: none is."""
        request = pb.LookUpRequest(digests=_digests(keys), last=True)
        with _errors():
            return self._stub.LookUp(request, timeout=timeout_s, metadata=self._metadata(metadata)).held

    def get(
        self, keys: Sequence[Key], timeout_s: float = TRANSFER_S, metadata: Metadata = (), most_bytes: int = 1 << 30
    ) -> list[Buffer]:
        """The blocks of keys of one chain, of at most `most_bytes` each, up to the first that is not held, or did not arrive
        whole and in time.

        A service that is away, a deadline, a short or corrupt block: what came before is returned, and counted.
        """
        blocks: list[Buffer] = []
        request = pb.GetRequest(keys=map(wire_key, keys))
        with _errors():
            stream = self._get(request, timeout=timeout_s, metadata=self._metadata(metadata))
        try:
            with _errors():
                for block in whole_blocks(stream, len(keys), most_bytes):
                    blocks.append(block)
        except _MISSES:
            stream.cancel()
            self.broken_reads += 1
        return blocks

    def append_session(
        self, session_id: str, epoch: int, record: SessionRecord, timeout_s: float = CALL_S, metadata: Metadata = ()
    ) -> SessionAck:
        """Adds to one session's log; when it returns, the record outlives a kill of either side. Safe to repeat.

        StaleEpoch: another router has the session now. Mismatch: the record does not follow from what the log holds.
        Overloaded: the log has no room.
        """
        ack = self.append_sessions([(session_id, epoch, record)], timeout_s, metadata)[0]
        if ack.verdict is Verdict.STALE_EPOCH:
            raise StaleEpoch(f"the session is held under epoch {ack.epoch}, newer than {epoch}")
        if ack.verdict is Verdict.NO_ROOM:
            raise Overloaded("the session log has no room", retry_after_s=1.0)
        if ack.verdict is not Verdict.APPENDED:
            raise Mismatch(f"{ack.verdict.name}: the log holds {ack.tokens} tokens and {ack.blocks} blocks of the session")
        return ack

    def append_sessions(
        self, records: Sequence[tuple[str, int, SessionRecord]], timeout_s: float = CALL_S, metadata: Metadata = ()
    ) -> list[SessionAck]:
        """`append_session` for many (session id, epoch, record) in one call; each has its own verdict."""
        request = pb.AppendSessionRequest(records=[_wire_record(*one) for one in records])
        with _errors():
            reply = self._stub.AppendSession(request, timeout=timeout_s, metadata=self._metadata(metadata))
        return [SessionAck(Verdict(ack.outcome), ack.epoch, ack.tokens, ack.blocks) for ack in reply.acks]

    def get_session(
        self, session_id: str, claim: bool = False, timeout_s: float = CALL_S, metadata: Metadata = ()
    ) -> SessionState | None:
        """The session as its log has it, None if there is none. `claim`: take it over (or begin it) under a new epoch."""
        request = pb.GetSessionRequest(session_id=session_id, claim=claim)
        try:
            with _errors():
                reply = self._stub.GetSession(request, timeout=timeout_s, metadata=self._metadata(metadata))
        except NotFound:
            return None
        tokens, digests = tuple(reply.token_ids), tuple(reply.block_digests)
        return SessionState(reply.epoch, tokens, digests, reply.state, reply.tail, reply.tail_position)

    def stats(self, timeout_s: float = CALL_S) -> pb.KvServiceGetStatsResponse:
        """Counters since the service's start."""
        with _errors():
            return self._stub.GetStats(pb.KvServiceGetStatsRequest(), timeout=timeout_s, metadata=self._metadata())


def _block_stubs(channel: grpc.Channel) -> tuple[Any, Any]:
    """Put(Iterator[Message]) -> PutResponse and Get(GetRequest) -> Iterator[Message]."""
    put = channel.stream_unary(PUT, request_serializer=Message.encode, response_deserializer=pb.PutResponse.FromString)
    get = channel.unary_stream(GET, request_serializer=pb.GetRequest.SerializeToString, response_deserializer=Message.decode)
    return put, get


_MISSES = (Unavailable, DeadlineExceeded, Cancelled, Overloaded, Broken)


@contextmanager
def _errors() -> Iterator[None]:
    try:
        yield
    except grpc.RpcError as error:
        raise rpc.error_of(error) from None
    except ValueError:  # what gRPC says of a closed channel
        raise Cancelled("the client is closed") from None


def _digests(keys: Sequence[Key]) -> bytes:
    return b"".join([key.digest for key in keys])


def _wire_record(session_id: str, epoch: int, record: SessionRecord) -> pb.SessionRecord:
    return pb.SessionRecord(
        session_id=session_id,
        epoch=epoch,
        position=record.position,
        token_ids=record.token_ids,
        first_block=record.first_block,
        block_digests=record.block_digests,
        state=record.state,
        tail=record.tail,
        tail_position=record.tail_position,
    )
