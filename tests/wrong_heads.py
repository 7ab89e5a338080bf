"""What names experts wrongly, in the place of heads."""

from __future__ import annotations

import torch
from torch import Tensor

from router_service.lookahead.heads import Hint, Lookahead
from router_service.trunk import Attend


class Shuffled:
    """The real heads, about the wrong experts."""

    def __init__(self, heads: Lookahead, experts: int) -> None:
        self.heads, self.order = heads, torch.randperm(experts, generator=torch.Generator().manual_seed(1))

    def _wrong(self, hint: Hint) -> Hint:
        return Hint(hint.layer, self.order[hint.experts], hint.probabilities)

    def predict(self, layer: int, x: Tensor, ids: Tensor, weights: Tensor, attend: Attend | None = None) -> list[Hint]:
        return [self._wrong(hint) for hint in self.heads.predict(layer, x, ids, weights, attend)]

    def refine(self, layer: int, x: Tensor) -> Hint | None:
        hint = self.heads.refine(layer, x)
        return None if hint is None else self._wrong(hint)


class Constant:
    """The same experts for every row, with the same certainty: a number, NaN, infinity, and an expert that does not exist."""

    def __init__(self, targets: dict[int, tuple[int, ...]], experts: tuple[int, ...], probability: float) -> None:
        self.targets, self.experts, self.probability = targets, experts, probability

    def _hint(self, target: int, rows: int) -> Hint:
        experts = torch.tensor(self.experts).expand(rows, -1)
        return Hint(target, experts, torch.full(experts.shape, self.probability))

    def predict(self, layer: int, x: Tensor, ids: Tensor, weights: Tensor, attend: Attend | None = None) -> list[Hint]:
        return [self._hint(target, len(x)) for target in self.targets[layer]]

    def refine(self, layer: int, x: Tensor) -> Hint | None:
        return self._hint(self.targets[layer][0], len(x)) if self.targets[layer] else None


class Failing:
    """Walks through the attention ahead with nonsense, then fails."""

    def __init__(self, trunk: Lookahead) -> None:
        self.targets = trunk.targets

    def predict(self, layer: int, x: Tensor, ids: Tensor, weights: Tensor, attend: Attend | None = None) -> list[Hint]:
        for target in self.targets[layer] if attend is not None else ():
            attend(target, torch.full_like(x, float("nan")))
        raise RuntimeError("heads are broken")

    def refine(self, layer: int, x: Tensor) -> Hint | None:
        raise RuntimeError("heads are broken")
