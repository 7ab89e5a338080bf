"""A recorded step whose experts are in few slots, with heads beside it: the oracle's tokens, and experts that come and go."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from reference_model import CASES, Case, Oracle, build
from trunk_rig import PAGE, Rig

from expert_worker.in_place import InPlaceExperts
from expert_worker.packed import packed_format
from forefetch.kernels.residency import COUNTERS
from forefetch.weights import Checkpoint
from router_service.beside import RecordedHeads
from router_service.captured import CapturedTrunk, Recorder, Replay
from router_service.layouts import LayoutBuffers
from router_service.lookahead.estimate import Estimator
from router_service.lookahead.heads import Lookahead

GPU = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]
INTERPRETED = pytest.mark.skipif(torch.cuda.is_available(), reason="the interpreter is only on where there is no CUDA device")
WIDE = Case("qwen3-wide", "qwen3_moe", {**CASES["qwen3"].config, "moe_intermediate_size": 64})  # kernels take multiples of 32


class SlotsRig(Rig):
    """A Rig whose recorded steps have `slots` slots for their 24 experts. Steps with prompts are recorded too if `prompts`."""

    def __init__(self, folder: Path, slots: int, recorder: Recorder | None, on: str, prompts: bool) -> None:
        super().__init__(folder, on=on)
        device = torch.device(on)
        sizes = {"max_tokens": 64, "max_batch": 4, "max_pages": 16, "page_size": PAGE}
        self.buffers = LayoutBuffers(**sizes, device=device, buckets=(4,), chunk_rows=(64,))
        format = packed_format(self.spec, "float32", torch.float32, device)
        place = {"device": device, "dtype": torch.float32, "max_rows": 80}
        self.few = InPlaceExperts(self.spec, Checkpoint(folder), tuple(range(8)), format, slots=slots, **place)
        heads = RecordedHeads(Lookahead(self.trunk, Estimator(self.trunk, {}), {}))
        self.few.ahead = heads
        self.trunk = CapturedTrunk(self.trunk, self.few, self.buffers, recorder)  # type: ignore[assignment]
        self.trunk.see = heads.see  # type: ignore[attr-defined]
        if recorder is None:
            self.trunk.warm_up()  # type: ignore[attr-defined]
            steps = self.trunk._steps  # type: ignore[attr-defined]
            self.trunk._steps = {layout: step for layout, step in steps.items() if prompts or not layout[1]}  # type: ignore[attr-defined]
        else:  # what is not replayed is not recorded here: the interpreter is slow
            for layout in ((4, 0), (4, 64))[: 1 + prompts]:
                self.trunk._steps[*layout, False] = self.trunk._recorded(self.buffers.idle(*layout), False)  # type: ignore[attr-defined]


def lazily(step: object) -> Replay:
    """Records nothing and runs when it is replayed."""
    return step  # type: ignore[return-value]


@pytest.mark.parametrize(
    ("on", "slots", "count", "prompts"),
    [
        pytest.param("cpu", 5, 3, False, marks=INTERPRETED),
        pytest.param("cuda", 5, 24, True, marks=GPU),
        pytest.param("cuda", 12, 24, False, marks=GPU),
    ],
)
def test_tokens_are_the_oracles(on: str, slots: int, count: int, prompts: bool, tmp_path: Path) -> None:
    """Also where only decode steps are recorded, and prompts' steps move the same experts from the host."""
    folder = build(WIDE, tmp_path)
    oracle, prompt = Oracle(folder), CASES["qwen3"].prompt
    rig = SlotsRig(folder, slots, None if on == "cuda" else lazily, on, prompts)
    rig.steps = 1  # the first of every 32 is marked
    texts = [prompt[:5], prompt[:7]] if on == "cpu" else [prompt, prompt[:7], prompt[:9]]
    requests = [rig.add(p, max_tokens=count) for p in texts]
    replayed = []
    while rig.step() is not None:
        replayed.append(rig.trunk._ran[(rig.steps - 1) % 2].replayed)  # type: ignore[attr-defined]
    assert replayed[0] == prompts
    assert all(replayed[1 - count :])
    for p, request in zip(texts, requests, strict=True):
        assert request.tokens[len(p) :] == oracle.greedy(p, count)
    found = dict(zip(COUNTERS, rig.few.counters.tolist(), strict=True))
    assert found["brought"] > 0
    assert found["hits"] + found["late"] > 0  # heads were heard
    assert found["misses"] + found["late"] > 0  # read in place
