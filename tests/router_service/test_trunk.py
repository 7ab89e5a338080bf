"""The trunk against transformers: every family and flag, whole prompts, chunks, batches and padding.

Experts are computed here by a plain loop over `load_expert`, so that what is tested is the trunk, the cache and the gate.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from reference_model import CASES, Oracle
from torch.nn.functional import silu

from forefetch.spec import ModelSpec
from forefetch.telemetry.ring import StepRing, StepStamps
from forefetch.weights import Checkpoint, load_expert
from router_service.admission import Admitted, SamplingParams
from router_service.batch import StepBatch, StepBuffers
from router_service.cache import KvCache
from router_service.pages import PagePool
from router_service.scheduler import Request, Scheduler
from router_service.trunk import Trunk

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

    def __init__(self, folder: Path, *, max_step_tokens: int = 64, buckets: tuple[int, ...] = (), on: str = "cpu") -> None:
        self.spec, checkpoint = ModelSpec.load(folder), Checkpoint(folder)
        device, pages = torch.device(on), 40
        cache = KvCache(self.spec, pages=pages, page_size=PAGE, dtype=torch.float32, device=device)
        for pool in (*cache.k, *cache.v):
            pool.fill_(float("nan"))  # whatever was not written must not matter
        self.trunk = Trunk(self.spec, checkpoint, cache, dtype=torch.float32, device=device)
        self.trunk_reads = dict(checkpoint.read_log)
        self.experts = PlainExperts(self.spec, checkpoint, device)
        self.scheduler = Scheduler(PagePool(pages), page_size=PAGE, max_batch=8, max_step_tokens=max_step_tokens, max_waiting=8)
        self.buffers = StepBuffers(
            max_tokens=max_step_tokens, max_batch=8, max_pages=16, page_size=PAGE, device=device, buckets=buckets
        )
        self.ring = StepRing(4, self.spec.layers, 1)
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
        logits = self.trunk.forward(batch, self.experts, self.ring.begin(self.steps, 0))
        self.scheduler.commit(plan, logits.argmax(-1).tolist())
        for chunk in plan.chunks:
            if chunk.request.generated == chunk.request.admitted.max_tokens:
                self.scheduler.remove(chunk.request, 0.0)
        self.steps += 1
        return logits

    def run(self) -> None:
        while self.step() is not None:
            pass


def close(actual: torch.Tensor, expected: torch.Tensor) -> None:
    """float32 rounding through a few layers of sums over at most a few hundred terms: 2^-24 * ~1000, relative to the row."""
    scale = expected.abs().max()
    assert (actual - expected).abs().max() <= 6e-5 * scale


@pytest.mark.parametrize("case", CASES)
def test_prefill_logits_equal_the_oracle(case: str, checkpoint: Callable[[str], Path], oracle: Callable[[str], Oracle]) -> None:
    prompt, rig = CASES[case].prompt, Rig(checkpoint(case), max_step_tokens=9)
    expected = oracle(case).prefill_logits(prompt)
    for length in (1, 9, len(prompt)):  # 9 a step: chunks end inside and outside pages
        request = rig.add(prompt[:length], max_tokens=1)
        while request.generated == 0:
            logits = rig.step()
        assert logits is not None
        close(logits[0], expected[length - 1])


@pytest.mark.parametrize("case", CASES)
def test_decoding_continues_like_the_oracle(
    case: str, checkpoint: Callable[[str], Path], oracle: Callable[[str], Oracle]
) -> None:
    prompt, rig = CASES[case].prompt, Rig(checkpoint(case))
    request = rig.add(prompt, max_tokens=24)
    rig.run()
    assert request.tokens[len(prompt) :] == oracle(case).greedy(prompt, 24)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("case", CASES)
def test_a_gpu_gives_the_same_logits_and_tokens(
    case: str, checkpoint: Callable[[str], Path], oracle: Callable[[str], Oracle]
) -> None:
    prompt, rig = CASES[case].prompt, Rig(checkpoint(case), max_step_tokens=9, buckets=(1, 2, 4, 8), on="cuda")
    request = rig.add(prompt, max_tokens=24)
    while request.generated == 0:
        logits = rig.step()
    assert logits is not None
    close(logits[0].cpu(), oracle(case).prefill_logits(prompt)[-1])
    rig.run()
    assert request.tokens[len(prompt) :] == oracle(case).greedy(prompt, 24)


def test_answers_do_not_depend_on_the_batch_or_on_padding(checkpoint: Callable[[str], Path]) -> None:
    case = next(iter(CASES))
    prompts = [CASES[case].prompt[:n] for n in (3, 17, 8, 9, 23, 1)]
    alone = []
    for prompt in prompts:
        rig = Rig(checkpoint(case))
        alone.append(rig.add(prompt, max_tokens=12))
        rig.run()
    together = Rig(checkpoint(case), max_step_tokens=20, buckets=(1, 2, 4, 8, 16))
    requests = []
    for prompt in prompts:  # they join one by one while earlier ones decode
        requests.append(together.add(prompt, max_tokens=12))
        together.step()
    together.run()
    assert [r.tokens for r in requests] == [r.tokens for r in alone]


def test_the_router_never_reads_a_routed_expert(checkpoint: Callable[[str], Path]) -> None:
    for case in CASES:
        rig = Rig(checkpoint(case))
        spec = rig.spec
        stored = {
            part.name
            for layer in spec.moe_layers
            for expert in range(spec.num_experts)
            for part in vars(spec.expert_tensors(layer, expert)).values()
        }
        assert not stored & set(rig.trunk_reads)


def test_float16_kv_saturates_instead_of_overflowing(checkpoint: Callable[[str], Path]) -> None:
    spec = ModelSpec.load(checkpoint("qwen3"))
    cache = KvCache(spec, pages=2, page_size=PAGE, dtype=torch.float16, device=torch.device("cpu"))
    huge = torch.tensor([1e9, -1e9]).repeat(1, spec.kv_heads, spec.head_dim // 2)
    cache.write(0, torch.tensor([PAGE + 3]), huge, huge)
    assert cache.k[0][0, 1, 3, :2].tolist() == [65504.0, -65504.0]


def test_a_block_is_k_and_v_of_every_layer(checkpoint: Callable[[str], Path]) -> None:
    spec = ModelSpec.load(checkpoint("qwen3"))
    cache = KvCache(spec, pages=3, page_size=PAGE, dtype=torch.float32, device=torch.device("cpu"))
    for pool in (*cache.k, *cache.v):
        pool.normal_()
    block = cache.read_block(2)
    assert len(block) == cache.page_bytes(spec, PAGE, torch.float32)
    stored = torch.frombuffer(bytearray(block), dtype=torch.float32).view(spec.layers, 2, spec.kv_heads, PAGE, spec.head_dim)
    assert torch.equal(stored[1, 0], cache.k[1][:, 2])
    assert torch.equal(stored[2, 1], cache.v[2][:, 2])
