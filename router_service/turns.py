"""A decode step in two halves that take turns over shm and grpc links: while workers evaluate one half's experts, the router
runs the other's attention.

The router sends half 0, then half 1, and takes half 0 back where its next layer begins. Rows do not see one another, so each
has the numbers of the undivided step. Experts that both halves choose are read twice, which is what this costs.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from operator import add
from time import perf_counter_ns
from typing import Any, cast

import torch
from torch import Tensor

from forefetch.telemetry.ring import StepStamps
from router_service.batch import StepBatch
from router_service.layers import Layer
from router_service.trunk import Cache, Experts, Front, Observer, Trunk


@dataclass
class _Half:
    """Some rows of a step. x [T, H]: their residual; out: what the experts' rows of the layer under way are added to."""

    batch: StepBatch
    front: Front
    x: Tensor
    out: Tensor | None = None  # None: nothing is with the workers


@dataclass
class _Stamps:
    """Adds up what both halves stamp for a layer or a worker's part in it."""

    step: StepStamps
    began: dict[int, int] = field(default_factory=dict)
    spent: dict[int, list[int]] = field(default_factory=lambda: defaultdict(lambda: [0] * 4))
    calls: dict[tuple[int, int], tuple[int, ...]] = field(default_factory=dict)
    found: dict[tuple[int, int], tuple[int, ...]] = field(default_factory=dict)

    def layer(self, layer: int, began: int, *parts: int) -> None:
        """parts: nanoseconds of attention, gate, experts, combine."""
        total = self.spent[layer] = list(map(add, self.spent[layer], parts))
        self.step.layer(layer, self.began.setdefault(layer, began), *total)

    def call(self, layer: int, worker: int, *parts: int) -> None:
        """As StepStamps.call."""
        self.step.call(layer, worker, *_added(self.calls, (layer, worker), parts))

    def verified(self, layer: int, worker: int, *counts: int) -> None:
        """As StepStamps.verified."""
        self.step.verified(layer, worker, *_added(self.found, (layer, worker), counts))


class TurnTrunk:
    """Stands in for a Trunk whose experts are behind wires: decode steps of at least `halves_from` rows run in turns."""

    ahead = False

    def __init__(self, trunk: Trunk, halves_from: int) -> None:
        self.trunk, self.halves_from = trunk, halves_from

    @property
    def cache(self) -> Cache:
        """K and V."""
        return self.trunk.cache

    def forward(self, batch: StepBatch, experts: Experts, stamps: StepStamps, observer: Observer | None = None) -> Tensor:
        """As Trunk.forward."""
        if not halved(batch, observer, self.halves_from):
            return self.trunk.forward(batch, experts, stamps, observer)
        whole = Written(self.trunk, batch, experts, stamps)
        return in_turns(
            self.trunk, batch, experts, stamps, lambda part: Written(self.trunk, part, experts, stamps), whole.logits
        )

    def confirm(self, step: int) -> None:
        """See Model; `forward` has waited for the workers."""

    def timed(self, step: int, stamps: StepStamps, began_ns: int, forwarded_ns: int, ended_ns: int) -> int:
        """See Model."""
        return self.trunk.timed(step, stamps, began_ns, forwarded_ns, ended_ns)


class Written:
    """A Front that does what the trunk does, as it is written."""

    def __init__(self, trunk: Trunk, batch: StepBatch, experts: Experts, stamps: StepStamps) -> None:
        self._trunk, self._batch = trunk, batch
        self._step = trunk.begun(batch, experts, stamps, None)
        self._normed = torch.empty(0)

    def attended(self, index: int, x: Tensor) -> tuple[Tensor, Tensor]:
        """See Front."""
        x = self._trunk.attended(index, x, self._step)
        self._normed = self._trunk.normed(x, self._trunk.layers[index].post_norm)
        return x, self._normed

    def chosen(self, index: int) -> tuple[Tensor, Tensor]:
        """See Front."""
        gate = self._trunk.layers[index].gate
        assert gate is not None
        return self._trunk.choice(self._normed, gate)

    def logits(self, x: Tensor) -> Tensor:
        """See Front."""
        return self._trunk.logits_of(x[self._batch.logit_rows])


def halved(batch: StepBatch, observer: Observer | None, halves_from: int) -> bool:
    """Whether a step runs in turns: one that only decodes, has rows enough and is watched by no heads."""
    return observer is None and not batch.prefills and 0 < halves_from <= batch.tokens <= batch.decodes and batch.picks is None


@torch.inference_mode()
def in_turns(
    trunk: Trunk,
    batch: StepBatch,
    experts: Experts,
    stamps: StepStamps,
    front_of: Callable[[StepBatch], Front],
    logits: Callable[[Tensor], Tensor],
) -> Tensor:
    """As Trunk.forward. front_of(rows) says what is done before a layer's experts; logits(x [T, H]) ends the step."""
    x, cut, both = trunk.embedded(batch), -(-batch.tokens // 2), _Stamps(stamps)
    parts = (0, cut), (cut, len(x) - cut)
    halves = [
        _Half(part, front_of(part), x[first : first + count]) for first, count in parts for part in [batch.part(first, count)]
    ]
    for index, layer in enumerate(trunk.layers):
        for half in halves:
            _leave(trunk, index - 1, half, experts, both)
            _enter(trunk, index, layer, half, experts, both)
    for half in halves:
        _leave(trunk, len(trunk.layers) - 1, half, experts, both)
    started = perf_counter_ns()
    result = logits(torch.cat([half.x for half in halves]))
    stamps.head(perf_counter_ns() - started)
    return result


def _enter(trunk: Trunk, index: int, layer: Layer, half: _Half, experts: Experts, stamps: _Stamps) -> None:
    """Up to where the rows are with the workers; the shared expert runs meanwhile."""
    began = perf_counter_ns()
    x, h = half.front.attended(index, half.x)
    half.x = x.clone()  # a front may keep it where the other half's will be
    attended = perf_counter_ns()
    if layer.gate is None:
        assert layer.dense is not None
        half.x = trunk.residual(half.x, layer.dense(h))
        stamps.layer(index, began, attended - began, 0, 0, perf_counter_ns() - attended)
        return
    ids, weights = half.front.chosen(index)
    chosen = perf_counter_ns()
    experts.send(half.batch, index, h, ids, weights)
    sent = perf_counter_ns()
    half.out = trunk.shared(layer, h)
    stamps.layer(index, began, attended - began, chosen - attended, sent - chosen, perf_counter_ns() - sent)


def _leave(trunk: Trunk, index: int, half: _Half, experts: Experts, stamps: _Stamps) -> None:
    """Takes the workers' rows of the layer in, if some are with them."""
    if half.out is None:
        return
    began = perf_counter_ns()
    experts.add(half.out, index, cast(Any, stamps))
    back = perf_counter_ns()
    half.x, half.out = trunk.residual(half.x, half.out), None
    stamps.layer(index, began, 0, 0, back - began, perf_counter_ns() - back)


def _added(kept: dict[tuple[int, int], tuple[int, ...]], key: tuple[int, int], values: Sequence[int]) -> tuple[int, ...]:
    """The values so far of both halves."""
    kept[key] = tuple(map(add, kept[key], values)) if key in kept else tuple(values)
    return kept[key]
