"""Experts whose choice is drawn instead of computed, and hints of a given recall: what residency is measured with.

Popularities are log-normal (sigma 1) per layer; a token keeps an expert of the token before with probability 0.4. A hint
names each expert that a layer will choose with probability `recall` (chance 0.9), and two wrong ones (chance 0.3); every
layer but the first is hinted, two layers ahead and one. All experts' weights are those of DISTINCT blobs: bytes and times
matter here, not answers.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar
from unittest import mock

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from expert_worker.in_place import InPlaceExperts
from expert_worker.packed import PackedExperts, packed_format
from forefetch.kernels.grouped_mlp.formats import Kind, pack
from forefetch.kernels.grouped_mlp.unsummed import Unsummed
from forefetch.kernels.residency.state import Residents, aligned
from forefetch.spec import ModelSpec
from forefetch.weights import Checkpoint

Choices = npt.NDArray[np.int32]  # [steps, L, B, K]
KEEP, SIGMA, WRONG, DISTINCT = 0.4, 1.0, 2, 256


def routing(steps: int, layers: int, experts: int, top_k: int, batch: int) -> Choices:
    """What each step's rows choose."""
    draw = np.random.default_rng(1)
    weights = np.exp(SIGMA * draw.standard_normal((layers, experts)))
    logs = np.log(weights)
    before = np.full((layers, batch, top_k), -1)
    found = np.empty((steps, layers, batch, top_k), dtype=np.int32)
    for step in range(steps):
        keys = logs[:, None] + draw.gumbel(size=(layers, batch, experts))  # the largest K are a draw without replacement
        if step:
            kept = np.where(draw.random(before.shape) < KEEP, 1e9, 0.0)
            np.put_along_axis(keys, before, np.take_along_axis(keys, before, 2) + kept, 2)
        before = np.argsort(-keys, axis=2)[:, :, :top_k]
        found[step] = before
    return found


class Drawn:
    """The choices and hints of the step at hand, on the device at addresses that never change."""

    def __init__(self, choices: Choices, experts: int, device: torch.device, dtype: torch.dtype) -> None:
        _, layers, batch, top_k = choices.shape
        self._draw = np.random.default_rng(2)
        self.choices, self._experts = choices, experts
        self.logits = torch.zeros(layers, batch, experts, dtype=dtype, device=device)
        named = (layers, batch, top_k + WRONG)
        self.named = torch.zeros(named, dtype=torch.int32, device=device)
        self.chances = torch.zeros(named, device=device)

    def load(self, step: int, recall: float) -> None:
        """Brings a step's choices and what hints of such a recall say of them."""
        chosen = self.choices[step]
        logits = np.full(self.logits.shape, -8.0, dtype=np.float32)
        np.put_along_axis(logits, chosen, np.broadcast_to(np.arange(chosen.shape[2]) / 8, chosen.shape).astype(np.float32), 2)
        wrong = self._draw.integers(0, self._experts, (*chosen.shape[:2], WRONG))
        right = np.where(self._draw.random(chosen.shape) < recall, 0.9, 0.0)
        chances = np.concatenate([right, np.full(wrong.shape, 0.3 if recall else 0.0)], axis=2)
        self.logits.copy_(torch.from_numpy(logits))
        self.named.copy_(torch.from_numpy(np.concatenate([chosen, wrong], axis=2)))
        self.chances.copy_(torch.from_numpy(chances))


class AllResident(PackedExperts):
    """Every expert in a slot of its own; the choice is drawn."""

    drawn: Drawn

    def route(self, layer: int, x: Tensor, logits: Tensor) -> Tensor:
        return super().route(layer, x, self.drawn.logits[self.layers[layer], : len(x)])

    def unsummed(self, layer: int, x: Tensor, logits: Tensor) -> Tensor | Unsummed:
        return super().unsummed(layer, x, self.drawn.logits[self.layers[layer], : len(x)])


class FewSlots(InPlaceExperts):
    """Experts in few slots; the choice is drawn, and so are hints."""

    drawn: Drawn
    blobs: Tensor

    def _hold(self, checkpoint: Checkpoint, on_progress: Callable[[int, int], None]) -> None:
        layers, experts = len(self.layers), self.spec.num_experts
        self._memory = torch.empty(self._slots, self.expert_bytes, dtype=torch.uint8, device=self._device)
        host = aligned(len(self.blobs), self.expert_bytes, self._memory)
        host.copy_(self.blobs)
        self.state = state = Residents(self._memory, host, torch.arange(len(host)), layers, experts, self._most_copies)
        state.home.copy_(torch.arange(layers * experts) % len(host) + state.first_host)
        state.table.copy_(state.home)
        state.occupy()

    def restart(self, recall: float) -> None:
        """As after the start, with heads of such a recall, or none."""
        state = self.state
        for tensor, value in ((state.averages, 1.0 / self.spec.num_experts), (state.chance, 0.0), (state.unused, 0)):
            tensor.fill_(value)
        state.table.copy_(state.home)
        state.occupy()
        state.counters.zero_()
        self._told[:] = 0
        self.ahead = self._said if recall else None

    def route(self, layer: int, x: Tensor, logits: Tensor) -> Tensor:
        return super().route(layer, x, self.drawn.logits[self.layers[layer], : len(x)])

    def _said(self, layer: int, ids: Tensor, weights: Tensor) -> tuple[Tensor, Tensor] | None:
        ahead = slice(self.layers[layer] + 1, self.layers[layer] + 3)
        named, chances = self.drawn.named[ahead], self.drawn.chances[ahead]
        return (named, chances) if len(named) else None


def blobs_of(spec: ModelSpec, kind: Kind, dtype: torch.dtype, device: torch.device) -> tuple[Any, Tensor]:
    """(format, DISTINCT experts in it on the device)."""
    format = packed_format(spec, kind, dtype, device)
    count, made = min(DISTINCT, len(spec.moe_layers) * spec.num_experts), list[Tensor]()
    draw = torch.Generator(device).manual_seed(3)
    for _ in range(count):
        w13 = torch.randn(2 * spec.expert_width, spec.hidden_size, generator=draw, device=device) * spec.hidden_size**-0.5
        w2 = torch.randn(spec.hidden_size, spec.expert_width, generator=draw, device=device) * spec.expert_width**-0.5
        made.append(pack(w13, w2, format))
    return format, torch.stack(made)


def all_resident(spec: ModelSpec, format: Any, blobs: Tensor, drawn: Drawn, **place: Any) -> AllResident:
    """The same experts as `FewSlots` over these blobs."""
    cycle = (blobs[number % len(blobs)] for number in range(len(spec.moe_layers) * spec.num_experts))
    with mock.patch("expert_worker.packed.load_expert", return_value=(None, None)):
        with mock.patch("expert_worker.packed.pack", side_effect=cycle):
            experts = AllResident(spec, None, tuple(range(spec.num_experts)), format, **place)  # type: ignore[arg-type]
    experts.drawn = drawn
    return experts


Few = TypeVar("Few", bound=FewSlots)


def few_slots(
    spec: ModelSpec, format: Any, blobs: Tensor, drawn: Drawn, share: int, how: type[Few], copies: int = 2, **place: Any
) -> Few:
    """share: percent of the experts that have a slot, in equally many of every layer."""
    slots = len(spec.moe_layers) * (spec.num_experts * share // 100)
    made: type[Few] = type(how.__name__, (how,), {"drawn": drawn, "blobs": blobs})
    return made(spec, None, tuple(range(spec.num_experts)), format, slots=slots, most_copies=copies, **place)
