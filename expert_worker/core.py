"""A worker without its transport: experts behind a queue, frames in and frames out, and what was done."""

from __future__ import annotations

import logging
import secrets
import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, replace
from operator import add
from pathlib import Path
from time import perf_counter_ns
from typing import Any, NamedTuple, Protocol, cast

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from expert_worker.config import ExpertConfig
from expert_worker.experts import Experts, Storage
from expert_worker.residency import Copied
from forefetch import placement, shm, wire
from forefetch.device import place
from forefetch.errors import ConfigError, ForefetchError
from forefetch.frames import FrameBuffer
from forefetch.hints import ExpertHint
from forefetch.kernels.grouped_mlp.formats import Kind
from forefetch.placement import Shard, shard_of
from forefetch.spec import ModelSpec
from forefetch.synthetic import open_model
from forefetch.version import VERSION
from forefetch.weights import Checkpoint
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
    expert_format: str = "stored"

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
        """Pairs evaluated, of any shape; by layer and, in it, by expert held."""
        ...

    @property
    def copied(self) -> Copied:
        """Totals of copies into fast memory."""
        ...

    @property
    def weight_bytes(self) -> int:
        """Bytes of weights held."""
        ...

    def forward(self, call: wire.LayerCall, out: Tensor, source: str) -> tuple[int, Verified]:
        """Fills out [N, H]; returns ns spent waiting for copies, and what became of hints. source names the router."""
        ...

    def hint(self, hint: ExpertHint, source: str) -> bool:
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

    def forward(self, call: wire.LayerCall, out: Tensor, source: str = "") -> Spent:
        """Fills out [N, H]. BadRequest for a layer or expert that is not held. source: the router, whose steps it counts in."""
        asked = perf_counter_ns()
        with self._turn:
            began = perf_counter_ns()
            copy_ns, verified = self.experts.forward(call, out, source)
            compute_ns = perf_counter_ns() - began - copy_ns
            self.calls += 1
            self.rows += len(call.x)
            self.pairs += len(call.pair_row)
            self.compute_ns += compute_ns
            self.copy_wait_ns += copy_ns
            self.verified = Verified(*map(add, self.verified, verified))
        return Spent(began - asked, copy_ns, compute_ns, verified)

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
            out = wire.reply_rows(reply, len(call.x), self.info.hidden_size, self.info.dtype)
            return wire.encode_reply(reply, call, *self.forward(call, out, source))
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
    held = _held(config, spec)
    total = sum(map(len, held.values()))
    slots = config.slot_count(total)
    _check_slots(config, spec, held, slots)
    storage = Storage(slots, config.expert_format, config.cache_folder, config.max_rows, config.miss, config.check_copies)
    how = {"device": device, "dtype": dtype, "on_progress": on_progress}
    experts: Evaluator
    if device.type == "cuda" and _has_kernels(spec):
        experts = _on_gpu(config, spec, checkpoint, held, storage, how)
    else:
        experts = Experts(spec, checkpoint, held, storage, **how)  # type: ignore[arg-type]
    info = WorkerInfo(
        model_digest=checkpoint.digest,
        model=spec.name,
        shard=config.shard,
        shards=config.shards,
        layers=held,
        hidden_size=spec.hidden_size,
        dtype=dtype,
        device=str(device),
        instance_id=secrets.token_hex(8),
        max_rows=config.max_rows,
        expert_format=config.experts,
        shm_domain=shm.domain(),
    )
    return Core(info, experts)


def _on_gpu(
    config: ExpertConfig, spec: ModelSpec, checkpoint: Checkpoint, held: Shard, storage: Storage, how: dict[str, Any]
) -> Evaluator:
    """Experts packed in the GPU's memory: all of them, or in slots."""
    from expert_worker.packed import PackedExperts, packed_format
    from expert_worker.packed_slots import SlottedExperts

    kind = cast(Kind, str(how["dtype"]).removeprefix("torch.") if config.experts == "stored" else config.experts)
    format = packed_format(spec, kind, how["dtype"], how["device"])
    if storage.slots == sum(map(len, held.values())):
        if len(set(held.values())) > 1:  # a placement with another set in every layer
            return Experts(spec, checkpoint, held, storage, **how)
        return PackedExperts(spec, checkpoint, held[spec.moe_layers[0]], format, max_rows=config.max_rows, **how)
    return SlottedExperts(spec, checkpoint, held, replace(storage, format=format), **how)


def _held(config: ExpertConfig, spec: ModelSpec) -> dict[int, tuple[int, ...]]:
    """MoE layer -> this worker's experts. ConfigError for a placement that does not fit."""
    if not config.placement:
        return dict.fromkeys(spec.moe_layers, shard_of(spec.num_experts, config.shards)[config.shard])
    try:
        text = Path(config.placement).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"--placement: {config.placement} cannot be read ({type(error).__name__})") from None
    shards = placement.parse(text, spec.moe_layers, spec.num_experts)
    if len(shards) != config.shards:
        raise ConfigError(f"--placement: is for {len(shards)} workers, --shards is {config.shards}")
    return shards[config.shard]


def _check_slots(config: ExpertConfig, spec: ModelSpec, held: dict[int, tuple[int, ...]], slots: int) -> None:
    """ConfigError when one token's experts of one layer do not fit."""
    most, total = max(map(len, held.values())), sum(map(len, held.values()))
    need = min(spec.top_k, most)
    if slots < need:
        raise ConfigError(
            f"--slots {config.slots}: {slots} slots for the {total} experts that this worker holds; a token needs up to {need} "
            f"(top-{spec.top_k}) of the {most} of a layer at once"
        )
