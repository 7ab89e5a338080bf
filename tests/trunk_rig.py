"""A trunk with everything around it but the engine's thread, and experts computed by a plain loop over `load_expert`."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import torch
from torch.nn.functional import silu

from forefetch.kernels.few_rows import Matrix, Rounded
from forefetch.spec import ModelSpec
from forefetch.telemetry.ring import StepRing, StepStamps
from forefetch.weights import Checkpoint, load_expert
from router_service.admission import Admitted, SamplingParams
from router_service.batch import StepBatch, StepBuffers
from router_service.cache import KvCache
from router_service.hints import Hints
from router_service.layers import Mlp
from router_service.pages import PagePool
from router_service.scheduler import Request, Scheduler
from router_service.trunk import Experts, Trunk

PAGE = 8


class PlainExperts:
    """Every expert in memory, one pair at a time in float32."""

    def __init__(self, spec: ModelSpec, checkpoint: Checkpoint, device: torch.device) -> None:
        self.weights = {
            (layer, expert): tuple(t.float().to(device) for t in load_expert(checkpoint, spec, layer, expert))
            for layer in spec.moe_layers
            for expert in range(spec.num_experts)
        }
        self.rows = torch.empty(0)

    def send(self, batch: StepBatch, layer: int, x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> None:
        self.rows = torch.zeros_like(x)
        for t in range(batch.tokens):
            for expert, weight in zip(ids[t].tolist(), weights[t].tolist(), strict=True):
                w13, w2 = self.weights[layer, expert]
                gate, up = (w13 @ x[t]).chunk(2)
                self.rows[t] += weight * (w2 @ (silu(gate) * up))

    def add(self, out: torch.Tensor, layer: int, stamps: StepStamps) -> int:
        out += self.rows
        return 0


class Rig:
    """A trunk with everything around it but the engine's thread."""

    def __init__(
        self,
        folder: Path,
        *,
        max_step_tokens: int = 64,
        buckets: tuple[int, ...] = (),
        on: str = "cpu",
        rounded: bool = False,
    ) -> None:
        self.spec, checkpoint = ModelSpec.load(folder), Checkpoint(folder)
        device, pages = torch.device(on), 40
        cache = KvCache(self.spec, pages=pages, page_size=PAGE, dtype=torch.float32, device=device)
        for pool in (*cache.k, *cache.v):
            pool.fill_(float("nan"))  # whatever was not written must not matter
        self.trunk = Trunk(self.spec, checkpoint, cache, dtype=torch.float32, device=device, rounded=rounded)
        self.trunk_reads = dict(checkpoint.read_log)
        self.experts: Experts = PlainExperts(self.spec, checkpoint, device)
        self.scheduler = Scheduler(PagePool(pages), page_size=PAGE, max_batch=8, max_step_tokens=max_step_tokens, max_waiting=8)
        self.buffers = StepBuffers(
            max_tokens=max_step_tokens, max_batch=8, max_pages=16, page_size=PAGE, device=device, buckets=buckets
        )
        self.ring = StepRing(4, self.spec.layers, 1)
        self.hints: Hints | None = None
        self.steps = 0

    def add(self, prompt: list[int], max_tokens: int) -> Request:
        admitted = Admitted(tuple(prompt), max_tokens, False, SamplingParams(), (), frozenset(), "r")
        request = Request(self.steps, "r", tuple(prompt), admitted, arrival=0.0)
        self.scheduler.submit(request)
        self.scheduler.admit(0.0)
        return request

    def step(self) -> torch.Tensor | None:
        """One greedy step -> logits [S, V] of the rows that chose."""
        plan = self.scheduler.plan()
        if plan is None:
            return None
        batch = self.buffers.fill(self.steps, plan)
        stamps = self.ring.begin(self.steps, 0)
        observer = self.hints.begin(batch, stamps) if self.hints is not None else None
        logits = self.trunk.forward(batch, self.experts, stamps, observer)
        timings = stamps.finish(1, 0, len(plan.chunks), plan.tokens)
        if self.hints is not None:
            self.hints.learn(timings)
        ids = logits.argmax(-1).tolist()
        if self.hints is not None:
            self.hints.landed(ids)
        self.scheduler.commit(plan, ids)
        for chunk in plan.chunks:
            if chunk.request.generated == chunk.request.admitted.max_tokens:
                self.scheduler.remove(chunk.request, 0.0)
        self.steps += 1
        return logits

    def run(self) -> None:
        while self.step() is not None:
            pass


def multiply_out(trunk: Trunk) -> None:
    """Has a rounded trunk keep its matrices in the compute type, as a checkpoint with these values would be kept."""

    def plain(matrix: Matrix) -> torch.Tensor:
        assert isinstance(matrix, Rounded)
        return matrix.dense(trunk.dtype).contiguous()

    def mlp(one: Mlp | None) -> Mlp | None:
        return None if one is None else Mlp(plain(one.w13), plain(one.w2))

    trunk.layers = [
        replace(layer, qkv=plain(layer.qkv), o=plain(layer.o), dense=mlp(layer.dense), shared=mlp(layer.shared))
        for layer in trunk.layers
    ]
    trunk.head = plain(trunk.head).t().contiguous()


def close(actual: torch.Tensor, expected: torch.Tensor) -> None:
    """float32 rounding through a few layers of sums over at most a few hundred terms: 2^-24 * ~1000, relative to the row."""
    scale = expected.abs().max()
    assert (actual - expected).abs().max() <= 6e-5 * scale
