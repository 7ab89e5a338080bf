"""Decode steps by compiled kernels: every family and flag against transformers, layer by layer and in one call."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from reference_model import CASES, Oracle, build
from trunk_rig import Rig, close

from expert_worker import client as expert
from expert_worker.client import ExpertConfig
from forefetch.kernels import compiled

pytestmark = pytest.mark.skipif(not compiled.available(), reason="Numba is not installed")
if compiled.available():
    from forefetch.kernels.compiled.crew import FIRST_HELPER, TAKEN


class CompiledRig(Rig):
    """A Rig whose decode steps are compiled; `whole`: with a local worker, so that a step is one call."""

    def __init__(self, folder: Path, *, whole: bool, rounded: bool = False) -> None:
        from router_service.compiled import CompiledTrunk, Local
        from router_service.workers import Workers

        super().__init__(folder, rounded=rounded)
        config = ExpertConfig(model=str(folder), device="cpu")
        self.workers = Workers(self.spec, ["local"], lambda _address: expert.local(config))
        self.workers.wait_complete(240.0)
        experts = expert.whole_of(self.workers.rows[0].link)
        assert experts is not None
        local = Local(self.workers.rows[0], experts) if whole else None
        self.plain = self.trunk
        self.trunk = CompiledTrunk(self.trunk, 8, self.workers, local)  # type: ignore[assignment]


@pytest.mark.parametrize("whole", [False, True])
@pytest.mark.parametrize("case", CASES)
def test_decoding_continues_like_the_oracle(
    case: str, whole: bool, checkpoint: Callable[[str], Path], oracle: Callable[[str], Oracle]
) -> None:
    prompt, rig = CASES[case].prompt, CompiledRig(checkpoint(case), whole=whole)
    request = rig.add(prompt, max_tokens=24)
    tokens = oracle(case).greedy(prompt, 24)
    expected = oracle(case).prefill_logits([*prompt, *tokens[:-1]])
    for index in range(24):
        logits = rig.step()
        assert logits is not None
        close(logits[0], expected[len(prompt) - 1 + index])
    assert request.tokens[len(prompt) :] == tokens


def test_a_rounded_trunk_is_compiled_as_it_is_written(checkpoint: Callable[[str], Path]) -> None:
    folder = checkpoint("qwen2-shared")
    rigs = Rig(folder, rounded=True), CompiledRig(folder, whole=True, rounded=True)
    for rig in rigs:
        rig.add(CASES["qwen2-shared"].prompt, max_tokens=4)
    steps = 0
    for written, compiled_ in zip(*(iter(rig.step, None) for rig in rigs), strict=True):
        close(compiled_[0], written[0])
        steps += 1
    assert steps == 4


@pytest.mark.parametrize("whole", [False, True])
def test_every_step_says_once_that_it_computes(whole: bool, checkpoint: Callable[[str], Path]) -> None:
    rig = CompiledRig(checkpoint("qwen3"), whole=whole)
    said: list[None] = []
    rig.trunk.computing = lambda: said.append(None)  # type: ignore[attr-defined]
    rig.add(CASES["qwen3"].prompt, max_tokens=4)
    assert len(list(iter(rig.step, None))) == len(said) == 4, "a prompt's step, which is not compiled, and three that are"


@pytest.mark.parametrize("whole", [False, True])
def test_answers_do_not_depend_on_the_batch(whole: bool, checkpoint: Callable[[str], Path]) -> None:
    case = next(iter(CASES))
    prompts = [CASES[case].prompt[:n] for n in (3, 17, 8, 9, 23, 1)]
    alone = []
    for prompt in prompts:
        rig = CompiledRig(checkpoint(case), whole=whole)
        rig.add(prompt, max_tokens=6)
        alone.append([logits[0].clone() for logits in iter(rig.step, None)])
    rig = CompiledRig(checkpoint(case), whole=whole)
    for prompt in prompts:
        rig.add(prompt, max_tokens=6)
    rig.step()  # the prompts, which are not compiled
    for step in range(1, 6):
        logits = rig.step()
        assert logits is not None
        for row, one in enumerate(alone):
            close(logits[row], one[step])
    assert rig.step() is None


def test_a_whole_step_counts_what_links_would_have_counted(checkpoint: Callable[[str], Path]) -> None:
    rig = CompiledRig(checkpoint("qwen3"), whole=True)
    rig.add(CASES["qwen3"].prompt, max_tokens=5)
    rig.step()
    before = rig.workers.load.sum()
    while rig.step() is not None:
        pass
    layers, pairs = len(rig.spec.moe_layers), 4 * rig.spec.top_k
    worker = rig.workers.rows[0]
    assert rig.workers.load.sum() - before == layers * pairs == worker.pairs
    assert worker.calls == 4 * layers
    core = worker.link.core  # type: ignore[union-attr]
    assert (core.calls, core.rows, core.pairs) == (4 * layers, 4 * layers, layers * pairs)
    assert core.experts.load.sum() == layers * pairs == core.verified.resident
    record = rig.ring.read(3)
    assert record is not None
    assert (record.layers[rig.spec.moe_layers[0]] > 0).all()
    assert record.calls[:, 0, 0].sum() == layers


def test_helpers_change_no_bit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A model so wide that products, experts, rows that enter and attention are all shared."""
    sizes = {"hidden_size": 512, "head_dim": 64, "num_attention_heads": 8, "moe_intermediate_size": 512, "num_hidden_layers": 2}
    folder = build(replace(CASES["qwen3"], name="wide", config={**CASES["qwen3"].config, **sizes}), tmp_path)

    def answer(rig: CompiledRig) -> list[torch.Tensor]:
        for cut in range(8):
            rig.add(CASES["qwen3"].prompt[cut:][:12], max_tokens=6)
        return [logits.clone() for logits in iter(rig.step, None)]

    monkeypatch.setattr("router_service.compiled.helpers", lambda spare: 0)
    alone = answer(CompiledRig(folder, whole=True))
    monkeypatch.setattr("router_service.compiled.helpers", lambda spare: 2)
    rig = CompiledRig(folder, whole=True)
    board, deadline = rig.trunk.board, time.monotonic() + 240  # type: ignore[attr-defined]
    while min(board[FIRST_HELPER + TAKEN :: 8][:2]) == 0:  # on a busy machine they may come too late at first
        assert time.monotonic() < deadline, "a helper never takes anything"
        helped = answer(rig)
        assert len(alone) == len(helped)
        assert all(torch.equal(one, other) for one, other in zip(alone, helped, strict=True))


def test_nan_reaches_the_logits_of_its_own_row_alone(checkpoint: Callable[[str], Path]) -> None:
    rig = CompiledRig(checkpoint("qwen3"), whole=True)
    sick, well = (rig.add(CASES["qwen3"].prompt[:n], max_tokens=4) for n in (9, 5))
    rig.step()
    rig.plain.cache.k[0][:, sick.pages[0]] = torch.nan
    logits = rig.step()
    assert logits is not None
    assert logits[0].isnan().all()
    assert logits[1].isfinite().all()
    assert well.generated == 2
