from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from reference_model import CASES, Oracle

from router_service.lookahead.corpus import Chunk
from router_service.lookahead.runner import Runner
from router_service.trunk import Attend


@pytest.mark.parametrize("case", CASES)
def test_it_continues_like_the_oracle(case: str, runner: Callable[[str], Runner], oracle: Callable[[str], Oracle]) -> None:
    prompts = [CASES[case].prompt, CASES[case].prompt[:5]]
    answers = runner(case).generate(prompts, 12, temperature=0.0)
    assert [answer[len(p) :] for answer, p in zip(answers, prompts, strict=True)] == [
        oracle(case).greedy(p, 12) for p in prompts
    ]


class Spy:
    def __init__(self) -> None:
        self.calls: list[tuple[str, int, tuple[int, ...]]] = []

    def chosen(self, layer: int, x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor, attend: Attend) -> None:
        assert ids.shape == weights.shape
        self.calls.append(("chosen", layer, tuple(x.shape)))

    def returned(self, layer: int, x: torch.Tensor) -> None:
        self.calls.append(("returned", layer, tuple(x.shape)))


def test_an_observer_sees_moe_layers_in_order_and_changes_nothing(
    runner: Callable[[str], Runner], sequences: list[Chunk]
) -> None:
    model, spy = runner("qwen3-dense-first"), Spy()
    ids = [chunk.ids for chunk in sequences]
    watched = model.prefill(ids, spy)
    assert torch.equal(watched, model.prefill(ids))
    shape = (sum(map(len, ids)), model.spec.hidden_size)
    assert spy.calls == [(kind, layer, shape) for layer in model.spec.moe_layers for kind in ("chosen", "returned")]


def test_following_given_tokens_is_the_same_as_prefill(runner: Callable[[str], Runner], sequences: list[Chunk]) -> None:
    model = runner("qwen3")

    class Last:
        def __init__(self) -> None:
            self.x = torch.empty(0)

        def chosen(self, layer: int, x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor, attend: Attend) -> None:
            pass

        def returned(self, layer: int, x: torch.Tensor) -> None:
            self.x = x

    ids = sorted((chunk.ids for chunk in sequences), key=len, reverse=True)
    whole, single = Last(), Last()
    model.prefill(ids, whole)
    rows = list(model.follow(ids, single))
    assert sum(rows) == sum(map(len, ids))
    assert rows[0] == len(ids)
    assert rows[-1] == 1
    torch.testing.assert_close(single.x[0], whole.x[len(ids[0]) - 1], rtol=1e-3, atol=1e-3)
