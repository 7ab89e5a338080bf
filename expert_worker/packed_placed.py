"""Packed experts in a GPU's memory that come and go by a planner's commands: every place is a slot, nothing waits on the host.

Weights and the table of slots are written on the device in the order of its default stream, as calls are: a call sees an expert
whole or not at all.
"""

from __future__ import annotations

import torch
from torch import Tensor

from expert_worker.packed import PackedExperts
from expert_worker.shelf import Shelf
from forefetch.errors import BadRequest, Moved
from forefetch.hints import ExpertHint
from forefetch.kernels.grouped_mlp.formats import ExpertFormat, pack
from forefetch.spec import ModelSpec
from forefetch.weights import Checkpoint, load_expert
from forefetch.wire import LayerCall, Verified


class PlacedPackedExperts(PackedExperts):
    """`PackedExperts` that begins with nothing, and has room for `places` experts of any layers."""

    def __init__(
        self,
        spec: ModelSpec,
        checkpoint: Checkpoint,
        places: int,
        format: ExpertFormat,
        *,
        device: torch.device,
        dtype: torch.dtype,
        max_rows: int,
    ) -> None:
        super().__init__(spec, checkpoint, (), format, device=device, dtype=dtype, max_rows=max_rows)
        self.held = tuple(range(spec.num_experts))  # by what it may be asked for, and counts
        self._checkpoint = checkpoint
        self._pool = torch.empty(places, self.expert_bytes, dtype=torch.uint8, device=device)
        self._shelf = Shelf(places, self._bring)
        self._here: dict[int, set[int]] = {layer: set() for layer in spec.moe_layers}

    @property
    def room(self) -> int:
        """Free places."""
        return self._shelf.room

    def knows(self, layer: int, expert: int) -> bool:
        """Whether the model has such a routed expert."""
        return layer in self.layers and 0 <= expert < self.spec.num_experts

    def put(self, layer: int, expert: int) -> None:
        """Reads an expert that is not here and evaluates it from now on. In any one thread, beside calls."""
        number = self._number(layer, expert)
        self._shelf.put(number)
        self._slot_of[self.layers[layer], expert] = self._shelf.place_of[number]
        self._here[layer].add(expert)

    def drop(self, layer: int, expert: int) -> None:
        """Forgets one that is here. Between two calls."""
        self._here[layer].discard(expert)
        self._slot_of[self.layers[layer], expert] = -1
        self._shelf.drop(self._number(layer, expert))

    def _number(self, layer: int, expert: int) -> int:
        return self.layers[layer] * self.spec.num_experts + expert

    @torch.inference_mode()
    def _bring(self, place: int, number: int) -> None:
        at, expert = divmod(number, self.spec.num_experts)
        weights = load_expert(self._checkpoint, self.spec, self.spec.moe_layers[at], expert, self._pool.device)
        self._pool[place].copy_(pack(*weights, self.format))

    @torch.inference_mode()
    def forward(self, call: LayerCall, out: Tensor, source: str = "") -> tuple[int, Verified]:
        """Fills out [N, H], which may lie on the host. Moved for an expert that is held elsewhere."""
        if call.layer in self.layers:
            named = set(call.pair_expert.tolist())
            if stray := named - self._here[call.layer]:
                if self.knows(call.layer, next(iter(stray))):
                    raise Moved(f"expert {min(stray)} of layer {call.layer} is not held by this worker any more")
                raise BadRequest("pair_expert", f"an expert is outside 0..{self.spec.num_experts - 1}")
        return super().forward(call, out, source)

    def hint(self, hint: ExpertHint, source: str = "") -> bool:
        """Whether the hint is about experts held here; there is nothing to fetch."""
        return set(hint.experts.tolist()) <= self._here.get(hint.layer, set())

    def resident(self, layer: int) -> list[int]:
        """All that are here."""
        return sorted(self._here.get(layer, ()))
