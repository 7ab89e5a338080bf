"""Callers of Generate and Tokenize: how many there are at a time, and that none of them lets its answer lie for ever.

What is ready for a stream waits in this process until its caller has read what came before: gRPC's flow control stops there. So
an answer that nobody reads is kept whole, long after its place in the batch has gone to others. Hence both bounds.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from time import monotonic
from typing import Any

import grpc

from forefetch import rpc
from forefetch.errors import ForefetchError, Overloaded, Unread

LOOKS = 4
"""How often, within the patience, streams are looked at."""
RETRY_S = 1.0


@dataclass(eq=False)
class Caller:
    """One open call. `waits_since`: when the message was ready that its reader has not made room for, monotonic seconds; 0.0:
    none is. `error`: what it was ended with for that."""

    context: grpc.aio.ServicerContext[Any, Any]
    task: asyncio.Task[Any]
    waits_since: float = 0.0
    error: ForefetchError | None = None

    def end(self, error: ForefetchError) -> None:
        """The status goes out behind what the reader has yet to take; everything else of the call is let go of now."""
        self.error, status = error, rpc.status_of(error)
        abort = asyncio.ensure_future(self.context.abort(status.code, status.details, status.trailing_metadata))
        abort.add_done_callback(lambda done: done.cancelled() or done.exception())  # it always raises
        asyncio.get_running_loop().call_soon(self.task.cancel)  # the handler is in a write that cannot end


class Callers:
    """For the event loop's thread. `most`: calls at a time; `patience_s`: how long a reader may let a message wait."""

    def __init__(self, most: int, patience_s: float) -> None:
        self._most, self._patience_s = most, patience_s
        self._open: dict[Caller, None] = {}
        self._watching = False

    def __len__(self) -> int:
        return len(self._open)

    @contextmanager
    def one(self, context: grpc.aio.ServicerContext[Any, Any]) -> Iterator[Caller]:
        """A call, for as long as it is open. Overloaded when there are too many."""
        if len(self._open) >= self._most:
            raise Overloaded(f"too many calls are open ({self._most}), unread streams included", retry_after_s=RETRY_S)
        task = asyncio.current_task()
        assert task is not None
        caller = Caller(context, task)
        self._open[caller] = None
        if not self._watching:
            self._watching = True
            self._look_again()
        try:
            yield caller
        finally:
            del self._open[caller]

    def _look_again(self) -> None:
        asyncio.get_running_loop().call_later(self._patience_s / LOOKS, self._look)

    def _look(self) -> None:
        now = monotonic()
        for caller in self._open:
            if caller.error is None and caller.waits_since and now - caller.waits_since > self._patience_s:
                caller.end(Unread(f"nothing of the stream was read for {self._patience_s:g} s"))
        self._watching = bool(self._open)
        if self._watching:
            self._look_again()
