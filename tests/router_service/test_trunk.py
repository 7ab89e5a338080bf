"""The trunk against transformers: every family and flag, whole prompts, chunks, batches and padding.

Experts are computed here by a plain loop over `load_expert`, so that what is tested is the trunk, the cache and the gate.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from reference_model import CASES, Oracle
from trunk_rig import PAGE, Rig, close, multiply_out

from forefetch.spec import ModelSpec
from forefetch.telemetry.ring import StepStamps
from router_service.cache import KvCache
from router_service.finite import NotFinite


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


@pytest.mark.parametrize("case", CASES)
def test_a_rounded_trunk_is_one_of_its_rounded_weights(case: str, checkpoint: Callable[[str], Path]) -> None:
    prompt, logits = CASES[case].prompt, []
    rounded, plain, stored = (Rig(checkpoint(case), rounded=kept) for kept in (True, True, False))
    multiply_out(plain.trunk)
    for rig in (rounded, plain, stored):
        rig.add(prompt, max_tokens=4)
        logits.append(torch.stack([step[0] for step in iter(rig.step, None)]))
    close(logits[0], logits[1])
    assert (logits[0][0] - logits[2][0]).norm() > 1e-4 * logits[2][0].norm(), "nothing was rounded"


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


def test_prompt_rows_that_are_no_numbers_are_found_before_anything_counts(checkpoint: Callable[[str], Path]) -> None:
    """A worker answers one row with NaN, in a chunk of a prompt that chooses no token yet; the other prompt is sound."""
    rig = Rig(checkpoint("qwen3"), max_step_tokens=12)
    sound, broken = rig.add([5, 6, 7], max_tokens=1), rig.add([9] * 30, max_tokens=1)
    whole = rig.experts

    class Broken:
        send = whole.send

        def add(self, out: torch.Tensor, layer: int, stamps: StepStamps) -> int:
            whole.add(out, layer, stamps)
            out[7] = float("nan")
            return 0

    rig.experts = Broken()
    with pytest.raises(NotFinite) as caught:
        rig.step()
    assert caught.value.chunks == [1]
    assert (sound.computed, broken.computed) == (0, 0)


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
