"""What a core puts behind its queue, and what a planner can have loaded and unloaded."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol, runtime_checkable

from torch import Tensor

from expert_worker.residency import Copied
from forefetch.hints import ExpertHint
from forefetch.wire import LayerCall, Verified


class Evaluator(Protocol):
    """`Experts`, `PackedExperts` and their kin. Not for concurrent use, but for `hint`, `resident` and `pairs_of`."""

    @property
    def copied(self) -> Copied:
        """Totals of copies into fast memory."""
        ...

    @property
    def weight_bytes(self) -> int:
        """Bytes of memory for weights."""
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

    def pairs_of(self, held: Mapping[int, Sequence[int]]) -> dict[int, list[int]]:
        """Pairs evaluated by each of these experts, MoE layer -> experts, since the process began."""
        ...


@runtime_checkable
class Placeable(Evaluator, Protocol):
    """An evaluator whose experts come and go."""

    @property
    def room(self) -> int:
        """Free places."""
        ...

    def knows(self, layer: int, expert: int) -> bool:
        """Whether the model has such a routed expert."""
        ...

    def put(self, layer: int, expert: int) -> None:
        """Reads an expert that is not here and evaluates it from now on. In any one thread, beside calls."""
        ...

    def drop(self, layer: int, expert: int) -> None:
        """Forgets one that is here. Between two calls."""
        ...
