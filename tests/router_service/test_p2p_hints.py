"""What heads say within steps over lanes, on its way to the workers: by the engine's thread, or one that looks at memory."""

from __future__ import annotations

import threading
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from forefetch.kernels.gate import choose
from router_service.lookahead.heads import EXTRA, Hint
from router_service.p2p_hints import DeviceHeads, HostHeads

LAYERS, ROWS, HIDDEN, EXPERTS, TOP = 4, 6, 8, 16, 2
SPEC: Any = SimpleNamespace(
    moe_layers=tuple(range(LAYERS)), top_k=TOP, num_experts=EXPERTS, gate_rule="softmax_topk", renormalise=True
)
RULE = SPEC.top_k, SPEC.gate_rule, SPEC.renormalise


class Told:
    """Hints that keep what they are told; heads that name what a row's residual says. `named` is set at each layer."""

    def __init__(self, tokens: int = ROWS) -> None:
        self.now: Any = SimpleNamespace(batch=SimpleNamespace(tokens=tokens))
        self.carried_of: list[tuple[Any, ...]] = []
        self.chosen_of: list[tuple[Any, ...]] = []
        self.all = threading.Semaphore(0)

    def carry(self) -> Told:
        return self

    def predict(self, layer: int, x: Tensor, ids: Tensor, weights: Tensor) -> list[Hint]:
        targets = SPEC.moe_layers[layer + 1 : layer + 3]
        named = x[:, :1].round().long() + torch.arange(TOP + EXTRA)
        return [Hint(target, named + target, torch.sigmoid(x[:, : TOP + EXTRA] + target)) for target in targets]

    def carried(self, step: Any, source: int, targets: Any, experts: Any, sure: Any) -> None:
        self.carried_of.append((step, source, tuple(targets), experts, sure))
        self.all.release()

    def chosen(self, layer: int, x: Tensor, ids: Tensor, weights: Tensor, attend: Any) -> None:
        self.chosen_of.append((layer, x, ids, weights))


def run(heads: Any, seed: int, cuts: list[slice], layout: tuple[int, int] = (ROWS, 0)) -> list[tuple[Tensor, Tensor]]:
    """A step: the residuals [T, H] and logits [T, E] of its layers."""
    draw, seen = torch.Generator().manual_seed(seed), []
    heads.begin(layout)
    for layer in range(LAYERS):
        x, logits = torch.randn(ROWS, HIDDEN, generator=draw).abs(), torch.randn(ROWS, EXPERTS, generator=draw)
        seen.append((x, logits))
        for cut in cuts:
            heads.see(layer, x[cut])
            heads.look(layer, cut.start, logits[cut])
    heads.settle()
    heads.launched(layout)
    return seen


CUTS = [[slice(0, ROWS)], [slice(0, 3), slice(3, ROWS)]]


@pytest.mark.parametrize("cuts", CUTS)
def test_the_engines_thread_names_a_layers_experts_once_from_all_its_rows(cuts: list[slice]) -> None:
    hints: Any = Told()
    seen = run(HostHeads(hints, SPEC), 1, cuts)
    assert [layer for layer, *_ in hints.chosen_of] == list(range(LAYERS))
    for (_, x, ids, weights), (rows, logits) in zip(hints.chosen_of, seen, strict=True):
        assert torch.equal(x, rows)
        expected = choose(logits, *RULE)
        assert torch.equal(ids, expected[0])
        assert torch.equal(weights, expected[1])
    hints.now = None
    hints.chosen_of.clear()
    run(HostHeads(hints, SPEC), 1, cuts)
    assert not hints.chosen_of


@pytest.mark.parametrize("cuts", CUTS)
def test_a_thread_carries_what_heads_on_a_device_said_of_rows_that_are_no_padding(cuts: list[slice]) -> None:
    """As long as the step is the last one: here the second step is launched when the first was told."""
    hints: Any = Told(tokens=ROWS - 1)
    heads = DeviceHeads(hints, SPEC, torch.device("cpu"))
    hints.now = None
    run(heads, 9, cuts)  # to be recorded
    heads.ready()
    before = 0
    for seed in (1, 2):
        step = hints.now = SimpleNamespace(batch=SimpleNamespace(tokens=ROWS - 1))
        seen = run(heads, seed, cuts)
        for layer in range(LAYERS - 1):
            assert hints.all.acquire(timeout=60.0), "a hint was not carried"
            told, source, targets, experts, sure = hints.carried_of[before + layer]
            expected = hints.predict(layer, seen[layer][0][:-1], *choose(seen[layer][1][:-1], *RULE))
            assert (told is step, source, targets) == (True, layer, SPEC.moe_layers[layer + 1 : layer + 3])
            assert np.array_equal(experts, np.stack([hint.experts.numpy() for hint in expected]))
            assert np.array_equal(sure, np.stack([hint.probabilities.numpy() for hint in expected]))
        before += LAYERS - 1
    run(heads, 3, CUTS[0], layout=(ROWS - 1, 1))  # with a prompt: no heads
    hints.now = None  # of no use to anybody
    run(heads, 4, cuts)
    heads.close()
    assert len(hints.carried_of) == before


def test_hints_of_a_step_that_is_over_are_not_sent() -> None:
    hints: Any = Told()
    heads = DeviceHeads(hints, SPEC, torch.device("cpu"))
    heads.ready()
    held = threading.Event()
    hints.carried = lambda *one: (hints.carried_of.append(one), hints.all.release(), held.wait(60.0))
    run(heads, 1, CUTS[0])
    assert hints.all.acquire(timeout=60.0)
    first = hints.now
    hints.now = SimpleNamespace(batch=SimpleNamespace(tokens=ROWS))
    run(heads, 2, CUTS[0])  # overwrites what the thread has not looked at yet
    held.set()
    for _ in range(LAYERS - 1):
        assert hints.all.acquire(timeout=60.0)
    heads.close()
    assert [one[0] is first for one in hints.carried_of] == [True, *[False] * (LAYERS - 1)]
