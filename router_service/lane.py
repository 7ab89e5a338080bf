"""Sealed blocks on their way to one KV service, in the background.

Two threads, so that a slow service never holds pages: one copies the bytes of offered blocks out of their pages, the other
sends them. The engine only appends to a list. While the service is away its heartbeat is tried with backoff; the outbox
keeps what fits its budget and drops, counted, what does not. A service on the same host reads blocks where they are copied to.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Hashable, Sequence
from contextlib import nullcontext
from time import monotonic
from typing import TYPE_CHECKING

from forefetch import shm
from forefetch.errors import Cancelled, DeadlineExceeded, ForefetchError, Overloaded, Unavailable
from forefetch.priority import give_way
from forefetch.telemetry import names
from forefetch.telemetry.context import SpanContext, to_metadata
from forefetch.v1 import router_pb2
from kv_service.client import CALL_S, TRANSFER_S, Buffer, Key, KvInfo, Metadata
from router_service.outbox import BATCH_BYTES, Block, Outbox, runs
from router_service.replicas import Replica

if TYPE_CHECKING:
    from forefetch.telemetry.spans import Exporter
    from kv_service.client import Pool

_log = logging.getLogger(__name__)
HEARTBEAT_S = 1.0
"""How often it is asked whether the service is still the same instance."""
BACKOFF_S = (0.1, 2.0)
LEND_S = 2.0
"""How long a service may read pages where they are, and hold their pins."""
SHARE_AGAIN_S = 30.0
"""How long a service that cannot share memory is not asked again."""
ATTEMPTS = 4
"""Sends of one batch to a service that answers its heartbeat, before the batch is dropped."""
ReadBlock = Callable[[int, Callable[[int], memoryview | None]], Buffer]
_PASSING = (Unavailable, DeadlineExceeded, Overloaded, Cancelled)


class Lane:
    """One KV service's blocks. `offer`, `adopt`, `forget` and `unpinned` are for the engine's thread and never wait."""

    def __init__(
        self,
        replica: Replica,
        *,
        room: int,
        read_block: ReadBlock,
        exporter: Exporter | None = None,
        transfer_s: float = TRANSFER_S,
        shared: tuple[int, int] = (0, 0),
        pool: Pool | None = None,
    ) -> None:
        """`room`: most blocks that wait. `read_block(page, place)` gives the bytes of a sealed page, on any thread, in memory
        from `place(size)`, if that gives any. `transfer_s`: deadline of a send. `shared`: how many blocks, of how many bytes,
        lie in memory shared with a service of this host. `pool`: where the pages are, if others may read them."""
        self._replica, self._client = replica, replica.connect()
        self._shared, self._share_at, self._pool = shared, 0.0, pool  # monotonic seconds
        self._lending = False  # pages are read where they are, so that none is to be copied
        self._read_block, self._exporter, self._transfer_s = read_block, exporter, transfer_s
        self._call_s = min(CALL_S, transfer_s)
        self._outbox = Outbox(room)
        lock = threading.Lock()
        self._changed = threading.Condition(lock)  # for the sender
        self._offered = threading.Condition(lock)  # for the copier
        self._closing, self._attempts = False, 0
        self._instance_id, self._greet_at = "", 0.0  # monotonic seconds
        self._copier = threading.Thread(target=self._copy_loop, name="kv-copy", daemon=True)
        self._sender = threading.Thread(target=self._send_loop, name="kv-send", daemon=True)
        self._copier.start()
        self._sender.start()

    # ---- the engine's thread ----

    def offer(self, chain: Hashable, key: Key, page: int, trace: SpanContext | None = None) -> bool:
        """The next sealed block of a chain, whose page the caller has pinned. False: take the pin off, now. `trace`: the
        request's span, if it is sampled."""
        with self._changed:
            if self._closing:
                return False
            queued = self._outbox.offer(chain, key, page, trace)
            (self._changed if self._lending else self._offered).notify()
        return queued

    def adopt(self, chain: Hashable, key: Key, page: int) -> None:
        """The chain's next block was loaded from this service into `page`."""
        with self._changed:
            self._outbox.adopt(chain, key, page)

    def forget(self, chain: Hashable) -> None:
        """Its request ended. To be called before anything else is written to its pages."""
        with self._changed:
            self._outbox.forget(chain)

    def unpinned(self) -> list[int]:
        """Pages whose pins are to be taken off, each reported once."""
        if not self._outbox.unpinned:
            return []
        with self._changed:
            pages, self._outbox.unpinned = self._outbox.unpinned, []
        return pages

    # ---- any thread ----

    def status(self) -> router_pb2.KvReplica:
        """Counters since start."""
        with self._changed:
            return router_pb2.KvReplica(
                address=self._replica.address,
                up=self._replica.up,
                blocks_sent=self._outbox.sent,
                blocks_dropped=self._outbox.dropped,
                blocks_waiting=self._outbox.waiting,
                reconnects=self._outbox.restarts,
            )

    def end(self) -> None:
        """Takes nothing more."""
        with self._changed:
            self._closing = True
            self._changed.notify()
            self._offered.notify()

    def close(self, timeout_s: float) -> None:
        """Sends what is queued, for at most `timeout_s`, and ends the threads."""
        self.end()
        self._sender.join(timeout_s)
        self._client.close()  # ends a call that is still running
        self._sender.join(timeout_s)
        self._copier.join(timeout_s)

    # ---- the copying thread ----

    def _copy_loop(self) -> None:
        give_way()
        while True:
            with self._changed:
                while not (self._may_copy() or (self._closing and not self._lending)):
                    if self._outbox.ready:
                        self._changed.notify()
                    self._offered.wait()
                if not self._outbox.copyable or (self._closing and not self._sender.is_alive()):
                    return
                block = self._outbox.take()
            data = self._bytes_of(block)
            with self._changed:
                self._outbox.copied(block, data)
                del data  # the place is the block's alone
                if self._outbox.ready or not self._outbox.used:
                    self._changed.notify()  # else when all that was sealed together is copied

    def _may_copy(self) -> bool:
        return self._outbox.copyable and not (self._lending and self._outbox.lendable)

    def _bytes_of(self, block: Block) -> Buffer:
        try:
            return self._read_block(block.page, self._client.room)
        except Exception:
            _log.exception("page %d could not be read for the KV service", block.page)
            return b""

    # ---- the sending thread ----

    def _send_loop(self) -> None:
        give_way()  # as the threads do that gRPC makes for it
        backoff = BACKOFF_S[0]
        going = True
        while going:
            try:
                self._greet()
                self._lend()
                if self._outbox.ready:
                    self._send()
                backoff, going = BACKOFF_S[0], self._wait()
            except ForefetchError as error:
                self._replica.is_up(False, str(error))
                self._greet_at = 0.0
                with self._changed:
                    going = not self._changed.wait_for(lambda: self._closing, backoff)
                backoff = min(2 * backoff, BACKOFF_S[1])
        with self._changed:
            self._set_lending(False)

    def _wait(self) -> bool:
        """Until there is something to send, or for a heartbeat; False when it is time to end."""
        outbox = self._outbox
        with self._changed:
            self._changed.wait_for(
                lambda: outbox.ready or (self._lending and outbox.lendable) or (self._closing and not outbox.used), HEARTBEAT_S
            )
            return not self._closing or outbox.used > 0

    def _greet(self) -> None:
        """Asks, now and then, who is there; another instance than before holds nothing of what was sent."""
        if monotonic() < self._greet_at:
            return
        if self._client.shares:  # so it is the same instance
            self._client.ping(self._call_s)
        else:
            self._meet(self._client.describe(self._call_s))
        self._replica.is_up(True)
        self._greet_at = monotonic() + HEARTBEAT_S

    def _meet(self, info: KvInfo) -> None:
        with self._changed:
            if self._instance_id not in ("", info.instance_id):
                self._outbox.restart()
                self._offered.notify()
                self._share_at = 0.0
            self._instance_id = info.instance_id
        slots, size = self._shared
        if not slots or not info.shm_domain or info.shm_domain != shm.domain() or monotonic() < self._share_at:
            return
        self._share_at = monotonic() + SHARE_AGAIN_S
        try:
            self._client.share(slots, size, self._call_s, self._pool)
        except ForefetchError as error:
            _log.info("blocks go to KV service %s over gRPC: %s", self._replica.address, error)

    def _lend(self) -> None:
        """Has the service read pages, if it can, until none waits. Raises when it fails; then they are copied."""
        while blocks := self._to_be_read():
            try:
                stored = self._calling(blocks, self._put_pages)
            except ForefetchError:
                with self._changed:
                    self._outbox.not_read(blocks)
                    self._set_lending(False)
                raise
            with self._changed:
                self._outbox.finish(blocks, stored)
                if self._may_copy():
                    self._offered.notify()  # what had found no room

    def _put_pages(self, blocks: Sequence[Block], metadata: Metadata) -> int:
        pages = [(block.key, block.page) for block in blocks]
        return self._client.put_pages(pages, min(LEND_S, self._transfer_s), metadata)[0]

    def _to_be_read(self) -> list[Block]:
        """Pages that the service reads next where they are; none when none waits, or it cannot."""
        with self._changed:
            self._set_lending(self._client.lends)
            return self._outbox.lend(max(1, BATCH_BYTES // max(self._shared[1], 1))) if self._lending else []

    def _set_lending(self, lends: bool) -> None:
        """Under the lock: whether the service reads pages where they are. If not, what waits is to be copied."""
        if self._lending != lends:
            self._lending = lends
            self._offered.notify()

    def _send(self) -> None:
        """Sends one batch. Raises, with the batch back in the outbox, when it is worth another try."""
        with self._changed:
            self._set_lending(False)  # this may take long
            blocks = self._outbox.batch()
        try:
            stored = self._put(blocks)
        except ForefetchError as error:
            stored, self._attempts = 0, self._attempts + 1
            if isinstance(error, _PASSING) and self._attempts < ATTEMPTS:
                with self._changed:
                    self._outbox.put_back(blocks)
                raise
            _log.warning("%d blocks for the KV service are given up: %s", len(blocks), error)
        self._attempts = 0
        with self._changed:
            self._outbox.finish(blocks, stored)
            self._offered.notify()  # there is room again

    def _put(self, blocks: Sequence[Block]) -> int:
        """How many of the blocks the service holds now. What it holds already, a common prompt say, is not sent."""
        missing = [block for run in runs(blocks) for block in run[self._held(run) :]]
        if not missing:
            return len(blocks)
        return len(blocks) - len(missing) + self._calling(missing, self._put_bytes)

    def _put_bytes(self, blocks: Sequence[Block], metadata: Metadata) -> int:
        return self._client.put(((block.key, block.data) for block in blocks), self._transfer_s, metadata)[0]

    def _calling(self, blocks: Sequence[Block], call: Callable[[Sequence[Block], Metadata], int]) -> int:
        """A call that belongs to the first sampled request of these blocks."""
        trace = next((block.trace for block in blocks if block.trace and block.trace.sampled), None)
        with self._exporter.client_span(names.KV_PUT, trace) if self._exporter and trace else nullcontext(trace) as span:
            return call(blocks, to_metadata(span))

    def _held(self, run: Sequence[Block]) -> int:
        """How many of these the service holds. It is not asked again behind a block that it did not hold, because prefixes lose
        their ends first; what it holds all the same, it compares and does not keep twice. Nor is it asked where nothing is to
        be sent."""
        if run[0].chain.absent or all(self._client.in_room(block.data) for block in run):
            return 0
        held = self._client.look_up([block.key for block in run], self._call_s)
        for block in run[held:]:
            block.chain.absent = True
        return held
