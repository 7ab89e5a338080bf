"""KvService over gRPC: callers, threads, deadlines and limits around the vault and the session logs."""

from __future__ import annotations

import threading
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import grpc

from forefetch import rpc, shm
from forefetch.errors import BadRequest, Overloaded
from forefetch.priority import give_way
from forefetch.rpc.auth import Authenticator
from forefetch.telemetry import names
from forefetch.telemetry.spans import Exporter
from forefetch.v1 import kv_pb2 as pb
from forefetch.v1 import kv_pb2_grpc as pb_grpc
from forefetch.version import VERSION
from kv_service import crashes, operators
from kv_service.block_messages import Message
from kv_service.config import KvConfig
from kv_service.disk import Disk, take_lock
from kv_service.intake import Intake, read_digests, read_keys
from kv_service.parts import Packer
from kv_service.session_log import SessionLogs
from kv_service.session_rows import check_record, check_session_id
from kv_service.sharer import SHARERS, Sharers
from kv_service.vault import Vault
from kv_service.wiring import add_to

if TYPE_CHECKING:
    from prometheus_client import CollectorRegistry

SERVICE = "forefetch.v1.KvService"
MAX_KEYS = 16_384
"""Most keys in a LookUp or Get: two million tokens at 128 a block."""
MAX_RECORDS = 4_096
"""Most records in an AppendSession."""
EPOCH_BITS = 20
"""Epochs of new sessions begin with the second of the process's start: they rise over restarts that forget sessions."""
THREADS = 16 + SHARERS
TRANSFERS = 12
"""Put and Get streams at a time; the other threads stay free for health, look-ups and Describe."""
TRANSFER_LIMIT_S = 60.0
"""A Put or Get that takes longer is cancelled: a caller that stopped reading or writing must not keep a thread."""


class KvServicer(pb_grpc.KvServiceServicer):
    """The methods. Thread-safe. `close` writes what is not on disk yet."""

    def __init__(self, config: KvConfig, exporter: Exporter, alone: bool = False) -> None:
        """`alone`: nothing else runs in this process, whose end is this service's."""
        self._config, self._exporter = config, exporter
        self._auth = Authenticator.of(config)
        self._instance_id, self._started = uuid.uuid4().hex, time.monotonic()
        self._lock, self._transfers, self._slow = threading.Lock(), 0, 0
        self._operator, self._set_aside = threading.Lock(), 0
        with ExitStack() as opened:
            folder = Path(config.dir) if config.dir else None
            if folder is not None:
                opened.callback(take_lock(folder).close)
                self._set_aside = crashes.look_back(folder)
                if alone:
                    opened.callback(crashes.look_ahead(folder))
            disk = Disk(folder, config.limits.disk) if folder is not None else None
            epoch = int(time.time()) << EPOCH_BITS if alone else 0
            self.sessions = SessionLogs(config.session_mb << 20, config.session_idle_s, folder, epoch=epoch)
            opened.callback(self.sessions.close)
            self.vault = Vault(config.limits, disk)
            opened.callback(self.vault.close)
            self._sharers = Sharers(self.vault, exporter, config.max_block_bytes, TRANSFER_LIMIT_S)
            self._opened = opened.pop_all()

    def close(self) -> None:
        """Call once, when no call is running any more."""
        self._opened.close()

    @property
    def busy(self) -> bool:
        """Whether a transfer is running."""
        return self._transfers + self._sharers.running > 0

    def _tag(self, context: grpc.ServicerContext) -> bytes:
        """The caller's tenant as names begin with it."""
        tenant = self._auth.tenant(context)
        return self.vault.labels.tag("" if self._config.share_tenants else tenant)

    def _sees(self, context: grpc.ServicerContext) -> Callable[[bytes], bool]:
        """Of which tags the caller may see blocks."""
        mine, named = self._tag(context), [name.strip() for name in self._config.operators.split(",")]
        operator = self._auth.tenant(context) in named
        return lambda tag: operator or tag == mine

    @contextmanager
    def _alone(self, context: grpc.ServicerContext) -> Iterator[Callable[[bytes], bool]]:
        """For what goes through all blocks: one call at a time, so that routers always find a thread. Gives `_sees`."""
        sees = self._sees(context)
        if not self._operator.acquire(blocking=False):
            raise Overloaded("another inspection is running", retry_after_s=1.0)
        try:
            yield sees
        finally:
            self._operator.release()

    @contextmanager
    def _transfer(self, context: grpc.ServicerContext, name: str) -> Iterator[None]:
        with self._lock:
            if self._transfers >= TRANSFERS:
                raise Overloaded(f"{TRANSFERS} transfers are running", retry_after_s=0.1)
            self._transfers += 1
        try:
            with self._limited(context), self._exporter.server_span(context.invocation_metadata(), name):
                yield
        finally:
            with self._lock:
                self._transfers -= 1

    @contextmanager
    def _limited(self, context: grpc.ServicerContext) -> Iterator[None]:
        """A caller that stopped reading or writing does not keep what is held inside for longer than TRANSFER_LIMIT_S."""
        limit = threading.Timer(TRANSFER_LIMIT_S, self._cut, (context,))
        limit.daemon = True
        limit.start()
        try:
            yield
        finally:
            limit.cancel()

    def _cut(self, context: grpc.ServicerContext) -> None:
        self._slow += 1
        context.cancel()

    @rpc.sync_handler
    def Describe(self, request: pb.KvServiceDescribeRequest, context: grpc.ServicerContext) -> pb.KvServiceDescribeResponse:
        """Identity and limits."""
        self._auth.tenant(context)
        return pb.KvServiceDescribeResponse(
            instance_id=self._instance_id,
            budget_bytes=self._config.limits.home,
            max_block_bytes=self._config.max_block_bytes,
            version=VERSION,
            shm_domain=shm.domain(),
        )

    @rpc.sync_handler
    def Put(self, request: Iterator[Message], context: grpc.ServicerContext) -> pb.PutResponse:  # type: ignore[override]
        """Takes blocks until the stream ends; a stream that breaks leaves the blocks that were complete."""
        tag = self._tag(context)
        with self._transfer(context, names.KV_PUT):
            vault, most = self.vault, self._config.max_block_bytes
            reserve = partial(vault.reserve, tag, limit_s=TRANSFER_LIMIT_S)
            with vault.receiving(), Intake(vault, reserve, most) as intake:
                for message in request:
                    if message.origin is not None:
                        intake.origin = operators.remember(vault, message.origin)
                    for part in message.parts:
                        intake.take(part)
            return pb.PutResponse(stored=intake.stored, refused=intake.refused)

    @rpc.sync_handler
    def OpenShm(
        self, request: Iterator[pb.KvServiceOpenShmRequest], context: grpc.ServicerContext
    ) -> Iterator[pb.KvServiceOpenShmResponse]:
        """Takes blocks out of memory that the caller shares, until the stream ends."""
        self._tag(context)
        answer = pb.KvServiceOpenShmResponse(instance_id=self._instance_id)
        yield from self._sharers.serve(request, context, partial(self._tag, context), answer)

    @rpc.sync_handler
    def LookUp(self, request: pb.LookUpRequest, context: grpc.ServicerContext) -> pb.LookUpResponse:
        """The longest contiguous prefix that is held, or the last held block."""
        tag = self._tag(context)
        with self._exporter.server_span(context.invocation_metadata(), names.KV_LOOK_UP):
            digests = read_digests(request.digests, MAX_KEYS)
            if request.last:
                return pb.LookUpResponse(held=self.vault.find_last(tag, digests))
            held, on_disk = self.vault.look_up(tag, digests)
            return pb.LookUpResponse(held=held, on_disk=on_disk)

    @rpc.sync_handler
    def Get(self, request: pb.GetRequest, context: grpc.ServicerContext) -> Iterator[Message]:  # type: ignore[override]
        """Blocks in order, up to the first that is not held."""
        tag, keys = self._tag(context), read_keys(request.keys, MAX_KEYS)
        with self._transfer(context, names.KV_GET):
            packer = Packer()
            for block in self.vault.read(tag, keys):
                yield from packer.add(block.pieces, block.checksum, index=block.index)
            yield from packer.rest()

    @rpc.sync_handler
    def AppendSession(self, request: pb.AppendSessionRequest, context: grpc.ServicerContext) -> pb.AppendSessionResponse:
        """Applies records one after the other."""
        tag = self._tag(context)
        if len(request.records) > MAX_RECORDS:
            raise BadRequest("records", f"must be at most {MAX_RECORDS}, are {len(request.records)}")
        for index, record in enumerate(request.records):
            check_record(record, f"records[{index}]")
        reply = pb.AppendSessionResponse()
        for verdict, session in self.sessions.append(tag, request.records):
            tokens, blocks = len(session.token_ids), len(session.block_digests)
            outcome = f"SESSION_OUTCOME_{verdict.name}"
            reply.acks.append(pb.SessionAck(outcome=outcome, epoch=session.epoch, tokens=tokens, blocks=blocks))
        return reply

    @rpc.sync_handler
    def GetSession(self, request: pb.GetSessionRequest, context: grpc.ServicerContext) -> pb.GetSessionResponse:
        """A session, claimed if the caller says so."""
        tag = self._tag(context)
        check_session_id(request.session_id, "session_id")
        session = self.sessions.get(tag, request.session_id, request.claim)
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
        self._auth.tenant(context)
        return self.stats()

    @rpc.sync_handler
    def Inspect(self, request: pb.InspectRequest, context: grpc.ServicerContext) -> Iterator[pb.InspectResponse]:
        """Blocks held, chain by chain."""
        with self._alone(context) as sees, self._limited(context):
            yield from operators.inspect(self.vault, request, sees)

    @rpc.sync_handler
    def Verify(self, request: pb.VerifyRequest, context: grpc.ServicerContext) -> Iterator[pb.VerifyResponse]:
        """Reads and checks every block."""
        with self._alone(context) as sees:
            for message in operators.verify(self.vault, sees, context.is_active):
                with self._limited(context):  # of its reader's time; the reading of blocks takes as long as it takes
                    yield message

    def stats(self) -> pb.KvServiceGetStatsResponse:
        """What happened since start."""
        sessions = self.sessions
        vault = self.vault.stats()
        vault["damaged_at_start"] += sessions.damaged + self._set_aside
        return pb.KvServiceGetStatsResponse(
            uptime_s=time.monotonic() - self._started,
            slow_peers=self._slow,
            unauthenticated=self._auth.refused,
            sharers=self._sharers.sharers,
            shared_blocks=self._sharers.blocks,
            sessions=len(sessions),
            session_bytes=sessions.bytes,
            **asdict(sessions.counters),
            **vault,
        )


def serve(config: KvConfig) -> None:
    """Serves until a signal."""
    if config.nice:
        give_way(config.nice)  # before there are other threads
    exporter = Exporter(config, names.SERVICE_KV)
    servicer = KvServicer(config, exporter, alone=True)
    try:
        server = rpc.serve_sync(
            config,
            SERVICE,
            lambda server: add_to(server, servicer),
            max_workers=THREADS,
            busy=lambda: servicer.busy,
            registry=_registry(servicer, exporter) if config.metrics_listen else None,
        )
        rpc.settle()
        server.run()
    finally:
        servicer.close()
        exporter.close()


def _registry(servicer: KvServicer, exporter: Exporter) -> CollectorRegistry:
    # Loads Prometheus and numpy: only where they are used.
    from forefetch.telemetry.metrics import KvMetrics, SpanMetrics, new_registry

    registry = new_registry()
    KvMetrics(registry, servicer.stats)
    SpanMetrics(registry, exporter)
    return registry
