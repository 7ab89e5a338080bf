"""The experts of one shard: host copies, the slot pool on the device, and their evaluation."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import closing
from time import perf_counter_ns

import numpy as np
import torch
from torch import Tensor

from expert_worker.slots import NOWHERE, Slots
from forefetch.errors import BadRequest
from forefetch.hints import ExpertHint
from forefetch.kernels.grouped_mlp import Evaluation, Pairs, SlotWeights
from forefetch.pairs import sort_pairs
from forefetch.spec import ModelSpec
from forefetch.weights import Checkpoint, load_expert
from forefetch.wire import LayerCall, Verified

_ALIGNMENT = 64  # bytes


class Experts:
    """Experts are numbered through: (place of the layer among the MoE layers) * held + place in the shard.

    With a slot for each, an expert's slot is its number. With fewer, all wait in host memory as stored and `Slots` says which
    sit where. Not for concurrent use.
    """

    def __init__(
        self,
        spec: ModelSpec,
        checkpoint: Checkpoint,
        held: Sequence[int],
        *,
        device: torch.device,
        dtype: torch.dtype,
        slots: int,
        on_progress: Callable[[int, int], None] = lambda done, total: None,
    ) -> None:
        """Reads experts `held` of every MoE layer. on_progress(done, total) counts them. UnsupportedModel for bad tensors."""
        self.layers = {layer: place for place, layer in enumerate(spec.moe_layers)}
        self.held = tuple(held)
        self.load = np.zeros((len(self.layers), len(held)), dtype=np.int64)  # pairs evaluated
        # Place in the shard of expert e at e + 1; -1 for those of others and, at both ends, for what is no expert.
        self._place = np.full(spec.num_experts + 2, -1, dtype=np.int32)
        self._place[np.array(held) + 1] = np.arange(len(held))
        self._device = device
        self._calls = 0
        total, hidden, width = self.load.size, spec.hidden_size, spec.expert_width
        count = min(slots, total)
        self.weights = SlotWeights(_pool(count, 2 * width, hidden, dtype, device), _pool(count, hidden, width, dtype, device))
        self.slots = Slots(count, total) if count < total else None
        self._host: list[tuple[Tensor, Tensor]] = []
        for number in range(total):
            layer = spec.moe_layers[number // len(held)]
            self._admit(number, *load_expert(checkpoint, spec, layer, held[number % len(held)]))
            on_progress(number + 1, total)

    def _admit(self, number: int, w13: Tensor, w2: Tensor) -> None:
        if self.slots is None:
            self._fill(number, w13, w2)
        elif self.weights.w2.is_cuda:
            self._host.append((_turned(w13).pin_memory().t(), _turned(w2).pin_memory().t()))
        else:
            self._host.append((_turned(w13).t(), _turned(w2).t()))

    def _fill(self, slot: int, w13: Tensor, w2: Tensor) -> None:
        self.weights.w13[slot].copy_(w13, non_blocking=True)
        self.weights.w2[slot].copy_(w2, non_blocking=True)

    @property
    def weight_bytes(self) -> int:
        """Bytes of weights in slots and in host memory."""
        tensors = [self.weights.w13, self.weights.w2, *(tensor for pair in self._host for tensor in pair)]
        return sum(tensor.numel() * tensor.element_size() for tensor in tensors)

    @torch.inference_mode()
    def forward(self, call: LayerCall, out: Tensor) -> tuple[int, Verified]:
        """Fills out [N, H], which may lie on the host while the experts do not. Returns ns spent on copies into slots, and
        how the experts that it needed were found.

        BadRequest for a layer or an expert that is not held here, a row that is not there, a weight that is not finite.
        """
        layer = self.layers.get(call.layer)
        if layer is None:
            raise BadRequest("layer", f"layer {call.layer} has no routed experts")
        pairs = self._sort(call)
        self.load[layer, pairs.experts] += np.array(pairs.counts, dtype=np.int64)
        numbers = [layer * len(self.held) + place for place in pairs.experts]
        evaluation = Evaluation(call.x.to(self._device, non_blocking=True), pairs, self.weights)
        copy_ns, verified = 0, Verified(resident=len(numbers))
        if self.slots is None:
            evaluation.run(range(len(numbers)), numbers)
        else:
            before = self.slots.misses
            copy_ns = self._run_waves(evaluation, numbers, self.slots)
            misses = self.slots.misses - before
            verified = Verified(misses=misses, resident=len(numbers) - misses)
        evaluation.combine(out)
        return copy_ns, verified

    def hint(self, hint: ExpertHint) -> bool:
        """Whether the hint is about experts held here. (Nothing is copied ahead of time yet.)"""
        return hint.layer in self.layers and set(hint.experts.tolist()) <= set(self.held)

    def resident(self, layer: int) -> list[int]:
        """The layer's experts that sit in a slot, ascending; none for a layer without routed experts."""
        place = self.layers.get(layer)
        if place is None:
            return []
        if self.slots is None:
            return list(self.held)
        first = place * len(self.held)
        return [expert for number, expert in enumerate(self.held, first) if self.slots.slot_of[number] != NOWHERE]

    def _sort(self, call: LayerCall) -> Pairs:
        """The call's pairs, experts as places in the shard. BadRequest for values that make no sense."""
        row, expert, rows = call.pair_row.numpy(), call.pair_expert.numpy(), len(call.x)
        if row.size and row.view(np.uint32).max() >= rows:  # as unsigned, a negative index is too large as well
            raise BadRequest("pair_row", f"a row index is outside 0..{rows - 1}")
        if not np.isfinite(call.pair_weight.numpy()).all():
            raise BadRequest("pair_weight", "a gate weight is not finite")
        place = self._place.take(expert + 1, mode="clip")
        try:
            return sort_pairs(row, place, call.pair_weight, rows, self._device)
        except ValueError:  # a negative place; looking for one in every call would cost more
            wrong = expert[place < 0][0]
            raise BadRequest("pair_expert", f"expert {wrong} of layer {call.layer} is not held by this worker") from None

    def _run_waves(self, evaluation: Evaluation, numbers: Sequence[int], slots: Slots) -> int:
        """Runs each of the distinct experts once, copying those that are not resident. Returns ns spent on that."""
        self._calls += 1
        group_of = {number: group for group, number in enumerate(numbers)}
        copy_ns = 0
        with closing(slots.waves(numbers, self._calls)) as waves:
            for wave in waves:
                began = perf_counter_ns()
                for number in wave.loads:
                    self._fill(wave.slots[number], *self._host[number])
                if wave.loads and self.weights.w2.is_cuda:
                    torch.cuda.current_stream(self.weights.w2.device).synchronize()  # else the wait would count as compute
                copy_ns += perf_counter_ns() - began
                evaluation.run([group_of[number] for number in wave.slots], list(wave.slots.values()))
        return copy_ns


def _pool(slots: int, rows: int, columns: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """[slots, rows, columns], each slot on an alignment of its own (a product's last bits may depend on it) and turned:
    memory runs along `rows`, which is what a CPU multiplies a few rows of x by fastest (benchmarks/LOG.md)."""
    step = _ALIGNMENT // dtype.itemsize
    size = rows * columns
    pool = torch.empty(slots, -(-size // step) * step, dtype=dtype, device=device)
    return pool[:, :size].view(slots, columns, rows).transpose(1, 2)


def _turned(matrix: Tensor) -> Tensor:
    """A host copy laid out as the pool's slots are, so that filling one is a plain copy."""
    return matrix.t().contiguous()
