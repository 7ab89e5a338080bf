"""Hints on their way: the message, and the router's end of a Hint stream."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from queue import SimpleQueue
from typing import Any

import grpc
import numpy as np

from forefetch.hints import ExpertHint
from forefetch.v1 import expert_pb2, expert_pb2_grpc

log = logging.getLogger("forefetch.expert.client")

_WAITING = 64  # hints that may wait for the wire; more say that nobody reads


def to_message(hint: ExpertHint) -> expert_pb2.HintRequest:
    """The message that carries a hint."""
    return expert_pb2.HintRequest(
        step=hint.step,
        source=hint.source,
        layer=hint.layer,
        phase=hint.phase,
        experts=hint.experts.tolist(),
        probabilities=hint.probabilities.tolist(),
        window_ns=hint.window_ns,
    )


def from_message(message: expert_pb2.HintRequest) -> ExpertHint:
    """The hint in a message. Its numbers may make no sense; see `ExpertHint.flaw`."""
    return ExpertHint(
        step=message.step,
        source=message.source,
        layer=message.layer,
        phase=message.phase,
        experts=np.array(message.experts, dtype=np.uint32).view(np.int32),
        probabilities=np.array(message.probabilities, dtype=np.float32),
        window_ns=message.window_ns,
    )


class HintStream:
    """The router's end of one Hint stream: hints go out in order on gRPC's thread. Losing it costs hints, never a call."""

    def __init__(self, address: str, channel: grpc.Channel) -> None:
        """Opens the stream and does not wait for it. A worker that knows no hints ends it: they are dropped then."""
        self.sent = self.dropped = 0
        self._waiting: SimpleQueue[ExpertHint | None] = SimpleQueue()
        self._address, self._closing, self._down = address, False, False
        self._stream: Any = expert_pb2_grpc.ExpertServiceStub(channel).Hint(self._messages())
        if not self._stream.add_callback(self._ended):
            self._ended()

    def _messages(self) -> Iterator[expert_pb2.HintRequest]:
        while (hint := self._waiting.get()) is not None:
            yield to_message(hint)

    def _ended(self) -> None:
        self._down = True
        self._waiting.put(None)  # ends gRPC's reading thread
        if not self._closing:
            log.warning("worker %s takes no more hints", self._address)

    def send(self, hint: ExpertHint) -> None:
        """Queues a hint; drops it when the stream is down or does not keep up. Never blocks, never raises."""
        if self._down or self._closing or self._waiting.qsize() >= _WAITING:
            self.dropped += 1
        else:
            self.sent += 1
            self._waiting.put(hint)

    def close(self) -> None:
        """Ends the stream."""
        self._closing = True
        self._waiting.put(None)
        self._stream.cancel()
