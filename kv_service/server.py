"""KvService over gRPC: threads, deadlines and limits around the store."""

from __future__ import annotations

import threading
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict

import grpc

from forefetch import rpc
from forefetch.errors import BadRequest, NotFound, Overloaded
from forefetch.telemetry import names
from forefetch.telemetry.metrics import KvMetrics, new_registry
from forefetch.telemetry.spans import Exporter
from forefetch.v1 import kv_pb2 as pb
from forefetch.v1 import kv_pb2_grpc as pb_grpc
from forefetch.version import VERSION
from kv_service.config import KvConfig
from kv_service.intake import Intake, read_chain
from kv_service.keys import DIGEST_BYTES
from kv_service.store import Block, Store
from kv_service.store_sessions import Session, SessionRecord, Verdict

SERVICE = "forefetch.v1.KvService"
CHUNK = 1 << 20
"""Bytes in a chunk of Get."""
MAX_KEYS = 16_384
"""Most keys in a LookUp or Get: two million tokens at 128 a block."""
MAX_SESSION_ID = 128
"""Most bytes in a session's name."""
THREADS = 16
TRANSFERS = 12
"""Put and Get streams at a time; the other threads stay free for health, look-ups and Describe."""
TRANSFER_LIMIT_S = 60.0
"""A Put or Get that takes longer is cancelled: a caller that stopped reading or writing must not keep a thread."""


class KvServicer(pb_grpc.KvServiceServicer):
    """The methods. Thread-safe: the store is used under a lock that is never held while bytes move."""

    def __init__(self, config: KvConfig, exporter: Exporter) -> None:
        self._config, self._exporter = config, exporter
        self._store, self._lock = Store(config.budget_bytes), threading.Lock()
        self._sessions: dict[str, Session] = {}
        self._instance_id, self._started = uuid.uuid4().hex, time.monotonic()
        self._transfers = 0

    @property
    def busy(self) -> bool:
        """Whether a Put or Get is running."""
        return self._transfers > 0

    @contextmanager
    def _transfer(self, context: grpc.ServicerContext, name: str) -> Iterator[None]:
        with self._lock:
            if self._transfers >= TRANSFERS:
                raise Overloaded(f"{TRANSFERS} transfers are running", retry_after_s=0.1)
            self._transfers += 1
        limit = threading.Timer(TRANSFER_LIMIT_S, context.cancel)
        limit.daemon = True
        limit.start()
        try:
            with self._exporter.server_span(context.invocation_metadata(), name):
                yield
        finally:
            limit.cancel()
            with self._lock:
                self._transfers -= 1

    @rpc.sync_handler
    def Describe(self, request: pb.KvServiceDescribeRequest, context: grpc.ServicerContext) -> pb.KvServiceDescribeResponse:
        """Identity and limits."""
        return pb.KvServiceDescribeResponse(
            instance_id=self._instance_id,
            budget_bytes=self._config.budget_bytes,
            max_block_bytes=self._config.max_block_bytes,
            version=VERSION,
        )

    @rpc.sync_handler
    def Put(self, request: Iterator[pb.PutRequest], context: grpc.ServicerContext) -> pb.PutResponse:
        """Takes blocks until the stream ends; a stream that breaks leaves the blocks that were complete."""
        with self._transfer(context, names.KV_PUT):
            with Intake(self._store, self._lock, self._config.max_block_bytes) as intake:
                for chunk in request:
                    intake.take(chunk)
            return pb.PutResponse(stored=intake.stored, refused=intake.refused)

    @rpc.sync_handler
    def LookUp(self, request: pb.LookUpRequest, context: grpc.ServicerContext) -> pb.LookUpResponse:
        """The longest contiguous prefix that is held."""
        with self._exporter.server_span(context.invocation_metadata(), names.KV_LOOK_UP):
            keys = read_chain(request.keys, MAX_KEYS)
            with self._lock:
                return pb.LookUpResponse(held=self._store.look_up(keys))

    @rpc.sync_handler
    def Get(self, request: pb.GetRequest, context: grpc.ServicerContext) -> Iterator[pb.GetResponse]:
        """Blocks in order, up to the first that is not held."""
        keys = read_chain(request.keys, MAX_KEYS)
        with self._transfer(context, names.KV_GET):
            for index, key in enumerate(keys):
                with self._lock:
                    block = self._store.get(key)
                if block is None:
                    return
                yield from _chunks(index, block)

    @rpc.sync_handler
    def AppendSession(self, request: pb.AppendSessionRequest, context: grpc.ServicerContext) -> pb.AppendSessionResponse:
        """Applies records one after the other."""
        records = [read_record(record, f"records[{index}]") for index, record in enumerate(request.records)]
        with self._lock:
            return pb.AppendSessionResponse(acks=[self._append(*record) for record in records])

    def _append(self, session_id: str, epoch: int, record: SessionRecord) -> pb.SessionAck:
        session = self._sessions.setdefault(session_id, Session())
        verdict = session.verdict(epoch, record)
        if verdict is Verdict.APPENDED:
            session.apply(epoch, record)
        return pb.SessionAck(
            outcome=f"SESSION_OUTCOME_{verdict.name}",
            epoch=session.epoch,
            tokens=len(session.token_ids),
            blocks=len(session.block_digests),
        )

    @rpc.sync_handler
    def GetSession(self, request: pb.GetSessionRequest, context: grpc.ServicerContext) -> pb.GetSessionResponse:
        """A session, claimed if the caller says so."""
        check_session_id(request.session_id, "session_id")
        with self._lock:
            session = self._sessions.get(request.session_id)
            if request.claim:
                session = self._sessions.setdefault(request.session_id, Session())
                session.epoch += 1
            if session is None:
                raise NotFound("no such session")
            return pb.GetSessionResponse(
                epoch=session.epoch,
                token_ids=session.token_ids,
                block_digests=session.block_digests,
                state=session.state,
                tail=session.tail,
                tail_position=session.tail_position,
            )

    @rpc.sync_handler
    def GetStats(self, request: pb.KvServiceGetStatsRequest, context: grpc.ServicerContext) -> pb.KvServiceGetStatsResponse:
        """Counters."""
        return self.stats()

    def stats(self) -> pb.KvServiceGetStatsResponse:
        """What happened since start."""
        with self._lock:
            return pb.KvServiceGetStatsResponse(
                uptime_s=time.monotonic() - self._started,
                blocks=len(self._store),
                bytes=self._store.bytes,
                budget_bytes=self._store.budget_bytes,
                **asdict(self._store.counters),
            )


def check_session_id(session_id: str, field: str) -> None:
    """BadRequest unless it is a name that a session may have."""
    if not 1 <= len(session_id.encode()) <= MAX_SESSION_ID:
        raise BadRequest(field, f"must be 1 to {MAX_SESSION_ID} bytes, is {len(session_id.encode())}")


def read_record(record: pb.SessionRecord, field: str) -> tuple[str, int, SessionRecord]:
    """(session id, epoch, record) off the wire."""
    check_session_id(record.session_id, f"{field}.session_id")
    if record.epoch < 1:
        raise BadRequest(f"{field}.epoch", "must be at least 1")
    if any(len(digest) != DIGEST_BYTES for digest in record.block_digests):
        raise BadRequest(f"{field}.block_digests", f"must be {DIGEST_BYTES} bytes each")
    if record.block_digests and not record.HasField("first_block"):
        raise BadRequest(f"{field}.first_block", "must be set when there are block_digests")
    return (
        record.session_id,
        record.epoch,
        SessionRecord(
            position=record.position,
            token_ids=tuple(record.token_ids),
            first_block=record.first_block if record.HasField("first_block") else None,
            block_digests=tuple(record.block_digests),
            state=record.state if record.HasField("state") else None,
            tail=record.tail if record.HasField("tail") else None,
            tail_position=record.tail_position,
        ),
    )


def _chunks(index: int, block: Block) -> Iterator[pb.GetResponse]:
    view, size = memoryview(block.data), len(block.data)
    for at in range(0, size, CHUNK):
        last = at + CHUNK >= size
        yield pb.GetResponse(
            index=index, data=bytes(view[at : at + CHUNK]), last=last, checksum=block.checksum if last else b""
        )


def serve(config: KvConfig) -> None:
    """Serves until a signal."""
    exporter, registry = Exporter(config, names.SERVICE_KV), new_registry()
    servicer = KvServicer(config, exporter)
    KvMetrics(registry, servicer.stats)
    server = rpc.serve_sync(
        config,
        SERVICE,
        lambda server: pb_grpc.add_KvServiceServicer_to_server(servicer, server),
        max_workers=THREADS,
        busy=lambda: servicer.busy,
        registry=registry,
    )
    try:
        server.run()
    finally:
        exporter.close()
