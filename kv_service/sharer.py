"""The service's end of memory that callers share with it."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING

from forefetch import shm
from forefetch.errors import BadRequest, Mismatch, Overloaded
from forefetch.lending import Name, borrow
from forefetch.telemetry import names
from forefetch.telemetry.context import TRACEPARENT
from forefetch.v1 import kv_pb2 as pb
from kv_service import operators
from kv_service.intake import Intake
from kv_service.shared_frames import FRAME, REPLY_BYTES, Pool, block_in, given_up, read_frame, write_reply

if TYPE_CHECKING:
    import grpc

    from forefetch.telemetry.spans import Exporter
    from kv_service.vault import Vault

_log = logging.getLogger(__name__)
SHARERS = 8
"""Callers that share memory at a time; each has a thread. Others use Put."""
IDLE_S = 1.0
"""Longest sleep without a look around."""


class Segment:
    """One caller's segment. Its bytes may change at any time: whoever checks them, checks a copy."""

    def __init__(self, hello: pb.KvServiceOpenShmRequest) -> None:
        """Maps it. Mismatch: it cannot be reached, or is no segment for blocks."""
        self._memory = shm.Segment.open(hello.segment, hello.nonce)
        if len(self._memory.request) < FRAME or len(self._memory.reply) < REPLY_BYTES:
            raise Mismatch("segment: has no room for a frame")
        self._left = threading.Event()
        self._pool, self._pages = Pool.of_wire(hello.pool), memoryview(b"")
        if hello.HasField("pool"):
            self._borrow()

    def _borrow(self) -> None:
        try:
            memory = borrow(Name(*self._pool.name))
        except Mismatch as error:
            _log.info("blocks are copied twice: %s", error)
            return
        if not self._pool.fits(len(memory)):
            raise BadRequest("pool", "its pages do not lie within it")
        self._pages = memory

    @property
    def lends(self) -> bool:
        """Whether the caller's pool can be read."""
        return len(self._pages) > 0

    def take(self, block: pb.SharedBlock, intake: Intake) -> None:
        """Gives a block to `intake`. Raises BadRequest, Cancelled."""
        area = self._memory.request
        if block.HasField("page"):
            if not self.lends:  # what the caller says of its pool was never looked at
                raise BadRequest("blocks.page", "there is no pool that can be read")
            intake.take_page(block, self._pool.page_in(self._pages, block.page), lambda: not given_up(area))
        else:
            intake.take_shared(block, block_in(area, block))

    def leave(self) -> None:
        """Ends `serve`. Any thread."""
        self._left.set()
        self._memory.request_bell.nudge()

    def serve(self, put: Callable[[pb.SharedPut], tuple[int, int]]) -> None:
        """Answers frames until `leave`; `put` gives (stored, refused). What `put` raises ends it."""
        memory, seen = self._memory, 0
        while not self._left.is_set():
            if memory.request_bell.wait(seen, 0, IDLE_S):
                seen = memory.request_bell.value
                write_reply(memory.reply, seen, *put(read_frame(memory.request)))
                memory.reply_bell.ring(seen)


class Sharers:
    """All callers that share memory. `limit_s`: time that a block may take. `sharers` and `blocks` are for GetStats."""

    def __init__(self, vault: Vault, exporter: Exporter, max_block_bytes: int, limit_s: float) -> None:
        self.sharers = self.blocks = self.running = 0
        self._vault, self._exporter = vault, exporter
        self._max_block_bytes, self._limit_s = max_block_bytes, limit_s
        self._lock = threading.Lock()

    def serve(
        self,
        request: Iterator[pb.KvServiceOpenShmRequest],
        context: grpc.ServicerContext,
        tag: Callable[[], bytes],
        answer: pb.KvServiceOpenShmResponse,
    ) -> Iterator[pb.KvServiceOpenShmResponse]:
        """Maps the caller's segment, says so, and takes blocks out of it until the stream ends. `tag`: the caller's tenant; who
        is still admitted is asked for every frame, as for a call."""
        with self._admitted():
            hello = next(request, None)
            if hello is None:
                raise BadRequest("segment", "no segment was named")
            segment = Segment(hello)
            origin = operators.remember(self._vault, hello.origin) if hello.HasField("origin") else b""
            if context.add_callback(segment.leave):
                answer.pool = segment.lends
                yield answer
                segment.serve(lambda frame: self._put(frame, segment, tag(), origin))

    @contextmanager
    def _admitted(self) -> Iterator[None]:
        with self._lock:
            if self.sharers >= SHARERS:
                raise Overloaded(f"{SHARERS} callers share memory", retry_after_s=1.0)
            self.sharers += 1
        try:
            yield
        finally:
            with self._lock:
                self.sharers -= 1

    def _put(self, frame: pb.SharedPut, segment: Segment, tag: bytes, origin: bytes) -> tuple[int, int]:
        """(stored, refused) of a frame."""
        if not frame.blocks:
            return 0, 0
        vault, reserve = self._vault, partial(self._vault.reserve, tag, limit_s=self._limit_s)
        with self._counted(len(frame.blocks)), self._exporter.server_span(((TRACEPARENT, frame.traceparent),), names.KV_PUT):
            with vault.receiving(), Intake(vault, reserve, self._max_block_bytes) as intake:
                intake.origin = origin
                for block in frame.blocks:
                    segment.take(block, intake)
            return intake.stored, intake.refused

    @contextmanager
    def _counted(self, blocks: int) -> Iterator[None]:
        with self._lock:
            self.running += 1
            self.blocks += blocks
        try:
            yield
        finally:
            with self._lock:
                self.running -= 1
