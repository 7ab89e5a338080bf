"""The experts of one shard: where they are kept, and their evaluation."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter_ns

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from expert_worker.convert import Shard, fill
from expert_worker.copying import Lane
from expert_worker.host import Host
from expert_worker.pool import Pool, plain
from expert_worker.residency import Copied, Residency
from expert_worker.shelf import Shelf
from expert_worker.slots import Slots, uses_of
from expert_worker.visit import Visit
from forefetch.errors import BadRequest, ForefetchError, Moved
from forefetch.hints import ExpertHint
from forefetch.kernels.grouped_mlp import Evaluator, Pairs, evaluation, takes_bfloat16, whole_calls
from forefetch.kernels.grouped_mlp.formats import ExpertFormat
from forefetch.pairs import sort_pairs
from forefetch.spec import ModelSpec
from forefetch.weights import Checkpoint, load_expert
from forefetch.wire import LayerCall, Verified

_GPU_DEPTH = 2  # copies under way at once, so that the copy engine never waits for Python

Held = Mapping[int, Sequence[int]]
"""MoE layer -> the experts of it that a worker holds, ascending."""


@dataclass(frozen=True)
class Storage:
    """How experts are kept. `format` None: as stored in the checkpoint, nothing is rounded."""

    slots: int
    format: ExpertFormat | None = None
    cache: Path | None = None  # where converted experts are kept on disk
    max_rows: int = 0  # most rows of a call, for what allocates by it
    miss: str = "wait"  # see --miss
    check_copies: bool = False  # compare each filled slot with host memory: slow, for debugging
    places: int = 0  # 0: what is held stays; else nothing is held at first, and up to so many experts come and go

    def in_place(self, device: torch.device) -> bool:
        """Whether experts are evaluated where they are: a CPU reads as stored what it would only copy from memory to memory."""
        return self.miss == "in-place" and self.format is None and device.type == "cpu"


class Experts:
    """Experts are numbered through, layer after layer. Not for concurrent use, but for `hint` and `resident`.

    With a slot for each, an expert's slot is its number. With fewer, all wait in host memory; `residency` says which sit where.
    Where they come and go, a `shelf` says which place in host memory is whose, or which slot, if there is one for each place.
    """

    def __init__(
        self,
        spec: ModelSpec,
        checkpoint: Checkpoint,
        held: Held,
        storage: Storage,
        *,
        device: torch.device,
        dtype: torch.dtype,
        on_progress: Callable[[int, int], None] = lambda done, total: None,
    ) -> None:
        """Reads the experts `held`; with `storage.places` none of them yet, these are those that may come. on_progress(done,
        total) counts them. UnsupportedModel for bad tensors."""
        self.layers = {layer: place for place, layer in enumerate(spec.moe_layers)}
        self.members = [(layer, expert) for layer in spec.moe_layers for expert in held[layer]]
        sizes = [len(held[layer]) for layer in spec.moe_layers]
        self._first = np.cumsum([0, *sizes]).tolist()
        # Number of expert e of the layer at e + 1; -1 for those of others and, at both ends, for what is no expert.
        self._number = np.full((len(sizes), spec.num_experts + 2), -1, dtype=np.int32)
        for number, (layer, expert) in enumerate(self.members):
            self._number[self.layers[layer], expert + 1] = number
        self._all = self._number  # also of those that are not here at the moment
        self.load = np.zeros(len(self.members), dtype=np.int64)  # pairs evaluated, by number
        total = storage.places or len(self.members)
        self.top_k = spec.top_k
        self._device, count = device, total if storage.in_place(device) else min(storage.slots, total)
        self.checks_copies = storage.check_copies
        self.pool = self._pool(count, spec, storage, self._slot_dtype(spec, checkpoint, storage, dtype))
        self.pool.prepare(dtype)
        stays = not storage.places and count == total
        self._whole = whole_calls(self.pool.weights, dtype) if stays else None
        self.host: Host | None = None
        self.residency: Residency | None = None
        self.shelf: Shelf | None = None
        shard = Shard(spec, checkpoint, self.members)
        if storage.places:
            self._number = np.full_like(self._all, -1)
            self._open(shard, storage, sizes)
            return
        if count == total and storage.format is None:
            for number, (layer, expert) in enumerate(self.members):
                self.pool.put(number, *load_expert(checkpoint, spec, layer, expert, device))
                on_progress(number + 1, total)
            return
        format = storage.format or plain(getattr(torch, spec.dtype))
        host = Host(total, spec.hidden_size, spec.expert_width, format, pinned=device.type == "cuda" and count < total)
        fill(host, shard, storage.cache, on_progress)
        if count == total:
            for number in range(total):
                self.pool.fill(number, host.blobs[number], format)
            return
        self.host, self.residency = host, self._manage(host, Slots(count, sizes, min(spec.top_k, max(sizes))))
        weakref.finalize(self, self.residency.close)

    def _open(self, shard: Shard, storage: Storage, sizes: Sequence[int]) -> None:
        """Places, and nothing in them: slots if there is one for each, else rows of host memory."""
        spec, places, count = shard.spec, storage.places, len(self.pool.memory)
        format = storage.format or plain(getattr(torch, spec.dtype))
        rows = 1 if self._in_slots(storage) else places
        host = Host(rows, spec.hidden_size, spec.expert_width, format, pinned=self._device.type == "cuda")
        if self._in_slots(storage):
            self.shelf = Shelf(places, lambda place, number: self._bring(place, host, shard.only(number), storage))
            return
        host.blobs[:1].zero_()  # is copied for its time
        self.host, self.residency = host, self._manage(host, Slots(count, sizes, min(spec.top_k, max(sizes))))
        self.residency.absent.update(range(len(self.members)))
        self.shelf = host.shelf = Shelf(
            places, lambda place, number: fill(host.row(place), shard.only(number), storage.cache, _quiet)
        )
        weakref.finalize(self, self.residency.close)

    def _in_slots(self, storage: Storage) -> bool:
        """Whether places are slots."""
        return len(self.pool.memory) == storage.places

    def _bring(self, slot: int, scratch: Host, shard: Shard, storage: Storage) -> None:
        """The one expert of `shard` from the checkpoint into a slot."""
        if storage.format is None:
            self.pool.put(slot, *load_expert(shard.checkpoint, shard.spec, *shard.members[0], self._device))
            return
        fill(scratch, shard, storage.cache, _quiet)
        self.pool.fill(slot, scratch.blobs[0], storage.format)

    def _pool(self, count: int, spec: ModelSpec, storage: Storage, dtype: torch.dtype) -> Pool:
        return Pool(count, spec.hidden_size, spec.expert_width, dtype, self._device)

    def _slot_dtype(self, spec: ModelSpec, checkpoint: Checkpoint, storage: Storage, dtype: torch.dtype) -> torch.dtype:
        """The compute type; as stored where kernels widen it as they read, which is the same numbers in half the memory."""
        if storage.format is not None or not self.members or not takes_bfloat16(dtype, self._device):
            return dtype
        stored = checkpoint.dtype_of(spec.expert_tensors(*self.members[0]).down)
        return stored if stored == torch.bfloat16 and spec.dtype == "bfloat16" else dtype

    def _manage(self, host: Host, slots: Slots) -> Residency:
        """Times a copy first: hints are admitted by what copies can bring in time."""
        self.lane = lane = Lane(self.pool, host, self.checks_copies)
        for slot in (0, 0):  # the first one wakes up libraries
            began = perf_counter_ns()
            lane.start(slot, 0)()
            copy_ns = perf_counter_ns() - began
        depth = _GPU_DEPTH if self._device.type == "cuda" else 1
        return Residency(slots, lane.start, expert_bytes=host.stride, copy_ns=copy_ns, depth=depth)

    @property
    def numbers(self) -> npt.NDArray[np.int32]:
        """[MoE layers, E] -> an expert's number, -1 if it is not here."""
        return self._number[:, 1:-1]

    @property
    def copied(self) -> Copied:
        """Totals of copies into slots."""
        return self.residency.copied if self.residency else Copied()

    @property
    def weight_bytes(self) -> int:
        """Bytes of weights in slots and in host memory."""
        return self.pool.memory.nbytes + (self.host.blobs.nbytes if self.host else 0)

    def forward(self, call: LayerCall, out: Tensor, source: str = "") -> tuple[int, Verified]:
        """Fills out [N, H], which may lie on the host while the experts do not. Returns ns spent waiting for copies into slots,
        and how the experts that it needed were found. source: which router's steps it counts in.

        BadRequest for a layer or an expert that is not held here, a row that is not there, a weight that is not finite.
        CopyFailed when a missing expert could not be brought in.
        """
        layer = self.layers.get(call.layer)
        if layer is None:
            raise BadRequest("layer", f"layer {call.layer} has no routed experts")
        if self._whole is not None:
            pairs = call.pair_row, call.pair_expert, call.pair_weight
            found = self._whole.answer(call.x, pairs, self._number[layer], self.load, out)
            if found >= 0:
                return 0, Verified(resident=found)
        return self._in_parts(call, layer, out, source)  # which also says what is wrong with a call

    @torch.inference_mode()
    def _in_parts(self, call: LayerCall, layer: int, out: Tensor, source: str) -> tuple[int, Verified]:
        pairs = self._sort(call, layer)
        self.load[pairs.experts] += np.array(pairs.counts, dtype=np.int64)
        return self._evaluate(call, layer, pairs, out, source)

    def _evaluate(self, call: LayerCall, layer: int, pairs: Pairs, out: Tensor, source: str) -> tuple[int, Verified]:
        """`forward` for pairs that make sense; layer: its place."""
        one = evaluation(call.x.to(self._device, non_blocking=True), pairs, self.pool.weights)
        waited, verified = 0, Verified(resident=len(pairs.experts))
        if self.residency is None:
            slots = [self.shelf.place_of[number] for number in pairs.experts] if self.shelf else pairs.experts
            one.run(range(len(pairs.experts)), slots)
        else:
            uses = uses_of(pairs.counts, call.form.sizes[0])
            with Visit(self.residency, (source, call.step, layer), pairs.experts, uses) as visit:
                self._run_waves(one, pairs.experts, visit)
            waited, verified = visit.stall_ns, visit.verified()
        one.combine(out)
        return waited, verified

    def _run_waves(self, one: Evaluator, experts: list[int], visit: Visit) -> None:
        """Runs each expert once, as they come to be in their slots."""
        assert self.residency is not None
        group_of, slot_of = {expert: group for group, expert in enumerate(experts)}, self.residency.slots.slot_of
        for wave in visit.waves():
            slots = [slot_of[expert] for expert in wave]
            one.run([group_of[expert] for expert in wave], slots)
            self.lane.used(slots)

    def _sort(self, call: LayerCall, layer: int) -> Pairs:
        """The call's pairs, experts as numbers. BadRequest for values that make no sense."""
        row, expert, rows = call.pair_row, call.pair_expert, call.form.sizes[0]
        if row.size and row.view(np.uint32).max() >= rows:  # as unsigned, a negative index is too large as well
            raise BadRequest("pair_row", f"a row index is outside 0..{rows - 1}")
        if not np.isfinite(call.pair_weight).all():
            raise BadRequest("pair_weight", "a gate weight is not finite")
        number = self._number[layer].take(expert + 1, mode="clip")
        try:
            return sort_pairs(row, number, torch.from_numpy(call.pair_weight), rows, self._device)
        except ValueError:  # a negative number; looking for one in every call would cost more
            raise self._not_here(call.layer, int(expert[number < 0][0])) from None

    def _not_here(self, layer: int, expert: int) -> ForefetchError:
        if self.shelf and self.knows(layer, expert):
            return Moved(f"expert {expert} of layer {layer} is not held by this worker any more")
        return BadRequest("pair_expert", f"expert {expert} of layer {layer} is not held by this worker")

    # ---- experts that come and go ----

    @property
    def room(self) -> int:
        """Free places."""
        return self.shelf.room if self.shelf else 0

    def knows(self, layer: int, expert: int) -> bool:
        """Whether the model has such a routed expert."""
        return layer in self.layers and 0 <= expert < self._all.shape[1] - 2

    def put(self, layer: int, expert: int) -> None:
        """Reads an expert that is not here and evaluates it from now on. In any one thread, beside calls."""
        assert self.shelf is not None
        place = self.layers[layer], expert + 1
        number = int(self._all[place])
        self.shelf.put(number)
        if self.residency:
            self.residency.admit(number)
        self._number[place] = number

    def drop(self, layer: int, expert: int) -> None:
        """Forgets one that is here. Between two calls."""
        assert self.shelf is not None
        place = self.layers[layer], expert + 1
        number, self._number[place] = int(self._all[place]), -1
        if self.residency:
            self.residency.forget(number)
        self.shelf.drop(number)

    # ---- what other threads ask ----

    def hint(self, hint: ExpertHint, source: str = "") -> bool:
        """Has experts copied ahead of time. False when the hint is stale, or about experts or a layer not held here."""
        layer = self.layers.get(hint.layer)
        if layer is None:
            return False
        numbers = self._number[layer].take(hint.experts.astype(np.int64) + 1, mode="clip")
        if (numbers < 0).any():
            return False
        return self.residency is None or self.residency.hint((source, hint.step, layer), numbers.tolist(), hint)

    def resident(self, layer: int) -> list[int]:
        """The layer's experts that can be used at once, ascending; none for a layer without routed experts."""
        place = self.layers.get(layer)
        if place is None:
            return []
        if self.residency is None:
            experts: list[int] = np.flatnonzero(self._number[place][1:-1] >= 0).tolist()
            return experts
        with self.residency.changed:
            return [self.members[number][1] for number in self.residency.slots.ready(place)]

    def pairs_of(self, held: Held) -> dict[int, list[int]]:
        """Pairs evaluated by each of these experts since the process began."""
        numbers = {layer: self._all[self.layers[layer]][np.array(held[layer], dtype=np.int64) + 1] for layer in held}
        return {layer: self.load[each].tolist() for layer, each in numbers.items()}


def _quiet(done: int, total: int) -> None:
    pass
