"""Several shards in one worker: an evaluator made of evaluators, one per shard, so that each comes and goes by itself."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from operator import add
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from expert_worker.residency import Copied
from forefetch.errors import BadRequest, Moved
from forefetch.hints import ExpertHint
from forefetch.wire import LayerCall, Verified


class Evaluator(Protocol):
    """What a core puts behind its queue: `Experts`, `PackedExperts`, or `Composite` of them."""

    @property
    def load(self) -> npt.NDArray[np.int64]:
        """Pairs evaluated, of any shape; by layer and, in it, by expert held."""
        ...

    @property
    def copied(self) -> Copied:
        """Totals of copies into fast memory."""
        ...

    @property
    def weight_bytes(self) -> int:
        """Bytes of weights held."""
        ...

    def forward(self, call: LayerCall, out: Tensor, source: str) -> tuple[int, Verified]:
        """Fills out [N, H]; returns ns spent waiting for copies, and what became of hints. source names the router."""
        ...

    def hint(self, hint: ExpertHint, source: str) -> bool:
        """Takes a hint in, from any thread, without waiting for calls; False when it is of no use."""
        ...

    def resident(self, layer: int) -> list[int]:
        """The model's indices of the layer's experts that are in fast memory, ascending."""
        ...


class Composite:
    """Unchanging: a worker that gains or loses a shard gets another one of these. Not for concurrent use, as its parts are not.

    shards: the experts of every shard of the model, ascending and disjoint; `parts`: those that are here, by shard.
    """

    def __init__(self, layers: Sequence[int], shards: Sequence[Sequence[int]], parts: Mapping[int, Evaluator]) -> None:
        self.parts = dict(sorted(parts.items()))
        self._layers, self._shards = tuple(layers), shards
        experts = sum(map(len, shards))
        self._owner = np.full(experts, -1, dtype=np.int64)  # expert -> its shard, if that is here
        for shard in self.parts:
            self._owner[list(shards[shard])] = shard

    @property
    def held(self) -> dict[int, tuple[int, ...]]:
        """MoE layer -> experts held, ascending."""
        return dict.fromkeys(self._layers, tuple(expert for shard in self.parts for expert in self._shards[shard]))

    @property
    def load(self) -> npt.NDArray[np.int64]:
        """Pairs evaluated, [MoE layers, experts held]; each shard counts from when it came."""
        rows = [part.load.reshape(len(self._layers), -1) for part in self.parts.values()]
        return np.concatenate(rows, axis=1) if rows else np.zeros((len(self._layers), 0), dtype=np.int64)

    @property
    def copied(self) -> Copied:
        """Totals over the parts."""
        total = Copied()
        for part in self.parts.values():
            total = Copied(*map(add, _fields(total), _fields(part.copied)))
        return total

    @property
    def weight_bytes(self) -> int:
        """Totals over the parts."""
        return sum(part.weight_bytes for part in self.parts.values())

    def forward(self, call: LayerCall, out: Tensor, source: str = "") -> tuple[int, Verified]:
        """Fills out [N, H]; ns spent waiting for copies, and what became of hints, over the parts.

        Moved for an expert that is held elsewhere, BadRequest for what is no expert or no layer."""
        experts = call.pair_expert.numpy()
        if call.layer not in self._layers:
            raise BadRequest("layer", f"layer {call.layer} has no routed experts")
        if experts.size and not 0 <= experts.min() <= experts.max() < len(self._owner):
            raise BadRequest("pair_expert", f"an expert is outside 0..{len(self._owner) - 1}")
        owners = self._owner[experts]
        if (owners < 0).any():
            raise Moved(f"expert {experts[owners < 0][0]} of layer {call.layer} is not held by this worker any more")
        named = np.unique(owners).tolist()
        if len(named) == 1:
            return self.parts[named[0]].forward(call, out, source)
        return self._spread(call, out, source, owners, named)

    def _spread(
        self, call: LayerCall, out: Tensor, source: str, owners: npt.NDArray[np.int64], named: Sequence[int]
    ) -> tuple[int, Verified]:
        """Each part its pairs; their rows are added in the order of shards, which makes the sum repeatable."""
        waited, verified = 0, Verified()
        out.zero_()
        rows = torch.empty_like(out)
        for shard in named:
            mine = torch.from_numpy(np.nonzero(owners == shard)[0])
            pairs = (call.pair_row[mine], call.pair_expert[mine], call.pair_weight[mine])
            part = replace(call, pair_row=pairs[0], pair_expert=pairs[1], pair_weight=pairs[2])
            ns, found = self.parts[shard].forward(part, rows, source)
            out += rows
            waited, verified = waited + ns, Verified(*map(add, verified, found))
        return waited, verified

    def hint(self, hint: ExpertHint, source: str = "") -> bool:
        """Hands each part its experts; False when none is of use here."""
        known = (hint.experts >= 0) & (hint.experts < len(self._owner))
        owners = np.where(known, self._owner[np.where(known, hint.experts, 0)], -1)
        taken = [
            self.parts[shard].hint(
                replace(hint, experts=hint.experts[owners == shard], probabilities=hint.probabilities[owners == shard]), source
            )
            for shard in np.unique(owners[owners >= 0]).tolist()
        ]
        return any(taken)

    def resident(self, layer: int) -> list[int]:
        """The layer's experts in fast memory, ascending."""
        return sorted(expert for part in self.parts.values() for expert in part.resident(layer))


def _fields(copied: Copied) -> Sequence[int]:
    return tuple(getattr(copied, name) for name in copied.__dataclass_fields__)
