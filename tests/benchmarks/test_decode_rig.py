"""The rig that benchmarks time on a GPU, run on a CPU: what it drives changes, and a run on a GPU is too dear to find out."""

from __future__ import annotations

import pytest
import torch

from benchmarks.decode_rig import PAGE, Rig
from router_service.captured import CapturedTrunk
from tests.router_service.test_captured import PlainResident

SIZES = "layers=2,hidden_size=64,moe_intermediate_size=32,experts=6,num_experts_per_tok=2,vocab_size=2048"


@pytest.fixture(scope="module")
def rig() -> Rig:
    made = Rig(f"synthetic:qwen3-30b-a3b,{SIZES}", torch.device("cpu"), torch.float32, lambda step: step)
    made.experts = PlainResident(made.spec, made.checkpoint, made.device)
    return made


@pytest.mark.parametrize("ahead", [True, False])
@pytest.mark.parametrize("kv", ["bfloat16", "e2m0"])
def test_every_step_delivers_tokens_and_is_timed(rig: Rig, kv: str, ahead: bool) -> None:
    rig.put_cache(kv, 12, 4)
    found = rig.measure(3, 2 * PAGE, 6, ahead=ahead, warm=2)
    assert len(found.latency) == 6
    assert len(found.gaps) == 5
    assert len(found.timings) == 6
    assert all(value > 0 for value in (*found.gaps, *found.latency))


@pytest.mark.parametrize("kv", ["bfloat16", "e2m0"])
def test_a_prompt_enters_in_recorded_steps_while_others_decode(rig: Rig, kv: str, monkeypatch: pytest.MonkeyPatch) -> None:
    seen, fits = [], CapturedTrunk.fits
    monkeypatch.setattr(CapturedTrunk, "fits", lambda self, *step: seen.append(fits(self, *step)) or seen[-1])
    rig.put_cache(kv, 16, 3)
    gaps, first = rig.intrusion(2, 2 * PAGE, PAGE, 64)
    assert all(seen)
    assert first > 0
    assert len(gaps) >= 2


def test_a_rounded_trunk_is_timed_and_has_fewer_bytes(rig: Rig) -> None:
    rig.experts.expert_bytes, read = 1, []
    for kind in ("int8", "stored"):  # stored last: other tests use it
        rig.put_trunk(kind)
        rig.put_cache("e2m0", 12, 4)
        assert len(rig.measure(2, PAGE, 2, warm=1).gaps) == 1
        read.append(rig.step_bytes(0, 0))
    head = rig.spec.vocab_size * rig.spec.hidden_size
    assert read[0] < 0.4 * read[1]  # of float32: a quarter, norms, gates and scales
    assert read[1] - read[0] > 2.9 * head
