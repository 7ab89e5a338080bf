"""A worker's end of p2p lanes: follows a router's ring of steps, and answers their calls where the rows lie.

On a GPU each shape of step is recorded once, all layers and calls of it, and replayed when the ring names it; the host is in no
call's way. On a CPU the thread that serves the stream makes the calls.
"""

from __future__ import annotations

from typing import Literal

import numpy as np
import torch
from torch import Tensor

from expert_worker.core import Core
from expert_worker.p2p_following import Following
from expert_worker.packed import PackedExperts
from forefetch import shm
from forefetch.errors import BadRequest, Mismatch
from forefetch.p2p import memory
from forefetch.p2p.host import HostPort
from forefetch.p2p.lane import Step
from forefetch.v1 import expert_pb2
from forefetch.wire import LayerCall


def kind_of(core: Core) -> Literal["", "host", "cuda"]:
    """The lanes that a worker can have; on a GPU only if its host takes no part in a call. None where a planner's command moves
    experts, since who owns which is said when a lane is made, and none where answers depend on where experts are."""
    if not core.info.shm_domain or core.info.capacity:
        return ""
    if isinstance(core.experts, PackedExperts) and not core.experts.shadows:
        return "cuda" if core.info.device.startswith("cuda") and memory.available() else ""
    return "host" if core.info.device == "cpu" else ""


class HostFollowing(Following):
    """A lane in shared memory."""

    def __init__(self, core: Core, hello: expert_pb2.OpenLaneRequest, source: str) -> None:
        super().__init__(core, hello, source)
        segment = shm.Segment.open(hello.data, hello.data_nonce)
        if len(segment.request) < self.shape.inbox_bytes or len(segment.reply) < self.shape.outbox_bytes:
            raise Mismatch("data: the segment is too small for the lane")
        self._port = HostPort(segment, self.shape, core.info.dtype)
        self._number = 0

    def step(self, step: Step, number: int) -> None:
        """Answers its calls, each once its rows are there."""
        for place in range(len(self.layers)):
            for first, count in step.cuts():
                self._number = self._number + 1 & 0xFFFFFFFF
                self._port.wait(self._port.segment.request_bell, self._number, self.patience_s)
                self._answer(number, place, slice(first, first + count))
                self._port.segment.reply_bell.ring(self._number)

    def _answer(self, step: int, place: int, rows: slice) -> None:
        port = self._port
        call = call_of(step, self.layers[place], port.x[rows], port.ids[place, rows], port.weights[rows])
        if len(call.pair_row):
            *_, verified = self.core.forward(call, port.results[rows], self.source)
            port.told += torch.tensor(verified)
        else:
            port.results[rows] = 0

    def leave(self) -> None:
        """Also ends waits for rows."""
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
