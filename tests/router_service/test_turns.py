"""Steps in two halves without wires: the rows of the undivided step, what is sent when, and which steps are cut."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from reference_model import CASES, Oracle
from trunk_rig import PlainExperts, Rig

from forefetch.telemetry.ring import StepStamps
from router_service.batch import StepBatch
from router_service.turns import TurnTrunk, halved


class InOrder(PlainExperts):
    """Keeps what was sent until it is asked for, and writes both down."""

    def __init__(self, plain: PlainExperts) -> None:
        self.weights, self.kept, self.log = plain.weights, deque[torch.Tensor](), list[tuple[str, int, int]]()

    def send(self, batch: StepBatch, layer: int, x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> None:
        super().send(batch, layer, x, ids, weights)
        self.kept.append(self.rows)
        self.log.append(("send", layer, batch.tokens))

    def add(self, out: torch.Tensor, layer: int, stamps: StepStamps) -> int:
        out += self.kept.popleft()
        stamps.call(layer, 0, len(out), 1, 1, 1, 1)
        self.log.append(("add", layer, len(out)))
        return 0


@pytest.mark.parametrize("buckets", [(), (8,)])
@pytest.mark.parametrize("case", ["qwen3-dense-first", "qwen2-shared"])
def test_halves_take_turns_and_answer_like_the_oracle(
    case: str, buckets: tuple[int, ...], checkpoint: Callable[[str], Path], oracle: Callable[[str], Oracle]
) -> None:
    prompt, rig = CASES[case].prompt, Rig(checkpoint(case), max_step_tokens=256, buckets=buckets)
    experts = rig.experts = InOrder(cast(Any, rig.experts))
    rig.trunk = TurnTrunk(rig.trunk, 2)  # type: ignore[assignment]
    requests = [rig.add(prompt[: len(prompt) - cut], max_tokens=12) for cut in range(3)]
    rig.step()
    experts.log.clear()
    rig.step()
    first = rig.spec.moe_layers[0]
    assert experts.log[:3] == [("send", first, 2), ("send", first, 1), ("add", first, 2)]
    assert experts.log[-1] == ("add", rig.spec.moe_layers[-1], 6 if buckets else 1)
    record = rig.ring.read(rig.steps - 1)
    assert record is not None
    assert record.calls[first, 0, 0] == (8 if buckets else 3)
    rig.run()
    for cut, request in enumerate(requests):
        start = len(prompt) - cut
        assert request.tokens[start:] == oracle(case).greedy(prompt[:start], 12)


def test_only_steps_that_decode_enough_rows_unwatched_are_cut() -> None:
    empty = torch.empty(0, dtype=torch.int64)
    step = StepBatch(7, 4, 4, empty, empty, empty, empty, [], (), empty)
    assert halved(step, None, 4)
    assert not halved(step, None, 5)
    assert not halved(step, None, 0)
    assert not halved(step, cast(Any, object()), 4)
    assert not halved(replace(step, decodes=3), None, 2)
