"""Loading experts on demand, as public offloading engines do: the opponents of `expert_offload`, built from our own parts.

Such an engine keeps a list of recently used experts per layer, all layers with equally many places, and copies what a layer
lacks when its gate has chosen, the least recently used giving way (Mixtral-offloading's `expert_cache.py`, 2023, which also
copies the evicted one back and evaluates experts one by one; neither is held against it here). Three of them:

- `Planned`: what is copied is worked out before the step and outside the clock; a recorded step copies it by kernels and runs
  on. No engine that waits for the gate can be faster with these lists.
- `HostLoader`, recorded: the host waits for the choice, looks it up, has the copy engine copy, and launches the experts; what
  comes before and behind that is recorded per layer.
- `HostLoader`, eager: the same with each kernel launched by Python, as engines on plain PyTorch do.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from benchmarks.drawn_routing import FewSlots
from forefetch.kernels import residency
from forefetch.kernels.gate.triton import choose_into
from forefetch.kernels.grouped_mlp.moe import moe

Job = tuple[int, int, int]  # expert, its slot, who was there


class Lists:
    """Each layer's experts in slots, least recently used first; the first `places` of each layer to begin with."""

    def __init__(self, layers: int, places: int) -> None:
        self.places = places
        self._lists = [OrderedDict((e, layer * places + e) for e in range(places)) for layer in range(layers)]
        self.needed = self.found = 0

    def look(self, layer: int, needed: Sequence[int]) -> list[Job]:
        """Uses these distinct experts: what must be copied. At most `places` at a time."""
        entries = self._lists[layer]
        missing = [expert for expert in needed if expert not in entries]
        for expert in needed:
            if expert in entries:
                entries.move_to_end(expert)
        self.needed, self.found = self.needed + len(needed), self.found + len(needed) - len(missing)
        jobs = []
        for expert in missing:
            out, slot = entries.popitem(last=False)
            entries[expert] = slot
            jobs.append((expert, slot, out))
        return jobs


class Planned(FewSlots):
    """Recorded steps that copy what `prepare` found missing."""

    lists: Lists

    def restart(self, recall: float = 0.0) -> None:
        """As at the start: the first experts of each layer in its slots."""
        state, layers, experts = self.state, len(self.layers), self.spec.num_experts
        places = len(state.slots) // layers
        self.lists, self.ahead = Lists(layers, places), None
        numbers = torch.arange(experts).lt(places).repeat(layers).nonzero().flatten()
        for slot, row in enumerate((state.home.cpu()[numbers] - state.first_host).tolist()):
            state.slots[slot].copy_(state.host[row], non_blocking=True)
        state.table.copy_(state.home)
        state.table[numbers.to(state.table.device)] = (
            torch.arange(len(numbers), dtype=torch.int32, device=state.table.device) + state.first_slot
        )
        state.jobs.fill_(-1)
        if state.slots.is_cuda:
            torch.cuda.synchronize()

    def prepare(self, chosen: Sequence[Sequence[int]]) -> None:
        """What each layer of the next step will have to copy; chosen: its distinct experts, layer by layer."""
        jobs, gone = torch.full(self.state.jobs.shape, -1, dtype=torch.int32), list[int]()
        for place, needed in enumerate(chosen):
            for number, (expert, slot, out) in enumerate(self.lists.look(place, needed)):
                jobs[place, number] = torch.tensor([place * self.spec.num_experts + expert, slot])
                gone.append(place * self.spec.num_experts + out)
        self.state.jobs.copy_(jobs)
        leaving = torch.tensor(gone, dtype=torch.int64, device=self.state.table.device)
        self.state.table[leaving] = self.state.home[leaving]

    def choose(self, place: int, rows: int) -> tuple[Tensor, Tensor]:
        """The drawn choice of a layer: ids and weights [T, K]."""
        ids, weights = self._chosen[place, :rows], self._weights[place, :rows]
        choose_into(self.drawn.logits[place, :rows], ids, weights, self.spec.gate_rule, self.spec.renormalise)
        return ids, weights

    def products(self, place: int, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        """The layer's experts, wherever its part of the table says that they are."""
        out, experts = self._out[: len(x)], self.spec.num_experts
        table = self.state.table[place * experts : (place + 1) * experts]
        moe(x, ids, weights, self.state.base, table, out, self._scratch)
        return out

    def route(self, layer: int, x: Tensor, logits: Tensor) -> Tensor:
        """Choice, copies of what is missing, experts."""
        place = self.layers[layer]
        ids, weights = self.choose(place, len(x))
        residency.bring(self.state, place)
        return self.products(place, x, ids, weights)


class HostLoader:
    """A step with the host in every layer, over the slots and lists of `experts`. record(f): f as a replay, or f itself."""

    def __init__(
        self,
        experts: Planned,
        wait: Callable[[], None],
        x: Tensor,
        out: Tensor,
        record: Callable[[Callable[[], None]], Callable[[], None]],
    ) -> None:
        state, layers, cuda = experts.state, len(experts.layers), x.is_cuda
        self._experts, self._cuda = experts, cuda
        self._ids = torch.empty((layers, len(x), experts.spec.top_k), dtype=torch.int32, pin_memory=cuda)
        self._table = torch.empty((layers, experts.spec.num_experts), dtype=torch.int32, pin_memory=cuda)
        self._table.copy_(state.table.view(self._table.shape))
        self._rows, self._home = self._table.numpy(), state.home.cpu().view(self._table.shape).tolist()

        def first(place: int) -> None:
            wait()
            self._ids[place].copy_(experts.choose(place, len(x))[0], non_blocking=True)

        def second(place: int) -> None:
            state.table.view(self._table.shape)[place].copy_(self._table[place], non_blocking=True)
            chosen = experts._chosen[place, : len(x)], experts._weights[place, : len(x)]
            out[place].copy_(experts.products(place, x, *chosen))

        self._pieces = [
            (record(lambda place=place: first(place)), record(lambda place=place: second(place)))  # type: ignore[misc]
            for place in range(layers)
        ]

    def step(self) -> None:
        """All layers; the last one's experts may still be at work."""
        state, lists = self._experts.state, self._experts.lists
        for place, (first, second) in enumerate(self._pieces):
            first()
            if self._cuda:
                torch.cuda.current_stream().synchronize()
            home, rows = self._home[place], self._rows[place]
            for expert, slot, out in lists.look(place, sorted(set(self._ids[place].flatten().tolist()))):
                state.slots[slot].copy_(state.host[home[expert] - state.first_host], non_blocking=True)
                rows[out], rows[expert] = home[out], slot + state.first_slot
            second()
