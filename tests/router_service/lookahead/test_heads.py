"""Hints on every family: the control, exactness where nothing is left out, zero corrections, the stacked form."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace

import pytest
import torch
from reference_model import CASES

from forefetch.telemetry.ring import StepStamps
from router_service.batch import StepBatch
from router_service.lookahead.corpus import Chunk
from router_service.lookahead.estimate import Network
from router_service.lookahead.evaluate import (
    CONTROL,
    METHODS,
    NEXT,
    NO_ATTENTION,
    REFINED,
    SECOND,
    TIER0,
    TIER0_ATTENDED,
    Evaluator,
    Scores,
)
from router_service.lookahead.heads import EXTRA, Head, Hint, Lookahead
from router_service.lookahead.record import Recorder
from router_service.lookahead.runner import Runner
from router_service.lookahead.sketch import Sketch
from router_service.lookahead.store import Trained
from router_service.trunk import Attend

Runners = Callable[[str], Runner]
Untrained = Callable[[Runner], Trained]


def scores(runner: Runner, trained: Trained, sequences: list[Chunk]) -> Scores:
    evaluator = Evaluator(runner.trunk, trained)
    evaluator.begin()
    for _ in runner.follow(sorted((chunk.ids for chunk in sequences), key=len, reverse=True), evaluator):
        pass
    return evaluator.scores


@contextmanager
def without_attention(runner: Runner) -> Iterator[None]:
    kept = runner.trunk.layers
    runner.trunk.layers = [
        replace(layer, o=torch.zeros_like(layer.o), o_bias=None if layer.o_bias is None else torch.zeros_like(layer.o_bias))
        for layer in kept
    ]
    yield
    runner.trunk.layers = kept


class Constant:
    """Experts whose output does not depend on their input."""

    def __init__(self, outputs: dict[int, torch.Tensor]) -> None:
        self.outputs, self.rows = outputs, torch.empty(0)

    def send(self, batch: StepBatch, layer: int, x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> None:
        self.rows = (self.outputs[layer][ids] * weights[..., None]).sum(1)

    def add(self, out: torch.Tensor, layer: int, stamps: StepStamps) -> int:
        out += self.rows
        return 0


@contextmanager
def constant_experts(runner: Runner, outputs: dict[int, torch.Tensor]) -> Iterator[None]:
    kept = runner.experts
    runner.experts = Constant(outputs)  # type: ignore[assignment]
    yield
    runner.experts = kept


@pytest.mark.parametrize("case", CASES)
def test_control_a_gate_on_its_own_input_is_always_right(
    case: str, runner: Runners, untrained: Untrained, sequences: list[Chunk]
) -> None:
    model = runner(case)
    found = scores(model, untrained(model), sequences).layers(CONTROL, CONTROL)
    assert list(found) == list(model.spec.moe_layers)
    assert all(row["slots@k"] == 1.0 and row["whole_set"] == 1.0 for row in found.values())


@pytest.mark.parametrize("case", CASES)
def test_without_attention_nothing_is_left_out_of_a_refined_hint(
    case: str, runner: Runners, untrained: Untrained, sequences: list[Chunk]
) -> None:
    model = runner(case)
    with without_attention(model):
        found = scores(model, untrained(model), sequences).layers(TIER0, REFINED)
    assert list(found) == list(model.spec.moe_layers[1:])
    # One near-tie among hundreds of choices may fall the other way: the gate's matrix is folded with the norm's weight.
    assert all(row["slots@k"] > 0.995 and row["slots@k+2"] == 1.0 for row in found.values())


@pytest.mark.parametrize("case", CASES)
def test_with_constant_experts_too_nothing_is_left_out_of_the_first_hint(
    case: str, runner: Runners, untrained: Untrained, sequences: list[Chunk]
) -> None:
    model = runner(case)
    trained = untrained(model)
    with without_attention(model), constant_experts(model, trained.outputs):
        found = scores(model, trained, sequences)
    assert all(row["slots@k+2"] == 1.0 for row in found.layers(TIER0, NEXT).values())
    assert list(found.layers(NO_ATTENTION, SECOND)) == list(model.spec.moe_layers[2:])


@pytest.mark.parametrize("case", CASES)
def test_with_constant_experts_nothing_is_left_out_by_way_of_attention(
    case: str, runner: Runners, untrained: Untrained, sequences: list[Chunk]
) -> None:
    model = runner(case)
    trained = untrained(model)
    with constant_experts(model, trained.outputs):
        found = scores(model, trained, sequences)
    for distance, first in ((NEXT, 1), (SECOND, 2)):
        layers = found.layers(TIER0_ATTENDED, distance)
        assert list(layers) == list(model.spec.moe_layers[first:])
        # Naming K + 2 hides a near-tie; a choice that fell the other way changes what the layer behind it sees.
        assert all(row["slots@k+2"] > 0.99 for row in layers.values())


def test_hints_by_way_of_attention_change_no_logit(runner: Runners, untrained: Untrained, sequences: list[Chunk]) -> None:
    model = runner("qwen3-dense-first")
    lookahead = untrained(model).on(model.trunk)

    class Wild:
        """Runs the attention of later layers on nonsense."""

        def chosen(self, layer: int, x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor, attend: Attend) -> None:
            lookahead.predict(layer, -3.0 * x, ids, weights, attend)

        def returned(self, layer: int, x: torch.Tensor) -> None:
            lookahead.refine(layer, -x)

    ids = [chunk.ids for chunk in sequences]
    for run in (model.prefill, lambda ids, observer=None: model.decode([row[0] for row in ids], [0] * len(ids), observer)):
        assert torch.equal(run(ids, Wild()), run(ids))


def test_mean_outputs_find_what_constant_experts_add(runner: Runners, untrained: Untrained) -> None:
    model, draw = runner("qwen2-shared"), torch.Generator().manual_seed(5)
    truth = untrained(model).outputs
    parts = [Chunk(str(i), torch.randint(4, 320, (48,), generator=draw).tolist()) for i in range(16)]
    recorder = Recorder(model.trunk, 16 * 48, torch.device("cpu"))
    with constant_experts(model, truth):
        for at in range(0, 16, 4):
            recorder.begin(parts[at : at + 4], frozenset())
            model.prefill([chunk.ids for chunk in parts[at : at + 4]], recorder)
    for layer, found in recorder.mean_outputs().items():
        often = recorder.load[layer] > 50
        assert often.any()
        # The ridge is a thousandth of an average expert's weight.
        torch.testing.assert_close(found[often], truth[layer][often], rtol=0.05, atol=0.1)


class Hints:
    """Keeps what a Lookahead names."""

    def __init__(self, lookahead: Lookahead, *, refined: bool = True) -> None:
        self.lookahead, self.refined, self.hints = lookahead, refined, list[Hint]()

    def chosen(self, layer: int, x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor, attend: Attend) -> None:
        self.hints += self.lookahead.predict(layer, x, ids, weights)

    def returned(self, layer: int, x: torch.Tensor) -> None:
        hint = self.lookahead.refine(layer, x)
        self.hints += [hint] if hint and self.refined else []


def hints(runner: Runner, trained: Trained, sequences: list[Chunk]) -> list[Hint]:
    kept = Hints(trained.on(runner.trunk))
    runner.prefill([chunk.ids for chunk in sequences], kept)
    return kept.hints


def keys(runner: Runner) -> list[tuple[int, int]]:
    moe = runner.spec.moe_layers
    return [(layer, d) for place, layer in enumerate(moe) for d in range(3) if place + max(d, 1) < len(moe)]


def width(runner: Runner, distance: int) -> int:
    return runner.spec.hidden_size if distance == 0 else 2 * runner.spec.hidden_size + runner.spec.num_experts


@pytest.mark.parametrize("case", CASES)
def test_a_zero_correction_is_tier_0_to_the_bit(
    case: str, runner: Runners, untrained: Untrained, sequences: list[Chunk]
) -> None:
    model, cpu = runner(case), torch.device("cpu")
    plain, headed = untrained(model), untrained(model)
    headed.heads = {key: Head(Network.zero(width(model, key[1]), 8, model.spec.num_experts, cpu)) for key in keys(model)}
    for mine, other in zip(hints(model, headed, sequences), hints(model, plain, sequences), strict=True):
        assert mine.layer == other.layer
        assert torch.equal(mine.experts, other.experts)
        assert torch.equal(mine.probabilities, other.probabilities)


def test_hints_name_distinct_experts_likeliest_first(runner: Runners, untrained: Untrained, sequences: list[Chunk]) -> None:
    model = runner("mixtral")
    for hint in hints(model, untrained(model), sequences):
        assert hint.experts.shape == hint.probabilities.shape == (89, model.spec.top_k + EXTRA)
        assert all(len(set(row)) == len(row) for row in hint.experts.tolist())
        assert bool((hint.probabilities.diff(dim=1) <= 0).all())
        assert bool(((hint.probabilities >= 0) & (hint.probabilities <= 1)).all())


class Definition:
    """The formula at the top of heads.py, one target after the other."""

    def __init__(self, lookahead: Lookahead, trained: Trained, moe: tuple[int, ...]) -> None:
        self.estimator, self.heads, self.moe = lookahead.estimator, trained.heads, moe
        self.logits: list[torch.Tensor] = []

    def chosen(self, layer: int, x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor, attend: Attend) -> None:
        place, look, before = self.moe.index(layer), self.estimator, layer
        estimate, seen = look.behind(layer, x, ids, weights), None
        for distance, target in enumerate(self.moe[place + 1 : place + 3], 1):
            estimate = look.reach(before, target, estimate)
            seen = look.features(x, estimate, ids, weights) if seen is None else seen
            correction = self.heads[layer, distance].correction
            logits = look.logits(target, estimate)
            self.logits.append(logits if correction is None else logits + correction(seen))
            before = target

    def returned(self, layer: int, x: torch.Tensor) -> None:
        pass


@pytest.mark.parametrize("case", CASES)
def test_the_stacked_form_computes_the_formula(
    case: str, runner: Runners, untrained: Untrained, sequences: list[Chunk]
) -> None:
    model, trained, draw = runner(case), untrained(runner(case)), torch.Generator().manual_seed(6)

    def correction(distance: int) -> Network:
        shapes = (8, width(model, distance)), (8,), (model.spec.num_experts, 8), (model.spec.num_experts,)
        return Network(*(0.1 * torch.randn(shape, generator=draw) for shape in shapes))

    trained.heads = {key: Head(correction(key[1]) if key[1] != 1 or key[0] % 2 else None) for key in keys(model)}
    hidden, experts = model.spec.hidden_size, model.spec.num_experts
    shapes = (24, hidden), (24,), (12, experts), (12,), (hidden, 12), (hidden,)
    trained.sketches = {
        layer: Sketch(*(0.1 * torch.randn(shape, generator=draw) for shape in shapes))
        for layer in model.spec.moe_layers[:: 2 if len(model.spec.moe_layers) > 2 else 1]
    }
    lookahead = trained.on(model.trunk)
    kept, definition = Hints(lookahead, refined=False), Definition(lookahead, trained, model.spec.moe_layers)
    ids = [chunk.ids for chunk in sequences]
    model.prefill(ids, kept)
    model.prefill(ids, definition)
    for hint, logits in zip(kept.hints, definition.logits, strict=True):
        best = logits.topk(hint.experts.shape[1]).values
        torch.testing.assert_close(logits.gather(1, hint.experts), best, rtol=1e-4, atol=1e-4)


def test_every_method_is_scored_at_both_distances(runner: Runners, untrained: Untrained, sequences: list[Chunk]) -> None:
    model = runner("qwen3-dense-first")
    found = scores(model, untrained(model), sequences)
    for method in METHODS:
        for distance in (NEXT, SECOND)[: len(model.spec.moe_layers) - 1]:
            assert list(found.layers(method, distance)) == list(model.spec.moe_layers[(NEXT, SECOND).index(distance) + 1 :])
            assert all(0.0 <= share <= 1.0 for share in found.mean(method, distance).values())
            assert found.mean(method, distance)
