"""The router's engine over a large model on one GPU, with contexts that are already there: what `benchmarks.decode` times."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import numpy as np
import torch

from expert_worker.client import resident
from forefetch.kernels.few_rows import Rounded
from forefetch.kernels.kv_codec import KvFormat, seal
from forefetch.settings import ServiceConfig
from forefetch.shapes import synthetic_config
from forefetch.spec import ModelSpec
from forefetch.synthetic import open_model
from forefetch.telemetry import names
from forefetch.telemetry.book import RequestBook
from forefetch.telemetry.metrics import new_registry
from forefetch.telemetry.ring import StepRing, Timings
from forefetch.telemetry.spans import Exporter
from router_service.admission import Admitted, SamplingParams
from router_service.answer import Answer, Delivery
from router_service.cache import KvCache
from router_service.captured import CapturedTrunk
from router_service.captured import Recorder as GraphRecorder
from router_service.engine import Engine
from router_service.flight import Parts
from router_service.layouts import LayoutBuffers
from router_service.outgoing import Outgoing
from router_service.pages import PagePool
from router_service.recorder import Recorder
from router_service.scheduler import Request, Scheduler
from router_service.sealed import SealedCache
from router_service.trunk import Cache, Trunk

PAGE = 128
MOST_ROWS = 1024
INTRUDER = "intruder"


class Workers:
    """A table that is always complete: the experts are here."""

    changed: Any = None

    def refresh(self) -> bool:
        """See router_service.workers."""
        return True


class NoWorkers:
    """In the place of a dispatch: nothing leaves the device, so nothing is counted."""

    def begin(self) -> None:
        """See router_service.dispatch."""

    def commit(self) -> None:
        """See router_service.dispatch."""


@dataclass(frozen=True)
class Measured:
    """Milliseconds, one entry per step: between two deliveries of tokens, and from planning a step to delivering its tokens."""

    gaps: list[float]
    latency: list[float]
    timings: list[Timings]


@dataclass
class Rig:
    """The trunk of `model`, with experts and a cache that may be changed. `record` stands in for CUDA graphs on a CPU."""

    model: str
    device: torch.device = field(default_factory=lambda: torch.device("cuda"))
    dtype: torch.dtype = torch.bfloat16
    record: GraphRecorder | None = None
    model_of: Callable[[LayoutBuffers], CapturedTrunk] | None = None  # recorded steps of another kind, for `benchmarks.p2p`
    spec: ModelSpec = field(init=False)
    experts: Any = None
    cache: Any = None
    pages: int = 0

    def __post_init__(self) -> None:
        self.spec, self.checkpoint = open_model(self.model, allow_synthetic=True)
        self.put_trunk("stored")

    def put_trunk(self, kind: str) -> None:
        """The trunk, stored or in int8, with no cache worth the name yet."""
        self.trunk = self.cache = None  # type: ignore[assignment]
        collect()
        nothing = KvCache(self.spec, pages=2, page_size=PAGE, dtype=self.dtype, device=self.device)
        place = {"dtype": self.dtype, "device": self.device}
        self.trunk = Trunk(self.spec, self.checkpoint, nothing, **place, rounded=kind == "int8")  # type: ignore[arg-type]

    def put_experts(self, kind: Any) -> None:
        """All experts on the device, stored as `kind`."""
        self.experts = None
        collect()
        place = {"device": self.device, "dtype": self.dtype, "max_rows": MOST_ROWS}
        self.experts = resident(self.spec, self.checkpoint, kind, **place)

    def put_cache(self, kv: str, pages: int, lanes: int) -> None:
        """Random keys and values in `pages` pages; sealed if `kv` is a sealed format: 32 different pages over and over."""
        self.cache = self.trunk.cache = None  # type: ignore[assignment]
        collect()
        self.pages = pages
        self.cache = self.trunk.cache = self._dense() if kv == "bfloat16" else self._sealed(kv, lanes)

    def _dense(self) -> Cache:
        cache = KvCache(self.spec, pages=self.pages, page_size=PAGE, dtype=self.dtype, device=self.device)
        for pool in (*cache.k, *cache.v):
            pool.normal_()
        return cache

    def _sealed(self, kv: str, lanes: int) -> Cache:
        format = KvFormat(kv, head_dim=self.spec.head_dim, thirds=32 if kv == "mixed" else 0)
        sealed = SealedCache(self.spec, format, pages=self.pages, lanes=lanes, max_rows=MOST_ROWS, device=self.device)
        drawn = torch.randn(2, 32, PAGE, self.spec.head_dim, device=self.device)
        blobs = seal(drawn[0], drawn[1], format)[torch.arange(self.pages, device=self.device) % 32]
        for layer in sealed.pages:
            layer.copy_(blobs.expand_as(layer))
        sealed.tails.normal_()
        sealed.sinks.normal_()
        return sealed

    def engine(
        self, batch: int, context: int, steps: int, *, ahead: bool, sink: list[tuple[int, bool]], prompt_rows: int = 0
    ) -> Engine:
        """An engine in which `batch` requests with about `context` committed tokens each are about to decode.

        `sink` is told when tokens came, nanoseconds, and whether the intruder's was among them. `prompt_rows` of a step are for
        prompts."""
        width = -(-(context + PAGE + steps) // PAGE)
        lanes = batch + (1 if prompt_rows else 0)
        shape = {"max_batch": lanes, "max_pages": width, "page_size": PAGE, "device": self.device}
        chunks = (prompt_rows,) if prompt_rows else ()
        buffers = LayoutBuffers(max_tokens=lanes + prompt_rows, **shape, buckets=(lanes,), chunk_rows=chunks)
        model = (self.model_of or self.recorded)(buffers)
        model.ahead = ahead  # type: ignore[misc]
        ring, registry = StepRing(64, self.spec.layers, 1), new_registry()
        book = RequestBook(ring, 16)
        exporter = Exporter(ServiceConfig(), names.SERVICE_ROUTER, book=book)
        recorder = Recorder(ring, book, model="bench", registry=registry, exporter=exporter)
        recent = self.cache.format.recent if isinstance(self.cache, SealedCache) else 0
        limits = {"page_size": PAGE, "max_batch": lanes, "max_step_tokens": lanes + prompt_rows, "max_waiting": lanes}
        scheduler = Scheduler(PagePool(self.pages), **limits, recent=recent, prompt_rows=prompt_rows)

        def deliver(events: list[Delivery]) -> None:
            if events:
                sink.append((time.perf_counter_ns(), any(key == INTRUDER for key, _ in events)))

        parts = Parts(model, buffers, NoWorkers(), Workers(), scheduler, recorder)  # type: ignore[arg-type]
        engine = Engine(parts, Outgoing(deliver), worker_grace_s=1.0)
        self._requests(engine, batch, context, steps)
        return engine

    def recorded(self, buffers: LayoutBuffers) -> CapturedTrunk:
        """The trunk's steps with the experts beside it."""
        model = CapturedTrunk(self.trunk, self.experts, buffers, self.record)
        model.warm_up()
        return model

    def _requests(self, engine: Engine, batch: int, context: int, steps: int) -> None:
        """Lengths are spread over a page, as those of strangers are: pages are sealed now and then, not all in one step."""
        draw, scheduler = np.random.default_rng(0), engine.parts.scheduler
        for key in range(batch):
            length = context - PAGE * key // batch
            tokens = tuple(draw.integers(0, self.spec.vocab_size, length + 1).tolist())
            admitted = Admitted(tokens, steps, False, SamplingParams(), (), frozenset(), "bench")
            request = Request(key, str(key), tokens[:-1], admitted, 0.0, known=tokens[-1:])
            engine.parts.recorder.arrive(request, None, names.TEXT_COMPLETION)
            engine.submit(Answer(request, None), key)
        scheduler.admit(0.0)
        for request in scheduler.running:
            request.resume_at(len(request.tokens) - 1)

    def measure(self, batch: int, context: int, steps: int, *, ahead: bool = True, warm: int = 8) -> Measured:
        """`steps` decode steps behind `warm` others."""
        delivered, planned, latency, timings = list[tuple[int, bool]](), dict[int, int](), list[float](), list[Timings]()
        engine = self.engine(batch, context, steps + warm + 4, ahead=ahead, sink=delivered)
        landed = 0
        gc.collect()
        gc.disable()
        try:
            while len(delivered) < steps + warm:
                planned[engine._step] = time.perf_counter_ns()
                engine.step()
                while landed < len(delivered):
                    latency.append((delivered[landed][0] - planned.pop(landed)) / 1e6)
                    record = engine.parts.recorder.ring.read(landed)
                    timings += [record.timings] if record is not None else []
                    landed += 1
        finally:
            gc.enable()
        self._synchronise()
        return Measured(_gaps(delivered[warm:]), latency[warm:], timings[warm:])

    def intrusion(self, batch: int, context: int, prompt: int, rows: int) -> tuple[list[float], float]:
        """A prompt comes while `batch` streams decode, `rows` of it in a step -> milliseconds between the streams' tokens until
        its own first one, and until that."""
        delivered = list[tuple[int, bool]]()
        engine = self.engine(batch, context, prompt // rows + 64, ahead=True, sink=delivered, prompt_rows=rows)
        for _ in range(8):
            engine.step()
        came = len(delivered)
        tokens = tuple(range(1000, 1000 + prompt))
        admitted = Admitted(tokens, 1, False, SamplingParams(), (), frozenset(), INTRUDER)
        request = Request(batch, INTRUDER, tokens, admitted, 0.0)
        engine.parts.recorder.arrive(request, None, names.TEXT_COMPLETION)
        began = time.perf_counter_ns()
        engine.submit(Answer(request, None), INTRUDER)
        while not delivered[-1][1]:
            if not engine.step():
                raise RuntimeError("the prompt never entered")
        self._synchronise()
        return _gaps(delivered[came - 1 :]), (delivered[-1][0] - began) / 1e6

    def _synchronise(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize()

    def step_bytes(self, batch: int, context: int) -> float:
        """What a step has to read: trunk, the experts that `batch` rows with independent choices touch, K and V."""
        spec = self.spec
        kinds = torch.Tensor, Rounded
        parts = [part for layer in self.trunk.layers for part in vars(layer).values() if isinstance(part, kinds)]
        trunk = sum(part.nbytes for part in [*parts, self.trunk.head])
        touched = spec.num_experts * (1 - (1 - spec.top_k / spec.num_experts) ** batch)
        experts = len(spec.moe_layers) * touched * self.experts.expert_bytes
        return float(trunk + experts + batch * context / PAGE * self.cache.block_bytes)


def _gaps(delivered: list[tuple[int, bool]]) -> list[float]:
    """Milliseconds between deliveries."""
    return [(b - a) / 1e6 for (a, _), (b, _) in pairwise(delivered)]


def profile(rig: Rig, batch: int, context: int, top: int = 16) -> None:
    """Prints the kernels of a step by their time, microseconds per step."""
    engine = rig.engine(batch, context, 64, ahead=True, sink=[])
    for _ in range(8):
        engine.step()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as seen:
        for _ in range(16):
            engine.step()
        torch.cuda.synchronize()
    kernels = sorted(seen.key_averages(), key=lambda kernel: -kernel.device_time_total)
    total, launches = (sum(values) / 16 for values in zip(*((k.device_time_total, k.count) for k in kernels), strict=True))
    print(f"  {total:9.0f} us in kernels, {launches:.0f} launches")
    for kernel in kernels[:top]:
        print(f"  {kernel.device_time_total / 16:9.0f} us {kernel.count / 16:6.1f} x {kernel.key[:90]}")


def collect() -> None:
    """What nobody holds any more leaves the device."""
    gc.collect()
    torch.cuda.empty_cache()


def bandwidth() -> float:
    """Bytes per second of a large copy, read and write counted."""
    a = torch.empty(1 << 30, dtype=torch.uint8, device="cuda")
    b = torch.empty_like(a)
    best = 0.0
    for _ in range(5):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        b.copy_(a)
        end.record()
        end.synchronize()
        best = max(best, 2 * a.numel() / (start.elapsed_time(end) / 1e3))
    return best


def peer(spec: ModelSpec, model: str, batches: list[int], context: int) -> Iterator[tuple[int, list[float]]]:
    """(batch, milliseconds of steps) of transformers on the same sizes, random weights, its experts as it chooses."""
    import transformers
    from transformers.initialization import no_init_weights

    config = synthetic_config(model)
    values = {key: value for key, value in config.items() if key != "model_type"}
    built = transformers.AutoConfig.for_model(config["model_type"], **values)
    with torch.device("cuda"), no_init_weights():
        twin = transformers.AutoModelForCausalLM.from_config(built, dtype=torch.bfloat16).eval()
    for parameter in twin.parameters():
        parameter.data.normal_(std=0.02)
    for batch in batches:
        cache = transformers.DynamicCache(config=built)
        shape = (batch, spec.kv_heads, context, spec.head_dim)
        for layer in range(spec.layers):
            cache.update(*(torch.randn(shape, dtype=torch.bfloat16, device="cuda") for _ in range(2)), layer)
        ids, times = torch.zeros(batch, 1, dtype=torch.long, device="cuda"), []
        with torch.inference_mode():
            for _ in range(12):
                began = time.perf_counter()
                ids = twin(ids, past_key_values=cache, use_cache=True).logits[:, -1:].argmax(-1)
                ids.tolist()
                times.append((time.perf_counter() - began) * 1e3)
        yield batch, times[4:]
        del cache
        collect()
