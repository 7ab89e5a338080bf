"""Slots in a GPU's memory that hold experts packed, as host memory does: a copy is a copy, and kernels unpack in registers.

A call waits until all of its experts are there and is then one launch of `kernels/grouped_mlp/moe`, which finds them through a
device table of slots. Where its rows need more experts than there are slots, it goes in groups of rows that need few enough.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from time import perf_counter_ns

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from expert_worker.experts import Experts, Storage
from expert_worker.host import Host
from expert_worker.misses import MissTimes
from expert_worker.packed import dense
from expert_worker.pool import CHUNK, Pool
from expert_worker.prefetch import Key
from expert_worker.slots import NOWHERE, Slots, uses_of
from expert_worker.visit import Visit
from forefetch.kernels.grouped_mlp import Pairs
from forefetch.kernels.grouped_mlp.formats import ExpertFormat, blob_bytes, unpack
from forefetch.kernels.grouped_mlp.moe import moe
from forefetch.kernels.grouped_mlp.scratch import MoeScratch
from forefetch.spec import ModelSpec
from forefetch.wire import LayerCall, Verified

Ints = npt.NDArray[np.int32]


class PackedPool(Pool):
    """`memory` uint8 [slots, stride] of packed experts."""

    def __init__(self, slots: int, hidden: int, width: int, format: ExpertFormat, device: torch.device) -> None:
        self.format, self.hidden, self.width = format, hidden, width
        self.stride = blob_bytes(hidden, width, format)
        self.memory = torch.empty(slots, self.stride, dtype=torch.uint8, device=device)

    def prepare(self, dtype: torch.dtype) -> None:
        """Nothing: kernels are compiled when they are first called."""

    def fill(self, slot: int, blob: Tensor, format: ExpertFormat) -> None:
        """Brings the bytes, in chunks, so that a demanded copy never waits long. On a GPU this only launches."""
        to = self.memory[slot]
        for start in range(0, self.stride, CHUNK):
            to[start : start + CHUNK].copy_(blob[start : start + CHUNK], non_blocking=True)

    def differs(self, slot: int, host: Host, number: int) -> bool:
        """Whether a slot does not hold host memory's bytes."""
        return not torch.equal(self.memory[slot].cpu(), host.blob(number))


@dataclass(frozen=True)
class OnHost:
    """What the CPU has evaluated."""

    pairs: Tensor  # bool [N, K]
    rows: Tensor  # float32 [N, H], gate weights applied


class SlottedExperts(Experts):
    """`Experts` with fewer slots than experts, on a GPU. `storage.format` is what slots hold; rows are of `dtype`."""

    def _pool(self, count: int, spec: ModelSpec, storage: Storage, dtype: torch.dtype) -> Pool:
        assert storage.format is not None
        self._spec, self._format = spec, storage.format
        sizes = (spec.top_k, spec.num_experts, spec.hidden_size, spec.expert_width)
        self._scratch = MoeScratch(storage.max_rows, *sizes, storage.format, device=self._device, dtype=dtype)
        self._out = torch.empty(storage.max_rows, spec.hidden_size, dtype=dtype, device=self._device)
        self._miss, self.miss_times = storage.miss, MissTimes()
        return PackedPool(count, spec.hidden_size, spec.expert_width, storage.format, self._device)

    def _evaluate(self, call: LayerCall, layer: int, pairs: Pairs, out: Tensor, source: str) -> tuple[int, Verified]:
        held = [expert for _, expert in self.members[self._first[layer] : self._first[layer + 1]]]
        ids, weights = dense(call, held, self._spec.top_k)
        numbers = self._number[layer][ids.numpy() + 1]  # [N, K], -1 where a row has fewer pairs
        gates = weights  # on the host
        x, ids, weights = (part.to(self._device, non_blocking=True) for part in (call.x, ids, weights))
        stall, found = 0, np.zeros(len(Verified._fields), dtype=np.int64)
        for rows in self._groups(numbers):
            experts, counts = np.unique(numbers[rows], return_counts=True)
            needs = {expert: count for expert, count in zip(experts.tolist(), counts.tolist(), strict=True) if expert >= 0}
            with self._visit((source, call.step, layer), needs, rows.stop - rows.start) as visit:
                aside = self._on_host(call.x[rows], gates[rows], numbers[rows], visit.elsewhere)
                chosen = ids[rows] if aside is None else ids[rows].masked_fill(aside.pairs.to(self._device), NOWHERE)
                if not visit.gather():
                    raise RuntimeError("experts that fit did not fit")
                moe(x[rows], chosen, weights[rows], self.pool.memory, self._table(layer), self._out[rows], self._scratch)
                if aside is not None:
                    self._out[rows] += aside.rows.to(self._device)
                self.lane.used([self._slots.slot_of[expert] for expert in needs if expert not in visit.elsewhere])
            stall += visit.stall_ns
            found += visit.verified()
        out.copy_(self._out[: len(x)])
        return stall, Verified(*found.tolist())

    @property
    def _slots(self) -> Slots:
        assert self.residency is not None
        return self.residency.slots

    def _visit(self, key: Key, pairs: dict[int, int], rows: int) -> Visit:
        residency = self.residency
        assert residency is not None

        def elsewhere(missing: list[int], under_way: int) -> list[int]:
            if self._miss == "cpu":
                return missing
            counts = [pairs[expert] for expert in missing]
            return [missing[place] for place in self.miss_times.on_host(counts, residency.prefetcher.copy_ns, under_way)]

        uses = uses_of(list(pairs.values()), rows)
        return Visit(residency, key, list(pairs), uses, elsewhere if self._miss in ("cpu", "sooner") else None)

    def _on_host(self, x: Tensor, weights: Tensor, numbers: Ints, experts: list[int]) -> OnHost | None:
        """Evaluates missing experts on the CPU while copies are under way."""
        if not experts:
            return None
        assert self.host is not None
        x = x.cpu().float()
        found = OnHost(torch.from_numpy(np.isin(numbers, experts)), torch.zeros(x.shape))
        for expert in experts:
            began = perf_counter_ns()
            row, column = np.nonzero(numbers == expert)
            w13, w2 = unpack(
                self.host.blob(expert), self._spec.hidden_size, self._spec.expert_width, self._format, torch.float32
            )
            gate, up = (x[row] @ w13.t()).chunk(2, dim=1)
            y = (torch.nn.functional.silu(gate) * up) @ w2.t()
            found.rows.index_add_(0, torch.from_numpy(row), y * weights[row, column, None])
            self.miss_times.computed(len(row), perf_counter_ns() - began)
        return found

    def _groups(self, numbers: Ints) -> Iterator[slice]:
        """Consecutive rows, as many as find room at once."""
        start, needed = 0, set[int]()
        for row, wanted in enumerate(numbers.tolist()):
            more = needed | set(wanted) - {NOWHERE}
            if len(more) > self._slots.capacity:
                yield slice(start, row)
                start, more = row, set(wanted) - {NOWHERE}
            needed = more
        if len(numbers):
            yield slice(start, len(numbers))

    def _table(self, layer: int) -> Tensor:
        """int32 [E]: the slot of each of the layer's experts, -1 for those that are not here."""
        slot_of = self._slots.slot_of
        slots = [slot_of[number] if number >= 0 else NOWHERE for number in self._number[layer][1:-1].tolist()]
        return torch.tensor(slots, dtype=torch.int32).to(self._device, non_blocking=True)
