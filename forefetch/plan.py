"""What a model needs and how fast a token could be: arithmetic over bytes and measured bandwidths. Pure.

A decode step reads the trunk once, the K and V of every stream, and the weights of every expert that some row chose; what does
not wait in a device slot crosses PCIe first. Each of these is bytes over a bandwidth; to them come a fixed time per layer
(launches, chains of latencies) and, with workers, a round trip per MoE layer. Terms add up, but for copies that hints started
early: those overlap everything else, which is the best that hints can do. Over link p2p the router's device holds as large a
part of the experts as each worker's, if all fit into devices. Where it holds none (`apart`), halves of a large batch that take
turns hide up to all of the round trips; that is not in it.

Assumptions, all on the safe side: routing is even (real routing is skewed, so fewer experts are touched and, unless `missed`
says how many, more of those are resident), and nothing else is hidden behind anything.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from forefetch.errors import ConfigError
from forefetch.spec import ModelSpec

GIB = 1 << 30
RESERVE_GIB = 2.0
"""Device memory for everything that is no weight and no KV: CUDA's context, step buffers, graphs."""
TAIL_TOKENS = 208
"""Tokens of a stream that sub-byte formats leave in float16: a page and its successor's beginning, and the sinks."""

ELEMENT_BYTES = {"float32": 4.0, "bfloat16": 2.0, "float16": 2.0}
# Sealed pages, bytes of K and V of 128 tokens of one head of 128 channels (forefetch/kernels/kv_codec/formats.py).
PAGE_BYTES = {"e2m0": 9_600, "asym2": 9_600, "mixed": 10_112, "asym3": 13_696, "fp4": 18_304}
KV_FORMATS = (*ELEMENT_BYTES, *PAGE_BYTES)
# Bytes of a weight: codes, and a float16 scale per 128 of them (forefetch/kernels/grouped_mlp/formats.py).
TRUNK_FORMATS = ("stored", "int8")
EXPERT_BYTES = {**ELEMENT_BYTES, "int8": 1 + 2 / 128, "int4": 0.5 + 2 / 128}


@dataclass(frozen=True)
class Hardware:
    """One device and its host. `source` says where the figures come from; flags of `forefetch plan` replace single ones."""

    name: str
    source: str
    memory_gib: float
    hbm_gbs: float  # GB/s that a kernel streams from device memory
    pcie_gbs: float  # GB/s from pinned host memory, expert-sized copies
    layer_us: float  # fixed time per layer
    link_us: Mapping[str, float] = field(default_factory=dict)  # a MoE layer's round trip to the workers
    dtype: str = ""  # what the trunk is kept in; "": as stored
    gflops: float = 0.0  # multiplications and additions a second, times 1e-9, that reading does not hide; 0: it hides all

    def __post_init__(self) -> None:
        for name in ("memory_gib", "hbm_gbs", "pcie_gbs"):
            if not 0 < getattr(self, name) < math.inf:
                raise ConfigError(f"--{name.replace('_', '-')}: must be positive")


HARDWARE = {
    "h200": Hardware(
        "h200",
        "measured on one H200 host, PyTorch 2.11: copies in HBM 4.24 TB/s, PCIe 5 x16 pinned 52 GB/s at 9 MiB and 36 at "
        "1 MiB, a hop of 64 rows between two GPUs 24 us over lanes in their memory (p2p), 72 us through pinned shared memory; "
        "33 us per layer are what captured steps took beyond their bytes, 24 to 44 (benchmarks/results.csv). Assumed: gRPC "
        "as on two CPU cores",
        memory_gib=139.0,
        hbm_gbs=4240.0,
        pcie_gbs=45.0,
        layer_us=33.0,
        link_us={"local": 0.0, "p2p": 23.6, "shm": 72.0, "grpc": 995.0},
    ),
    "cpu": Hardware(
        "cpu",
        "two cores of a Xeon with AVX-512, compiled steps: bandwidth and time per layer fitted to benchmarks/results.csv, "
        "both models, one process, about 80 tokens of context, weights counted as float32; arithmetic as measured (125 GFLOP/s "
        "a core); links: what two workers on the same two cores added to a layer of a decode step there",
        memory_gib=24.0,
        hbm_gbs=14.25,
        pcie_gbs=14.25,
        layer_us=54.0,
        link_us={"local": 0.0, "shm": 750.0, "grpc": 1900.0},
        dtype="float32",
        gflops=250.0,
    ),
}


@dataclass(frozen=True)
class Wanted:
    """What shall run. workers: 0 keeps the experts in the router's device. apart: over link p2p it holds none. slots: share of
    experts resident; None: what fits.

    missed: share of the experts a layer needs that are in no slot, as measured; None: of even routing, the worst there is.
    recall: share of these that hints named in time; 0: no hints, every miss is waited for."""

    batch: int = 16
    context: int = 4096
    kv_format: str = "bfloat16"
    expert_format: str = "bfloat16"
    trunk_format: str = "stored"
    workers: int = 0
    link: str = "local"
    apart: bool = False
    slots: float | None = None
    missed: float | None = None
    recall: float = 0.0

    def validate(self, spec: ModelSpec) -> None:
        """Raises ConfigError naming the bad value."""
        for name, least, most in (("batch", 1, 4096), ("context", 1, spec.context_length), ("workers", 0, spec.num_experts)):
            if not least <= getattr(self, name) <= most:
                raise ConfigError(f"--{name}: must be {least} to {most} for this model")
        if self.slots is not None and not 0 < self.slots <= 1:
            raise ConfigError("--slots: must be a share above 0, up to 100%")
        if not 0 <= self.recall <= 1:
            raise ConfigError("--recall: must be within 0 and 1")
        if self.missed is not None and not 0 <= self.missed <= 1:
            raise ConfigError("--missed: must be a share up to 100%")
        if self.kv_format not in KV_FORMATS:
            raise ConfigError(f"--kv-format: must be one of {', '.join(KV_FORMATS)}")
        if self.expert_format not in EXPERT_BYTES:
            raise ConfigError(f"--expert-format: must be one of {', '.join(EXPERT_BYTES)}")
        if self.trunk_format not in TRUNK_FORMATS:
            raise ConfigError(f"--trunk-format: must be one of {', '.join(TRUNK_FORMATS)}")
        if self.workers == 0 and self.link != "local":
            raise ConfigError(f"--link {self.link}: needs --workers")
        if self.workers and self.link == "local":
            raise ConfigError("--workers: need a --link other than local")
        if self.apart and self.link != "p2p":
            raise ConfigError("--apart: only with --link p2p")


@dataclass(frozen=True)
class Sizes:
    """Bytes of a model's parts."""

    trunk: float  # all that is read in every step, and what only one row of is (the embedding)
    step: float  # of it, read in every step
    expert: float
    experts: int  # routed experts of all layers
    kv_stream: float  # K and V of one stream at full context
    weights: float  # how many weights a token is multiplied with


def sizes(spec: ModelSpec, wanted: Wanted, dtype: str = "") -> Sizes:
    """The arithmetic of shapes. Letters as in ARCHITECTURE.md. `dtype`: what a device keeps the trunk in, multiplied out."""
    element = ELEMENT_BYTES[dtype or spec.dtype]
    rounded = wanted.trunk_format == "int8"
    matrix = 1.0 if rounded and not dtype else element  # and a scale per output, which is nothing
    hidden, moe = spec.hidden_size, len(spec.moe_layers)
    attention = 2 * hidden * (spec.heads + spec.kv_heads) * spec.head_dim
    shared, dense = moe * 3 * hidden * spec.shared_width, (spec.layers - moe) * 3 * hidden * spec.dense_width
    head = spec.vocab_size * hidden
    matrices = spec.layers * attention + shared + dense + head
    gates = moe * hidden * spec.num_experts
    step = matrices * matrix + (spec.layers * 2 * hidden + gates) * element
    trunk = step if spec.tied_embeddings and not rounded else step + head * element
    expert = 3 * hidden * spec.expert_width
    weights = matrices + gates + moe * spec.top_k * expert
    kv = kv_bytes(spec, wanted.kv_format, wanted.context)
    return Sizes(trunk, step, expert * EXPERT_BYTES[wanted.expert_format], moe * spec.num_experts, kv, weights)


def kv_bytes(spec: ModelSpec, name: str, context: int) -> float:
    """K and V of `context` tokens of one stream, all layers."""
    if name in ELEMENT_BYTES:
        return context * spec.kv_bytes_per_token(1) * ELEMENT_BYTES[name]
    tail = min(context, TAIL_TOKENS)
    sealed = PAGE_BYTES[name] / (2 * 128 * 128)  # bytes of an element
    return spec.kv_bytes_per_token(1) * (2.0 * tail + sealed * (context - tail))


def touched(spec: ModelSpec, batch: int) -> float:
    """Distinct experts that a layer needs, in the mean, when `batch` rows choose K of E each, evenly."""
    share = spec.top_k / spec.num_experts
    return float(spec.num_experts * (1 - (1 - share) ** batch))


@dataclass(frozen=True)
class Fit:
    """Where everything lies. Bytes, per device; `problem` says, with the arithmetic, why it does not fit."""

    router: float
    shares: int  # devices that hold experts: the workers', and the router's where it holds some
    worker: float  # slots of one of them
    slots: int  # in all
    per_layer: float  # slots per MoE layer
    host: float  # of experts that wait in host memory, all workers
    max_batch: int  # streams of this context whose KV fits beside the rest
    problem: str = ""

    @property
    def fits(self) -> bool:
        """Whether it can run."""
        return not self.problem


def fit(spec: ModelSpec, wanted: Wanted, hardware: Hardware) -> Fit:
    """Trunk and KV first; what is left, or what workers have, goes to expert slots. Over link p2p a part lies beside the trunk,
    unless that leaves some experts on no device, which lanes do not carry."""
    if wanted.link == "p2p" and not wanted.apart and wanted.slots in (None, 1):
        found = _fit(spec, replace(wanted, slots=1.0), hardware, beside=True)
        if found.fits:
            return found
    return _fit(spec, wanted, hardware, beside=not wanted.workers)


def _fit(spec: ModelSpec, wanted: Wanted, hardware: Hardware, beside: bool) -> Fit:
    """beside: a part of the experts lies beside the trunk."""
    size, memory = sizes(spec, wanted, hardware.dtype), (hardware.memory_gib - RESERVE_GIB) * GIB
    kv, shares = wanted.batch * size.kv_stream, wanted.workers + beside
    room = memory * wanted.workers if wanted.workers else memory - size.trunk - kv
    total = size.experts
    slots = total if wanted.slots is None else max(1, int(total * wanted.slots))
    if wanted.slots is None:
        slots = min(total, max(0, int(room // size.expert)))
    held = slots * size.expert / shares
    router = size.trunk + kv + beside * held
    spare = memory - size.trunk - beside * held
    host = 0.0 if slots == total else total * size.expert
    place = (max(0, int(spare // size.kv_stream)), _problem(size, kv, router, held, memory, slots))
    return Fit(router, shares, held, slots, slots / len(spec.moe_layers), host, *place)


def _problem(size: Sizes, kv: float, router: float, held: float, memory: float, slots: int) -> str:
    parts = f"trunk {gib(size.trunk)} + KV {gib(kv)}"
    if size.trunk + kv > memory:
        return f"{parts} exceed the device's {gib(memory)}"
    if slots < 1:
        return f"{parts} leave no room for a single expert of {size.expert / 2**20:.1f} MiB"
    if router > memory:
        return f"{parts} + slots {gib(held)} exceed the device's {gib(memory)}"
    return f"slots of {gib(held)} exceed a worker's {gib(memory)}" if held > memory else ""


def gib(number: float) -> str:
    """Bytes as text: GiB, or below one of them MiB."""
    return f"{number / GIB:.1f} GiB" if number >= GIB else f"{number / 2**20:.0f} MiB"


@dataclass(frozen=True)
class Speed:
    """A decode step, milliseconds. `terms` by name; they add up to `token_ms`."""

    terms: dict[str, float]

    @property
    def token_ms(self) -> float:
        """Time of a step, which is the time per token of every stream."""
        return sum(self.terms.values())

    @property
    def limit(self) -> str:
        """The largest term."""
        return max(self.terms, key=lambda name: self.terms[name])


def speed(spec: ModelSpec, wanted: Wanted, hardware: Hardware, placed: Fit) -> Speed:
    """How long a step takes once it fits."""
    size, moe = sizes(spec, wanted, hardware.dtype), len(spec.moe_layers)
    per_ms = hardware.hbm_gbs * 1e6  # bytes of a millisecond
    distinct = moe * touched(spec, wanted.batch)
    terms = {
        "trunk weights": size.step / per_ms,
        "KV": wanted.batch * size.kv_stream / per_ms,
        "expert weights": distinct * size.expert / placed.shares / per_ms,
        "arithmetic": 2e-6 * wanted.batch * size.weights / hardware.gflops if hardware.gflops else 0.0,
        "layers": spec.layers * hardware.layer_us / 1e3,
        "link": moe * hardware.link_us[wanted.link] / 1e3,
    }
    away = 1 - placed.slots / size.experts
    missing = distinct * (away if wanted.missed is None or not away else wanted.missed)
    copies = missing * size.expert / placed.shares / (hardware.pcie_gbs * 1e6)
    hidden = min(copies * wanted.recall, sum(terms.values()))
    return Speed({**terms, "expert copies": copies - hidden})
