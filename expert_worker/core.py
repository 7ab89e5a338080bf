"""A worker without its transport: experts behind a queue, frames in and frames out, and what was done."""

from __future__ import annotations

import logging
import secrets
import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from operator import add
from time import perf_counter_ns
from typing import NamedTuple, Protocol, cast

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from expert_worker.config import ExpertConfig
from expert_worker.experts import Experts
from forefetch import shm, wire
from forefetch.device import place
from forefetch.errors import ForefetchError
from forefetch.frames import FrameBuffer
from forefetch.hints import ExpertHint
from forefetch.kernels.grouped_mlp.formats import Kind
from forefetch.placement import shard_of
from forefetch.spec import ModelSpec
from forefetch.synthetic import open_model
from forefetch.version import VERSION
from forefetch.wire import Verified

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

    def shape(self, max_rows: int | None = None) -> wire.Shape:
        """What frames must look like."""
        return wire.Shape(self.hidden_size, self.dtype, max_rows or self.max_rows)

    def request_room(self, max_rows: int) -> int:
        """Bytes of the largest request of `max_rows` rows: every row could need every expert held."""
        most = max((len(experts) for experts in self.layers.values()), default=0)
        return wire.request_bytes(max_rows, self.hidden_size, max_rows * most, self.dtype)

    def reply_room(self, max_rows: int) -> int:
        """Bytes of the largest reply."""
        return wire.reply_bytes(max_rows, self.hidden_size, self.dtype)


class Evaluator(Protocol):
    """What a core puts behind its queue; `Experts` is one."""

    @property
    def load(self) -> npt.NDArray[np.int64]:
        """Pairs evaluated per layer and expert held."""
        ...

    @property
    def weight_bytes(self) -> int:
        """Bytes of weights held."""
        ...

    def forward(self, call: wire.LayerCall, out: Tensor) -> tuple[int, Verified]:
        """Fills out [N, H]; returns ns spent waiting for copies, and what became of hints."""
        ...

    def hint(self, hint: ExpertHint) -> bool:
        """Takes a hint in, from any thread, without waiting for calls; False when it is of no use."""
        ...

    def resident(self, layer: int) -> list[int]:
        """The model's indices of the layer's experts that are in fast memory, ascending."""
        ...


class Spent(NamedTuple):
    """Where a call's time went."""

    queue_ns: int
    copy_wait_ns: int
    compute_ns: int
    verified: Verified = Verified()


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


class Core:
    """One worker. Any thread may call; calls are evaluated one after the other in the order in which they came."""

    def __init__(self, info: WorkerInfo, experts: Evaluator) -> None:
        self.info, self.experts = info, experts
        self.calls = self.rows = self.pairs = self.errors = self.compute_ns = self.copy_wait_ns = 0
        self.hints = self.hints_dropped = 0
        self.verified = Verified()
        self._shape = info.shape()
        self._turn = Turn()

    @property
    def busy(self) -> bool:
        """A call is being evaluated."""
        return self._turn.taken

    def forward(self, call: wire.LayerCall, out: Tensor) -> Spent:
        """Fills out [N, H]. BadRequest for a layer or expert that is not held."""
        asked = perf_counter_ns()
        with self._turn:
            began = perf_counter_ns()
            copy_ns, verified = self.experts.forward(call, out)
            compute_ns = perf_counter_ns() - began - copy_ns
            self.calls += 1
            self.rows += len(call.x)
            self.pairs += len(call.pair_row)
            self.compute_ns += compute_ns
            self.copy_wait_ns += copy_ns
            self.verified = Verified(*map(add, self.verified, verified))
        return Spent(began - asked, copy_ns, compute_ns, verified)

    def hint(self, hint: ExpertHint) -> None:
        """Takes a hint in; one that is of no use is counted and dropped. Raises nothing, waits for no call."""
        try:
            taken = not hint.flaw and self.experts.hint(hint)
        except Exception:
            taken = False
            log.exception("defect while taking a hint")
        self.hints += taken
        self.hints_dropped += not taken

    def answer(self, request: FrameBuffer, size: int, reply: FrameBuffer) -> int:
        """Reads a request frame of `size` bytes, writes its reply or error frame, returns that one's bytes. Raises nothing."""
        try:
            call = wire.decode_request(request, size, self._shape)
            out = wire.reply_rows(reply, len(call.x), self.info.hidden_size, self.info.dtype)
            return wire.encode_reply(reply, call, *self.forward(call, out))
        except ForefetchError as error:
            return self.refuse(request, size, reply, error)
        except Exception:
            log.exception("defect while answering a frame")
            return self.refuse(request, size, reply, ForefetchError("internal error"))

    def refuse(self, request: FrameBuffer, size: int, reply: FrameBuffer, error: ForefetchError) -> int:
        """Writes the error frame for a request of `size` bytes."""
        self.errors += 1
        return wire.encode_error(reply, *wire.peek(request, size), error)


def _has_kernels(spec: ModelSpec) -> bool:
    """Whether the device kernels take experts of these sizes."""
    return spec.hidden_size % 32 == 0 and spec.expert_width % 32 == 0


def load(config: ExpertConfig, on_progress: Callable[[int, int], None] = lambda done, total: None) -> Core:
    """Reads the checkpoint's shard. Raises ConfigError or UnsupportedModel."""
    spec, checkpoint = open_model(config.model, allow_synthetic=config.allow_synthetic)
    device, dtype = place(config.device, config.dtype, spec.dtype)
    held = shard_of(spec.num_experts, config.shards)[config.shard]
    slots = config.slot_count(len(held) * len(spec.moe_layers))
    experts: Evaluator
    if device.type == "cuda" and slots == len(held) * len(spec.moe_layers) and _has_kernels(spec):
        from expert_worker.packed import PackedExperts, packed_format

        format = packed_format(spec, cast(Kind, str(dtype).removeprefix("torch.")))
        rows = config.max_rows
        experts = PackedExperts(
            spec, checkpoint, held, format, device=device, dtype=dtype, max_rows=rows, on_progress=on_progress
        )
    else:
        experts = Experts(spec, checkpoint, held, device=device, dtype=dtype, slots=slots, on_progress=on_progress)
    info = WorkerInfo(
        model_digest=checkpoint.digest,
        model=spec.name,
        shard=config.shard,
        shards=config.shards,
        layers=dict.fromkeys(spec.moe_layers, held),
        hidden_size=spec.hidden_size,
        dtype=dtype,
        device=str(device),
        instance_id=secrets.token_hex(8),
        max_rows=config.max_rows,
        shm_domain=shm.domain(),
    )
    return Core(info, experts)
