"""What a worker does on any lane: it follows a router's ring of steps."""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections.abc import Sequence

from expert_worker.core import Core
from forefetch import shm
from forefetch.errors import BadRequest, LinkDown, Mismatch
from forefetch.p2p.lane import LaneShape, Step
from forefetch.p2p.ring import Listener
from forefetch.v1 import expert_pb2

MEETING_S = 10.0
"""How long one side waits for the other where they exchange memory."""


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
            for step, number in self.listener.steps(spin):
                if step not in self.steps:
                    raise LinkDown(-1, f"a step of {step.rows} rows in {step.parts} parts was not agreed on")
                self.step(step, number)
                spin_next = spin_ns
            spin = spin_next

    def leave(self) -> None:
        """The stream ended: ends `follow` soon. Any thread."""
        self.ended.set()
        self.listener.nudge()

    @abstractmethod
    def step(self, step: Step, number: int) -> None:
        """Answers the calls of one step, the router's `number`, or sees to it that they will be."""

    @abstractmethod
    def close(self) -> None:
        """Gives the lane's memory back. Waits for what is under way."""


def steps_of(hello: expert_pb2.OpenLaneRequest) -> Sequence[Step]:
    """The shapes that steps may have. BadRequest for those that make no sense."""
    steps = [Step(step.rows, step.parts) for step in hello.steps]
    if not steps or not hello.top_k or not hello.patience_ms:
        raise BadRequest("steps", "steps, top_k and patience_ms must be given")
    if any(not 1 <= step.parts <= step.rows <= hello.rows for step in steps):
        raise BadRequest("steps", "a step has more parts than rows, or more rows than the lane")
    return steps
