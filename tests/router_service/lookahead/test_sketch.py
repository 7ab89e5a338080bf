"""Sketches: units that are copied are the experts' own; with all of them the layer comes out exactly."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from router_service.lookahead.descent import descend
from router_service.lookahead.estimate import Estimator
from router_service.lookahead.record import Recorder
from router_service.lookahead.runner import Runner
from router_service.lookahead.sketch import Sketch, copied

CASES = ("qwen3", "granite", "mixtral")


def recorded(model: Runner, rows: int = 60) -> Recorder:
    draw = torch.Generator().manual_seed(3)
    recorder = Recorder(model.trunk, rows, torch.device("cpu"))
    recorder._place = slice(0, rows)
    recorder.trace.rows = rows
    model.prefill([torch.randint(4, 300, (rows // 2,), generator=draw).tolist() for _ in range(2)], recorder)
    return recorder


def made(model: Runner, recorder: Recorder, layer: int, width: int) -> tuple[Sketch, torch.Tensor, torch.Tensor]:
    look, trace = Estimator(model.trunk, {}), recorder.trace
    x, ids, weights = trace.x[layer].float(), trace.ids[layer].long(), trace.weights[layer].float()
    unit, choice = look.unit(x), look.choice(x, ids, weights)
    norm, multiplier = model.trunk.layers[layer].post_norm, model.spec.residual_multiplier
    return copied(model.experts.weights(layer), norm, unit, choice, width, multiplier), x, look.behind(layer, x, ids, weights)


@pytest.mark.parametrize("case", CASES)
def test_a_sketch_with_every_unit_is_the_layer(runner: Callable[[str], Runner], case: str) -> None:
    model = runner(case)
    layer = model.spec.moe_layers[0]
    recorder = recorded(model)
    sketch, x, without = made(model, recorder, layer, 10**6)
    assert len(sketch.base) == model.spec.num_experts * model.spec.expert_width
    look, trace = Estimator(model.trunk, {}), recorder.trace
    choice = look.choice(x, trace.ids[layer].long(), trace.weights[layer].float())
    estimate = without + sketch(look.unit(x), choice)
    after = trace.after[layer].float()
    # The trace is float16: 2^-11 of the largest value of a row, on both sides.
    assert bool(((estimate - after).abs().amax(1) <= 4e-3 * after.abs().amax(1)).all())


def test_units_that_are_kept_are_those_that_vary_most(runner: Callable[[str], Runner]) -> None:
    model = runner("qwen3")
    recorder = recorded(model)
    look, trace, errors = Estimator(model.trunk, {}), recorder.trace, []
    for width in (16, 64, 160, 320):
        sketch, x, without = made(model, recorder, 0, width)
        assert len(sketch.base) == width
        estimate = without + sketch(look.unit(x), look.choice(x, trace.ids[0].long(), trace.weights[0].float()))
        errors.append(float((estimate - trace.after[0].float()).square().sum()))
    assert errors == sorted(errors, reverse=True)
    assert errors[-1] < 1e-3 * errors[0]


def test_descent_finds_a_minimum_and_leaves_plain_tensors() -> None:
    draw = torch.Generator().manual_seed(1)
    target = torch.randn(6, generator=draw)
    features = torch.randn(512, 6, generator=draw)
    found = torch.zeros(6)

    def value(part: torch.Tensor) -> torch.Tensor:
        return ((features[part] @ (found - target)) ** 2).mean()

    descend([found], value, torch.arange(512), epochs=60, batch=64, rate=0.05, decay=0.0, seed=1)
    torch.testing.assert_close(found, target, atol=1e-2, rtol=0)
    assert not found.requires_grad
    assert found.grad is None


def test_fewer_rows_than_a_batch_are_one_batch() -> None:
    found = torch.ones(1)
    descend(
        [found], lambda part: (found**2).sum() * len(part) / 3, torch.arange(3), epochs=9, batch=64, rate=0.1, decay=0.0, seed=1
    )
    assert abs(float(found)) < 1.0
