"""Spans leave the process here: a bounded queue, one thread, one collector.

A request's spans are built on that thread, after it ended, and only if it was sampled, slow or failed; the request itself
pays for a queue's append. A collector that is slow or dead costs spans (counted in `dropped`), one log line when it goes and
one when it is back, and at most two seconds at shutdown. Without an endpoint nothing of OpenTelemetry is imported.
"""

from __future__ import annotations

import logging
import os
import random
import socket
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from queue import Empty, SimpleQueue
from typing import TYPE_CHECKING, TypeVar

from forefetch.errors import ForefetchError
from forefetch.settings import ServiceConfig
from forefetch.telemetry.book import RequestBook, RequestRecord
from forefetch.telemetry.context import SpanContext, from_metadata, new_root

if TYPE_CHECKING:
    from forefetch.telemetry.otlp import Batch, Kind, Sender, Span

T = TypeVar("T")
logger = logging.getLogger(__name__)

# What the queue holds: spans, or something that draws them (a request waiting to be drawn counts once).
_Item = Callable[[], Iterable["Span"]]

_QUEUE = 2_048
_BATCH = 512
_FLUSH_S = 0.5
# Spans (some 50 us each) between two pauses; so the thread takes a third of the interpreter at most.
_PACE, _PAUSE_S = 8, 0.001
_SEND_S = 5.0
_BACKOFF_S = (0.25, 10.0)
_SLOW_FACTOR, _SLOW_WINDOW, _SLOW_LEAST = 3, 256, 20


class Exporter:
    """The spans of one process. All methods but `close` return at once, from any thread."""

    def __init__(
        self,
        config: ServiceConfig,
        service: str,
        *,
        instance: str = "",
        book: RequestBook | None = None,
        model: str = "",
    ) -> None:
        """`service`: service.name, one of names.SERVICE_*; `instance`: service.instance.id, host:pid unless given. A router
        gives its `book` and the `model`'s name, for `request_finished`."""
        self.enabled = bool(config.otlp_endpoint)
        self.sent = self.dropped = 0
        self._ratio, self._endpoint = config.trace_ratio, config.otlp_endpoint
        self._durations: list[int] = []
        self._queue: SimpleQueue[_Item | None] = SimpleQueue()
        self._closing = threading.Event()
        self._down = False
        if not self.enabled:
            return
        from forefetch.telemetry import otlp
        from forefetch.telemetry.waterfall import Waterfall

        self._resource = otlp.Resource(service, instance or f"{socket.gethostname()}:{os.getpid()}")
        self._waterfall = Waterfall(book, model, self._resource, self._paced) if book else None
        self._sender: Sender = otlp.sender(config.otlp_endpoint)
        self._thread = threading.Thread(target=self._run, name="spans", daemon=True)
        self._thread.start()

    # ---- what to trace ----

    def sampled(self, parent: SpanContext | None) -> bool:
        """Decides at arrival: the caller's flag if there is one, else one request in 1 / trace_ratio."""
        return self.enabled and (parent.sampled if parent else random.random() < self._ratio)

    def request_finished(self, record: RequestRecord) -> bool:
        """Has the request's spans built and sent if it was sampled, slow or failed; says whether."""
        if not self.enabled or self._waterfall is None:
            return False
        waterfall = self._waterfall
        wanted = self._slow(record) or record.context.sampled or record.status not in ("OK", "CANCELLED")
        record.exported = wanted and self._put(lambda: waterfall.draw(record))
        return record.exported

    def _slow(self, record: RequestRecord) -> bool:
        """Over three times the 95th percentile of the recent requests that ended well."""
        if record.status != "OK":
            return False
        recent = sorted(self._durations)
        self._durations = [*self._durations[1 - _SLOW_WINDOW :], record.duration_ns]
        return len(recent) >= _SLOW_LEAST and record.duration_ns > _SLOW_FACTOR * recent[int(len(recent) * 0.95)]

    # ---- spans around code ----

    @contextmanager
    def client_span(self, name: str, parent: SpanContext | None = None) -> Iterator[SpanContext | None]:
        """Times a call to another process; send what it yields with `context.to_metadata`. Without a collector it yields
        `parent`, so that the caller's trace still passes through."""
        if not self.enabled:
            yield parent
            return
        from forefetch.telemetry.otlp import CLIENT

        context = parent.child() if parent else new_root(self.sampled(None))
        with self._timed(name, context, parent, CLIENT):
            yield context

    @contextmanager
    def server_span(self, metadata: Iterable[tuple[str, str | bytes]] | None, name: str) -> Iterator[SpanContext | None]:
        """Times the handling of a call under the caller's span, when the caller is sampled."""
        parent = from_metadata(metadata)
        if not self.enabled or parent is None:
            yield parent
            return
        from forefetch.telemetry.otlp import SERVER

        context = parent.child()
        with self._timed(name, context, parent, SERVER):
            yield context

    @contextmanager
    def _timed(self, name: str, context: SpanContext, parent: SpanContext | None, kind: Kind) -> Iterator[None]:
        from forefetch.telemetry.otlp import Span

        span = Span(context, parent, name, time.time_ns(), 0, self._resource, kind)
        started = time.perf_counter_ns()
        try:
            yield
        except BaseException as raised:
            span.error = raised.code if isinstance(raised, ForefetchError) else type(raised).__name__
            raise
        finally:
            span.end_ns = span.start_ns + time.perf_counter_ns() - started
            if context.sampled:
                self._put(lambda: (span,))

    # ---- the thread ----

    def _put(self, item: _Item) -> bool:
        if self._closing.is_set() or self._queue.qsize() >= _QUEUE:
            self.dropped += 1
            return False
        self._queue.put(item)
        return True

    def _run(self) -> None:
        for batch in self._batches():
            self._deliver(batch)
        self._sender.close()

    def _batches(self) -> Iterator[Batch]:
        """Spans in batches of _BATCH, or what there is after _FLUSH_S; ends when closing and empty."""
        from forefetch.telemetry.otlp import Batch

        batch, due = Batch(), 0.0
        while not (self._closing.is_set() and self._queue.empty()):
            try:
                item = self._queue.get(timeout=max(due - time.monotonic(), 0.0) if batch.size else None)
            except Empty:
                item = None
            for span in self._paced(self._draw(item)) if item else ():
                due = due if batch.size else time.monotonic() + _FLUSH_S
                batch.add(span)
                if batch.size >= _BATCH:
                    yield batch
                    batch = Batch()
            if batch.size and (item is None or time.monotonic() >= due):
                yield batch
                batch = Batch()
        if batch.size:
            yield batch

    def _paced(self, items: Iterable[T]) -> Iterator[T]:
        """Lets go of the interpreter after a little work, so that the engine's thread never waits long for it."""
        for index, item in enumerate(items):
            yield item
            if index % _PACE == _PACE - 1 and not self._closing.is_set():
                time.sleep(_PAUSE_S)

    def _draw(self, item: _Item) -> Iterator[Span]:
        try:
            yield from item()
        except Exception:  # a defect in drawing must not end the thread
            self.dropped += 1
            logger.exception("spans could not be built")

    def _deliver(self, batch: Batch) -> None:
        """Sends until taken, refused for good, or closing."""
        from forefetch.telemetry.otlp import SendError

        wait = _BACKOFF_S[0]
        while True:
            try:
                self._sender.send(batch.request, _SEND_S)
            except SendError as error:
                self._say_down(str(error))
                if not error.again or self._closing.wait(wait):
                    self.dropped += batch.size
                    return
                wait = min(2 * wait, _BACKOFF_S[1])
            else:
                self.sent += batch.size
                if self._down:
                    logger.info("the span collector at %s takes spans again", self._endpoint)
                self._down = False
                return

    def _say_down(self, reason: str) -> None:
        if not self._down and not self._closing.is_set():
            logger.warning("the span collector at %s takes no spans (%s); requests are not affected", self._endpoint, reason)
        self._down = True

    def close(self, timeout_s: float = 2.0) -> None:
        """Sends what is queued, for at most `timeout_s` seconds, then drops the rest. Idempotent."""
        if not self.enabled or self._closing.is_set():
            return
        self._closing.set()
        self._queue.put(None)
        self._thread.join(timeout_s)
        if self._thread.is_alive():
            self._sender.close()
            self._thread.join(0.2)
