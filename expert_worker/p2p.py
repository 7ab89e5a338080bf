"""A worker's end of p2p lanes: follows a router's ring of steps, and answers their calls where the rows lie.

On a GPU each shape of step is recorded once, all layers and calls of it, and replayed when the ring names it; the host is in no
call's way. On a CPU the thread that serves the stream makes the calls.
"""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Literal

import numpy as np
from torch import Tensor

from expert_worker.core import Core
from expert_worker.packed import PackedExperts
from forefetch import shm
from forefetch.errors import BadRequest, LinkDown, Mismatch
from forefetch.p2p import memory
from forefetch.p2p.host import HostPort
from forefetch.p2p.lane import LaneShape, Step
from forefetch.p2p.ring import Listener
from forefetch.v1 import expert_pb2
from forefetch.wire import LayerCall

MEETING_S = 10.0


def kind_of(core: Core) -> Literal["", "host", "cuda"]:
    """The lanes that a worker can have; on a GPU only if all its experts are in its memory. None where experts come and go: who
    owns which is said when a lane is made."""
    if not core.info.shm_domain or core.info.capacity:
        return ""
    if isinstance(core.experts, PackedExperts) and not core.experts.moves:
        return "cuda" if core.info.device.startswith("cuda") and memory.available() else ""
    return "host" if core.info.device == "cpu" else ""


class Following(ABC):
    """One lane. Made when it is ready to follow; used by one thread, but for `leave`."""

    def __init__(self, core: Core, hello: expert_pb2.OpenLaneRequest, source: str) -> None:
        """Mismatch when the lane's shape does not fit the worker, or its memory cannot be reached."""
        info = core.info
        self.steps = steps_of(hello)
        if hello.rows > info.max_rows:
            raise Mismatch(
                f"the worker takes {info.max_rows} rows in a step (its --max-rows), the router may send {hello.rows}"
            )
        self.core, self.source = core, source
        self.layers = sorted(info.layers)
        self.shape = LaneShape(hello.rows, info.hidden_size, hello.top_k, len(self.layers), info.dtype.itemsize)
        self.patience_s = hello.patience_ms / 1e3
        self.listener = Listener(shm.Segment.open(hello.ring, hello.ring_nonce))
        self.ended = threading.Event()

    def follow(self, spin_ns: int) -> None:
        """Until the stream ends (returns) or the lane fails (LinkDown)."""
        spin = 0
        while not self.ended.is_set():
            spin_next = 0
            for step in self.listener.steps(spin):
                if step not in self.steps:
                    raise LinkDown(-1, f"a step of {step.rows} rows in {step.parts} parts was not agreed on")
                self.step(step)
                spin_next = spin_ns
            spin = spin_next

    def leave(self) -> None:
        """The stream ended: ends `follow` soon. Any thread."""
        self.ended.set()
        self.listener.nudge()

    @abstractmethod
    def step(self, step: Step) -> None:
        """Answers the calls of one step, or sees to it that they will be."""

    @abstractmethod
    def close(self) -> None:
        """Gives the lane's memory back. Waits for what is under way."""


class HostFollowing(Following):
    """A lane in shared memory."""

    def __init__(self, core: Core, hello: expert_pb2.OpenLaneRequest, source: str) -> None:
        super().__init__(core, hello, source)
        segment = shm.Segment.open(hello.data, hello.data_nonce)
        if len(segment.request) < self.shape.inbox_bytes or len(segment.reply) < self.shape.outbox_bytes:
            raise Mismatch("data: the segment is too small for the lane")
        self._port = HostPort(segment, self.shape, core.info.dtype)
        self._number = self._steps = 0

    def step(self, step: Step) -> None:
        self._steps += 1
        for place in range(len(self.layers)):
            for first, count in step.cuts():
                self._number = self._number + 1 & 0xFFFFFFFF
                self._port.wait(self._port.segment.request_bell, self._number, self.patience_s)
                self._answer(place, slice(first, first + count))
                self._port.segment.reply_bell.ring(self._number)

    def _answer(self, place: int, rows: slice) -> None:
        port = self._port
        call = call_of(self._steps, self.layers[place], port.x[rows], port.ids[place, rows], port.weights[rows])
        if len(call.pair_row):
            self.core.forward(call, port.results[rows], self.source)
        else:
            port.results[rows] = 0

    def leave(self) -> None:
        self._port.abort("the router has gone")
        super().leave()

    def close(self) -> None:
        """The memory goes with the last view of it."""


def call_of(step: int, layer: int, x: Tensor, ids: Tensor, weights: Tensor) -> LayerCall:
    """A lane's rows as a call: ids, weights [N, K]; places without a pair have id -1."""
    row, column = np.nonzero(ids.numpy() >= 0)
    expert, weight = ids.numpy()[row, column], weights.numpy()[row, column]
    return LayerCall(step, layer, x, row.astype(np.int32), expert, weight)


def follow(core: Core, hello: expert_pb2.OpenLaneRequest, source: str) -> Following:
    """A lane that is ready. Raises Mismatch or Unavailable when there can be none."""
    kind = kind_of(core)
    if hello.data and kind == "host":
        return HostFollowing(core, hello, source)
    if hello.meeting and kind == "cuda":
        from expert_worker.p2p_device import DeviceFollowing

        return DeviceFollowing(core, hello, source)
    if not hello.data and not hello.meeting:
        raise BadRequest("data", "neither data nor meeting is set")
    raise Mismatch(f"this worker can have {'no lanes' if not kind else f'lanes of kind {kind} only'}")


def steps_of(hello: expert_pb2.OpenLaneRequest) -> Sequence[Step]:
    """The shapes that steps may have. BadRequest for those that make no sense."""
    steps = [Step(step.rows, step.parts) for step in hello.steps]
    if not steps or not hello.top_k or not hello.patience_ms:
        raise BadRequest("steps", "steps, top_k and patience_ms must be given")
    if any(not 1 <= step.parts <= step.rows <= hello.rows for step in steps):
        raise BadRequest("steps", "a step has more parts than rows, or more rows than the lane")
    return steps


__all__ = ["Following", "LinkDown", "follow", "kind_of", "steps_of"]
