"""A worker without its transport: experts behind a queue, frames in and frames out, and what was done."""

from __future__ import annotations

import logging
import threading
from collections import deque
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from operator import add
from time import perf_counter_ns

import torch
from torch import Tensor

from expert_worker.evaluator import Evaluator
from forefetch import wire
from forefetch.errors import ForefetchError
from forefetch.frames import FrameBuffer
from forefetch.hints import ExpertHint
from forefetch.version import VERSION
from forefetch.wire import NOTHING, Verified

log = logging.getLogger("forefetch.expert")


@dataclass(frozen=True)
class WorkerInfo:
    """Who a worker is and what it holds, as `Describe` tells it."""

    model_digest: str
    model: str
    shard: int
    shards: int
    layers: dict[int, tuple[int, ...]]  # MoE layer -> experts held, ascending
    hidden_size: int
    dtype: torch.dtype
    device: str
    instance_id: str
    max_rows: int
    shm_domain: str = ""
    version: str = VERSION
    expert_format: str = "stored"
    generation: int = 0  # grows whenever `layers` changes
    capacity: int = 0  # most experts, all layers together; 0: what it holds is fixed
    row_pairs: int = 0  # most pairs of a row; 0: as many as `layers` names in a layer
    moves: bool = False  # it has fewer slots than experts, so that hints are of use
    lanes: str = ""  # kind of p2p lanes that it can have: "host", "cuda" or none

    def shape(self, max_rows: int | None = None) -> wire.Shape:
        """What frames must look like."""
        return wire.Shape(self.hidden_size, self.dtype, max_rows or self.max_rows)

    def request_room(self, max_rows: int) -> int:
        """Bytes of the largest request of `max_rows` rows: every row could need every expert held."""
        most = self.row_pairs or max((len(experts) for experts in self.layers.values()), default=0)
        return wire.request_bytes(max_rows, self.hidden_size, max_rows * most, self.dtype)

    def reply_room(self, max_rows: int) -> int:
        """Bytes of the largest reply."""
        return wire.reply_bytes(max_rows, self.hidden_size, self.dtype)


Spent = tuple[int, int, int, Verified]
"""Where a call's time went, in ns: waiting for its turn, waiting for copies, computing."""


class Turn:
    """A lock that is granted in the order in which it was asked for; threading.Lock promises none."""

    def __init__(self) -> None:
        self._guard = threading.Lock()
        self._waiting: deque[threading.Lock] = deque()
        self.taken = False

    def __enter__(self) -> None:
        with self._guard:
            if not self.taken:
                self.taken = True
                return
            mine = threading.Lock()
            mine.acquire()
            self._waiting.append(mine)
        mine.acquire()

    def __exit__(self, *_: object) -> None:
        with self._guard:
            if self._waiting:
                self._waiting.popleft().release()
            else:
                self.taken = False


def on(device: str) -> AbstractContextManager[object]:
    """Makes `device` the calling thread's current one, which is where Triton launches; a thread begins with the first."""
    return torch.cuda.device(device) if device.startswith("cuda:") else nullcontext()


class Core:
    """One worker. Any thread may call; calls are evaluated one after the other in the order in which they came."""

    def __init__(self, info: WorkerInfo, experts: Evaluator) -> None:
        self.info, self.experts = info, experts
        self.calls = self.rows = self.pairs = self.errors = self.compute_ns = self.copy_wait_ns = 0
        self.hints = self.hints_dropped = 0
        self.verified = NOTHING
        self._shape, self._host = info.shape(), info.device == "cpu"
        self._counting = threading.Lock()
        self.turn = Turn()  # who holds it is alone with the experts

    @property
    def busy(self) -> bool:
        """A call is being evaluated."""
        return self.turn.taken

    def forward(self, call: wire.LayerCall, out: Tensor, source: str = "") -> Spent:
        """Fills out [N, H]. BadRequest for a layer or expert that is not held. source: the router, whose steps it counts in."""
        asked = perf_counter_ns()
        with self.turn:
            began = perf_counter_ns()
            if self._host:
                copy_ns, verified = self.experts.forward(call, out, source)
            else:
                with on(self.info.device):
                    copy_ns, verified = self.experts.forward(call, out, source)
            compute_ns = perf_counter_ns() - began - copy_ns
            rows, _, pairs = call.form.sizes
            self.calls += 1
            self.rows += rows
            self.pairs += pairs
            self.compute_ns += compute_ns
            self.copy_wait_ns += copy_ns
            self.count(verified)
        return began - asked, copy_ns, compute_ns, verified

    def count(self, verified: Verified) -> None:
        """Adds to what became of hints. Any thread."""
        if verified != NOTHING:
            with self._counting:
                self.verified = Verified(*map(add, self.verified, verified))

    def hint(self, hint: ExpertHint, source: str = "") -> None:
        """Takes a hint in; one that is of no use is counted and dropped. Raises nothing, waits for no call."""
        try:
            taken = not hint.flaw and self.experts.hint(hint, source)
        except Exception:
            taken = False
            log.exception("defect while taking a hint")
        self.hints += taken
        self.hints_dropped += not taken

    def answer(self, request: FrameBuffer, size: int, reply: FrameBuffer, source: str = "") -> int:
        """Reads a request frame of `size` bytes, writes its reply or error frame, returns that one's bytes. Raises nothing."""
        try:
            call = wire.decode_request(request, size, self._shape)
            spent = self.forward(call, wire.reply_rows(reply, call), source)
            return wire.encode_reply(reply, call, *spent)
        except ForefetchError as error:
            return self.refuse(request, size, reply, error)
        except Exception:
            log.exception("defect while answering a frame")
            return self.refuse(request, size, reply, ForefetchError("internal error"))

    def refuse(self, request: FrameBuffer, size: int, reply: FrameBuffer, error: ForefetchError) -> int:
        """Writes the error frame for a request of `size` bytes."""
        self.errors += 1
        return wire.encode_error(reply, *wire.peek(request, size), error)
