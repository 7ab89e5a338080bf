"""Unfinished requests: where their events go, and how each of them ends, once. For the engine's thread but for `begin`."""

from __future__ import annotations

import logging
import threading
from dataclasses import dataclass
from time import monotonic
from typing import Any

from forefetch.errors import ForefetchError
from forefetch.telemetry.ring import Timings
from router_service.answer import Answer, Delivery
from router_service.flight import Parts
from router_service.outgoing import Outgoing
from router_service.sampling import Sampled
from router_service.scheduler import Request

log = logging.getLogger("forefetch.router")


@dataclass(frozen=True, slots=True)
class Stream:
    """An unfinished request's answer, and where its events go."""

    answer: Answer
    sink: Any


class Streams:
    """`lock` guards which requests there are, here and in the scheduler. `outgoing`: see Engine."""

    def __init__(self, parts: Parts, outgoing: Outgoing) -> None:
        self.lock = threading.Lock()
        self.open: dict[Request, Stream] = {}
        self._parts, self._outgoing = parts, outgoing

    def __contains__(self, request: Request) -> bool:
        return request in self.open

    def __len__(self) -> int:
        return len(self.open)

    def begin(self, answer: Answer, sink: Any) -> None:
        """Queues a request, under the lock. Overloaded when the queue is full."""
        self._parts.scheduler.submit(answer.request)
        self.open[answer.request] = Stream(answer, sink)

    def token(self, request: Request, sampled: Sampled, row: int, timings: Timings) -> list[Delivery]:
        """The events of a token that was just appended to its request."""
        stream = self.open[request]
        event, finish = stream.answer.token(sampled.ids[row], sampled.logprobs[row], sampled.tops[row], timings)
        self._parts.recorder.token(request)
        if finish is None:
            return [(stream.sink, event)]
        self._forget(request)
        self._parts.recorder.finished(request, "OK", finish.reason)
        return [(stream.sink, event), (stream.sink, finish)]

    def end(self, ended: list[tuple[Request, ForefetchError]], remove: bool = False) -> None:
        """Tells streams that their requests ended in an error. `remove`: the scheduler still has them."""
        deliveries: list[Delivery] = []
        try:
            for request, error in ended:
                deliveries.append((self.open[request].sink, error))
                self._forget(request, remove)
                self._parts.recorder.finished(request, error.code)
        finally:
            self._outgoing.add(deliveries)

    def end_all(self, error: ForefetchError) -> None:
        """All of them end in this error."""
        with self.lock:
            left = list(self.open)
        self.end([(request, error) for request in left], remove=True)
        self._outgoing.release()

    def give_up(self, error: ForefetchError) -> None:
        """`end_all` when nothing else may be relied upon: streams are told, and that is all."""
        with self.lock:
            left: list[Delivery] = [(stream.sink, error) for stream in self.open.values()]
            self.open.clear()
        self._outgoing.add(left)
        self._outgoing.release()

    def _forget(self, request: Request, remove: bool = True) -> None:
        with self.lock:
            del self.open[request]
            if remove:
                self._parts.scheduler.remove(request, monotonic())
        if self._parts.kv:
            try:
                self._parts.kv.ended(request)
            except Exception:  # nobody's answer depends on it
                log.exception("the KV side could not let go of a request")
