"""Recorded steps over sealed pages against the trunk as written: the same tokens while pages are sealed under way."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from forefetch.kernels.kv_codec import KvFormat
from forefetch.synthetic import open_model
from forefetch.telemetry.ring import StepRing
from router_service.admission import Admitted, SamplingParams
from router_service.captured import CapturedTrunk, CudaRecorder, DeviceExperts, Recorder
from router_service.layouts import LayoutBuffers
from router_service.pages import PagePool
from router_service.scheduler import Request, Scheduler
from router_service.sealed import SealedCache
from router_service.trunk import Trunk
from tests.router_service.test_captured import PlainResident, Spy

ON_GPU = pytest.param("cuda", marks=[pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")])
SIZES = "layers=2,hidden_size=64,moe_intermediate_size=32,experts=4,num_experts_per_tok=2,vocab_size=96,context=1024"
LANES = 4


class Rig:
    """A small random model over a sealed cache. `recorder` None: nothing is recorded; `plain`: nothing laid out either."""

    def __init__(
        self, format: KvFormat, exempt: tuple[int, ...], device: torch.device, recorder: Recorder | None, plain: bool = False
    ) -> None:
        shape = f"{SIZES},head_dim={format.head_dim},num_attention_heads=8,num_key_value_heads=2"
        spec, checkpoint = open_model(f"synthetic:qwen3-30b-a3b,{shape}", allow_synthetic=True)
        self.cache = SealedCache(spec, format, exempt=exempt, pages=24, lanes=LANES, max_rows=64, device=device)
        self.cache.pages.fill_(0xFF)
        for pool in (self.cache.tails, self.cache.sinks, *self.cache.exact.k, *self.cache.exact.v):
            pool.fill_(torch.nan)
        trunk = Trunk(spec, checkpoint, self.cache, dtype=torch.float32, device=device)
        sizes = {"max_tokens": 64, "max_batch": LANES, "max_pages": 8, "page_size": format.page}
        self.buffers = LayoutBuffers(**sizes, device=device, buckets=(1, 2, 4), chunk_rows=(64,))
        if plain:
            self.buffers.unrecorded()
        experts = PlainResident(spec, checkpoint, device)
        self.scheduler = Scheduler(
            PagePool(24), page_size=format.page, max_batch=LANES, max_step_tokens=64, max_waiting=8, recent=format.recent
        )
        self.model, self.experts = CapturedTrunk(trunk, experts, self.buffers, recorder or Spy()), DeviceExperts(experts)
        self.eager = trunk if recorder is None else None
        if recorder is not None:
            self.model.warm_up()
        self.ring, self.eager_steps, self.requests = StepRing(2, spec.layers, 1), 0, list[Request]()

    def add(self, length: int, answer: int, blocks: list[bytes] | None = None) -> None:
        """A request, its first pages from a cache."""
        ids = tuple((7 * i + length) % 96 for i in range(length))
        admitted = Admitted(ids, answer, False, SamplingParams(), (), frozenset(), "r")
        request = Request(len(self.requests), "r", ids, admitted, arrival=0.0)
        self.requests.append(request)
        self.scheduler.submit(request)
        self.scheduler.admit(0.0)
        for page, block in zip(request.pages, blocks or [], strict=False):
            self.cache.write_block(page, block)
        request.loaded_blocks = len(blocks or [])
        request.resume_at(request.loaded_blocks * self.cache.page_size)

    def run(self) -> list[list[int]]:
        """Every request to its end; the tokens of each."""
        step, self.blocks = 0, dict[int, list[bytes]]()
        while (plan := self.scheduler.plan()) is not None:
            batch, stamps = self.buffers.fill(step, plan), self.ring.begin(step, 0)
            if self.eager is not None:
                logits = self.eager.forward(batch, self.experts, stamps)
            else:
                logits = self.model.forward(batch, self.experts, stamps)
                self.eager_steps += not self.model._ran[step % 2].replayed
            self.cache.commit(batch)
            self.scheduler.commit(plan, logits.argmax(-1).tolist())
            for chunk in plan.chunks:
                if chunk.request.generated == chunk.request.admitted.max_tokens:
                    held = chunk.request.pages[: self.cache.format.sealed_pages(chunk.end)]
                    self.blocks[chunk.request.key] = [self.cache.read_block(page) for page in held]
                    self.scheduler.remove(chunk.request, 0.0)
            step += 1
        return [request.tokens for request in self.requests]


CASES = [
    pytest.param(KvFormat("e2m0", head_dim=16, page=32, sinks=2, recent=8), (), "cpu", id="e2m0"),
    pytest.param(KvFormat("fp4", head_dim=32, page=32, sinks=0, recent=0), (1,), "cpu", id="fp4 and an exempt layer"),
    pytest.param(KvFormat("e2m0", sinks=4, recent=16), (), "cuda", marks=ON_GPU.marks, id="e2m0 on a GPU"),
    pytest.param(KvFormat("asym3", sinks=4, recent=16), (0,), "cuda", marks=ON_GPU.marks, id="asym3 on a GPU"),
]


def kinds(device: torch.device) -> list[dict[str, Any]]:
    """The trunk as written with its plain batches, the same with batches in layouts, and recorded steps."""
    recorder = CudaRecorder(device) if device.type == "cuda" else Spy()
    return [{"recorder": None, "plain": True}, {"recorder": None}, {"recorder": recorder}]


@pytest.mark.parametrize(("format", "exempt", "on"), CASES)
def test_recorded_steps_give_the_tokens_of_written_ones(format: KvFormat, exempt: tuple[int, ...], on: str) -> None:
    """Prompts of several chunks, some that end within a page, some at its edge, while others decode and pages are sealed."""
    answers = []
    for kind in kinds(torch.device(on)):
        rig = Rig(format, exempt, torch.device(on), **kind)
        for length, answer in ((format.page - 3, 9), (1, format.page + 12), (2 * format.page, 5), (3 * format.page + 1, 9)):
            rig.add(length, answer)
        answers.append(rig.run())
    assert answers[0] == answers[1] == answers[2]
    assert rig.eager_steps <= format.sinks + 1  # those in which a prompt of one token still writes sinks


@pytest.mark.parametrize("on", ["cpu", ON_GPU])
def test_a_cached_prefix_brings_its_sinks_into_recorded_steps(on: str) -> None:
    format, device = KvFormat("e2m0", head_dim=16 if on == "cpu" else 128, page=32, sinks=2, recent=0), torch.device(on)
    first = Rig(format, (), device, None, plain=True)
    first.add(100, 20)
    answer = first.run()[0]
    blocks = first.blocks[0][:2]
    for kind in kinds(device):
        rig = Rig(format, (), device, **kind)
        rig.add(100, 20, blocks)
        assert rig.run()[0] == answer
