"""Sealed blocks on their way to the KV service, in the background.

Two threads, so that a slow service never holds pages: one copies the bytes of offered blocks out of their pages, the other
sends them. The engine only appends to a list. While the service is away its heartbeat is tried with backoff; the outbox
keeps what fits its budget and drops, counted, what does not.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from functools import partial
from typing import TYPE_CHECKING

from forefetch import rpc
from forefetch.errors import Cancelled, DeadlineExceeded, ForefetchError, Overloaded, Unavailable
from forefetch.telemetry import names
from forefetch.telemetry.context import SpanContext, to_metadata
from forefetch.v1 import router_pb2
from kv_service.client import CALL_S, TRANSFER_S, Geometry, KvClient, next_key, root_key
from router_service.outbox import Block, Outbox

if TYPE_CHECKING:
    from forefetch.spec import ModelSpec
    from forefetch.telemetry.spans import Exporter

_log = logging.getLogger(__name__)
HEARTBEAT_S = 1.0
"""How often an idle hand-over asks whether the service is still the same instance."""
BACKOFF_S = (0.1, 2.0)
ATTEMPTS = 4
"""Sends of one batch to a service that answers its heartbeat, before the batch is dropped."""
_ELEMENT_BYTES = {"float32": 4, "float16": 2, "bfloat16": 2}
_PASSING = (Unavailable, DeadlineExceeded, Overloaded, Cancelled)


class Handover:
    """The router's side of the KV service. `offer`, `forget` and `unpinned` are for the engine's thread and never wait."""

    def __init__(
        self,
        address: str,
        tls: rpc.Tls | None,
        *,
        root: bytes,
        block_bytes: int,
        budget_bytes: int,
        read_block: Callable[[int], bytes],
        exporter: Exporter | None = None,
        transfer_s: float = TRANSFER_S,
    ) -> None:
        """`root`: see kv_service.keys. `read_block(page)` gives the `block_bytes` bytes of a sealed page, on any thread.
        `budget_bytes`: most bytes that wait. `transfer_s`: deadline of a send."""
        self._address, self._client = address, KvClient(address, tls)
        self._read_block, self._exporter, self._transfer_s = read_block, exporter, transfer_s
        self._call_s = min(CALL_S, transfer_s)
        self._outbox = Outbox(partial(next_key, root), max(1, budget_bytes // block_bytes))
        self._changed = threading.Condition()
        self._up = self._closing = False
        self._instance_id = ""
        self._attempts = 0
        self._copier = threading.Thread(target=self._copy_loop, name="kv-copy", daemon=True)
        self._sender = threading.Thread(target=self._send_loop, name="kv-send", daemon=True)
        self._copier.start()
        self._sender.start()

    @classmethod
    def of(
        cls,
        address: str,
        tls: rpc.Tls | None,
        *,
        spec: ModelSpec,
        digest: str,
        kv_format: str,
        page_size: int,
        budget_bytes: int,
        read_block: Callable[[int], bytes],
        exporter: Exporter | None = None,
    ) -> Handover:
        """For blocks of `page_size` tokens of the checkpoint with this digest."""
        geometry = Geometry(spec.layers, spec.kv_heads, spec.head_dim)
        rope = f"{spec.rope.kind} theta={spec.rope.theta!r} {sorted(spec.rope.params.items())!r}"
        return cls(
            address,
            tls,
            root=root_key(b"", digest, geometry, rope, kv_format, "", page_size),
            block_bytes=spec.kv_bytes_per_token(_ELEMENT_BYTES[kv_format]) * page_size,
            budget_bytes=budget_bytes,
            read_block=read_block,
            exporter=exporter,
        )

    # ---- the engine's thread ----

    def offer(
        self, request_key: int, block_index: int, token_ids: Sequence[int], page: int, trace: SpanContext | None = None
    ) -> bool:
        """A request's next sealed block, whose page the caller has pinned. False: take the pin off, now.

        `trace`: the request's span, if it is sampled.
        """
        with self._changed:
            if self._closing:
                return False
            queued = self._outbox.offer(request_key, block_index, token_ids, page, trace)
            self._changed.notify_all()
        return queued

    def forget(self, request_key: int) -> None:
        """The request ended. To be called before anything else is written to its pages."""
        with self._changed:
            self._outbox.forget(request_key)

    def unpinned(self) -> list[int]:
        """Pages whose pins are to be taken off, each reported once."""
        if not self._outbox.unpinned:
            return []
        with self._changed:
            pages, self._outbox.unpinned = self._outbox.unpinned, []
        return pages

    # ---- any thread ----

    def status(self) -> router_pb2.KvStatus:
        """Counters since start."""
        with self._changed:
            return router_pb2.KvStatus(
                address=self._address,
                up=self._up,
                blocks_sent=self._outbox.sent,
                blocks_dropped=self._outbox.dropped,
                blocks_waiting=self._outbox.waiting,
                reconnects=self._outbox.restarts,
            )

    def close(self, timeout_s: float) -> None:
        """Sends what is queued, for at most `timeout_s`, and ends the threads."""
        with self._changed:
            self._closing = True
            self._changed.notify_all()
        self._sender.join(timeout_s)
        self._client.close()  # ends a call that is still running
        self._sender.join(timeout_s)
        self._copier.join(timeout_s)

    # ---- the copying thread ----

    def _copy_loop(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._closing or self._outbox.copyable)
                if not self._outbox.copyable or (self._closing and not self._sender.is_alive()):
                    return
                block = self._outbox.take()
            data = self._bytes_of(block)
            with self._changed:
                self._outbox.copied(block, data)
                self._changed.notify_all()

    def _bytes_of(self, block: Block) -> bytes:
        try:
            return self._read_block(block.page)
        except Exception:
            _log.exception("page %d could not be read for the KV service", block.page)
            return b""

    # ---- the sending thread ----

    def _send_loop(self) -> None:
        backoff = BACKOFF_S[0]
        going = True
        while going:
            try:
                self._greet()
                if self._outbox.ready:
                    self._send()
                backoff, going = BACKOFF_S[0], self._wait()
            except ForefetchError as error:
                self._is_up(False, str(error))
                with self._changed:
                    going = not self._changed.wait_for(lambda: self._closing, backoff)
                backoff = min(2 * backoff, BACKOFF_S[1])

    def _wait(self) -> bool:
        """Until there is something to send, or for a heartbeat; False when it is time to end."""
        outbox = self._outbox
        with self._changed:
            self._changed.wait_for(lambda: outbox.ready or (self._closing and not outbox.used), HEARTBEAT_S)
            return not self._closing or outbox.used > 0

    def _greet(self) -> None:
        """Asks who is there; another instance than before holds nothing of what was sent."""
        info = self._client.describe(self._call_s)
        self._is_up(True, "")
        with self._changed:
            if self._instance_id not in ("", info.instance_id):
                self._outbox.restart()
                self._changed.notify_all()
            self._instance_id = info.instance_id

    def _is_up(self, up: bool, reason: str) -> None:
        if up != self._up:
            _log.info("KV service %s is %s", self._address, "up" if up else f"away: {reason}")
        self._up = up

    def _send(self) -> None:
        """Sends one batch. Raises, with the batch back in the outbox, when it is worth another try."""
        with self._changed:
            blocks = self._outbox.batch()
        stored = 0
        try:
            stored = self._put(blocks)
        except ForefetchError as error:
            self._attempts += 1
            if isinstance(error, _PASSING) and self._attempts < ATTEMPTS:
                with self._changed:
                    self._outbox.put_back(blocks)
                raise
            _log.warning("%d blocks for the KV service are given up: %s", len(blocks), error)
        self._attempts = 0
        with self._changed:
            self._outbox.finish(blocks, stored)
            self._changed.notify_all()  # there is room again

    def _put(self, blocks: Sequence[Block]) -> int:
        """How many of the blocks the service holds now. What it holds already, a common prompt say, is not sent."""
        missing: list[Block] = []
        for run in _runs(blocks):
            missing += run[self._client.look_up([block.key for block in run], self._call_s) :]
        if not missing:
            return len(blocks)
        trace = next((block.trace for block in missing if block.trace and block.trace.sampled), None)
        with self._exporter.client_span(names.KV_PUT, trace) if self._exporter and trace else nullcontext(trace) as span:
            pairs = ((block.key, block.data) for block in missing)
            _, refused = self._client.put(pairs, self._transfer_s, to_metadata(span))
        return len(blocks) - refused


def _runs(blocks: Sequence[Block]) -> list[list[Block]]:
    """Cut where a block is not the child of the one before."""
    runs: list[list[Block]] = []
    for block in blocks:
        if runs and block.key.parent == runs[-1][-1].key.digest:
            runs[-1].append(block)
        else:
            runs.append([block])
    return runs
