"""The runtime form: at the gate of layer L, which experts the gates of the next two MoE layers will choose.

Two ways. Without attention, in one look-up and three products for both targets (`folded.py`):

    logits of layer L+d = gate(norm(estimate)) + correction([norm(x), weights, norm(estimate)])

where the estimate leaves out the attention in between (`estimate.py`) and the trained correction starts at zero. With
attention, the layers ahead are walked through: their real attention on the estimate, their real gate, the estimate behind
them. That is much surer, and takes the time of their attention once more, while the workers run layer L.

Once layer L's output is back, `refine` ranks L+1 again from the true residual: what it misses is attention alone.

Letters: T rows, H hidden, E experts, K top-k, M = K + 2 named experts, F features, R rank, D targets.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from forefetch.kernels.gate import choose
from router_service.lookahead.estimate import Estimator, Network
from router_service.lookahead.folded import Ahead, Behind, Corrections
from router_service.lookahead.foresight import Foresight
from router_service.trunk import Attend, Trunk

EXTRA = 2  # experts named beyond the top-k
REFINED = 0  # the distance that refining heads are filed under: L+1, seen from behind layer L
ATTENDED = 10  # added to the distance of a hint made with attention


@dataclass(frozen=True)
class Head:
    """One (layer, distance). `scale` and `shift` make a probability of a logit's lead over the row's threshold."""

    correction: Network | None = None  # None, and always with attention: tier 0
    scale: float = 1.0
    shift: float = 0.0


Heads = Mapping[tuple[int, int], Head]  # (layer, distance) -> head


@dataclass(frozen=True)
class Hint:
    """What the gate of MoE layer `layer` will probably choose: experts [T, M], likeliest first, and their probabilities."""

    layer: int
    experts: Tensor
    probabilities: Tensor


@dataclass(frozen=True)
class Ranking:
    """both = unit(x) second + offset [T, E + C], logits = both[E part] + silu(both[C part]) up; without `up` C is 0."""

    second: Tensor
    offset: Tensor
    up: Tensor | None
    scale: float
    shift: float


class Lookahead:
    """Makes hints out of an estimator and heads, on the trunk's device in its dtype."""

    def __init__(self, trunk: Trunk, estimator: Estimator, heads: Heads, foresight: Foresight | None = None) -> None:
        self.spec, self.estimator, self._heads, self.foresight = trunk.spec, estimator, heads, foresight
        moe = trunk.spec.moe_layers
        self.targets = {layer: moe[place + 1 : place + 3] for place, layer in enumerate(moe)}
        self._behind: dict[int, Behind] = {}
        self._ahead: dict[int, _Stack] = {}
        self._refined: dict[int, _Stack] = {}
        for layer, targets in self.targets.items():
            stack = _Stack(trunk, targets, [self._head(layer, d + 1) for d in range(len(targets))]) if targets else None
            self._behind[layer] = Behind(trunk, estimator, layer, stack.seen if stack else None)
            if stack is not None:
                self._ahead[layer] = stack
                self._refined[layer] = _Stack(trunk, targets[:1], [self._head(layer, REFINED)])

    def predict(self, layer: int, x: Tensor, ids: Tensor, weights: Tensor, attend: Attend | None = None) -> list[Hint]:
        """Residual x [T, H] at the gate of `layer` and its choice [T, K] -> hints for the next two MoE layers, nearer first.

        With `attend` (of the trunk's observer) by way of attention; else without.
        """
        if attend is not None:
            return self._walk(layer, x, ids, weights, attend)
        stack = self._ahead.get(layer)
        if stack is None:
            return []
        estimate, seen = self._behind[layer](x, ids, weights)
        return stack.hints(self._reached(layer, stack.targets, estimate), seen)

    def refine(self, layer: int, x: Tensor) -> Hint | None:
        """The true residual x [T, H] behind `layer` -> a better hint for the next MoE layer; None behind the last."""
        stack = self._refined.get(layer)
        return None if stack is None else stack.hints(self._reached(layer, stack.targets, x), None)[0]

    def rankings(self) -> dict[int, Ranking]:
        """What `refine` computes, by the layer whose experts it names: for a step that does it by itself."""
        return {stack.targets[0]: stack.ranking() for stack in self._refined.values()}

    def _head(self, layer: int, distance: int) -> Head:
        return self._heads.get((layer, distance), Head())

    def _walk(self, layer: int, x: Tensor, ids: Tensor, weights: Tensor, attend: Attend) -> list[Hint]:
        """Through the next two MoE layers and what lies in between, as the trunk will go, with estimates for its experts."""
        spec, at, hints = self.spec, layer, list[Hint]()
        for distance, target in enumerate(self.targets[layer], 1):
            x = self.estimator.reach(at, target, self._behind[at](x, ids, weights)[0], attend)
            logits, head = self.estimator.logits(target, x), self._head(layer, ATTENDED + distance)
            hints.append(Hint(target, *named(logits, spec.top_k, head.scale, head.shift)))
            if distance < len(self.targets[layer]):
                ids, weights = choose(logits, spec.top_k, spec.gate_rule, spec.renormalise)
            at = target
        return hints

    def _reached(self, layer: int, targets: Sequence[int], x: Tensor) -> list[Tensor]:
        """x [T, H] behind `layer` -> what reaches each target; what MoE layers in between add is left out."""
        found = []
        for before, target in zip((layer, *targets), targets, strict=False):
            x = self.estimator.reach(before, target, x)
            found.append(x)
        return found


def named(logits: Tensor, top_k: int, scale: float | Tensor, shift: float | Tensor) -> tuple[Tensor, Tensor]:
    """logits [.., E] -> the M best of each row and their probabilities.

    A row's threshold lies midway between its K-th logit and the next.
    """
    best, experts = logits.float().topk(min(top_k + EXTRA, logits.shape[-1]), dim=-1)
    edge = best[..., top_k - 1 : top_k + 1].mean(-1, keepdim=True)
    return experts, torch.sigmoid((best - edge) * scale + shift)


class _Stack:
    """The D targets that one layer looks ahead to, and how sure their heads are."""

    def __init__(self, trunk: Trunk, targets: Sequence[int], heads: Sequence[Head]) -> None:
        like, self._top_k, hidden = trunk.embedding, trunk.spec.top_k, trunk.spec.hidden_size
        corrections = Corrections([head.correction for head in heads], trunk.spec.num_experts, like)
        self.targets = tuple(targets)
        self.seen = corrections.down[:-hidden] if len(corrections.down) else None  # [H + E, C]
        self._ahead = Ahead(trunk, targets, corrections)
        self._scale, self._shift = (like.new_tensor([getattr(h, name) for h in heads])[:, None] for name in ("scale", "shift"))

    def hints(self, estimates: Sequence[Tensor], seen: Tensor | None) -> list[Hint]:
        """One per target."""
        experts, probabilities = named(self._ahead.logits(estimates, seen), self._top_k, self._scale, self._shift)
        return [Hint(target, experts[:, d], probabilities[:, d]) for d, target in enumerate(self.targets)]

    def ranking(self) -> Ranking:
        """Of one target, seen from right before it."""
        ahead = self._ahead
        return Ranking(ahead.second, ahead.offset, ahead.up, float(self._scale), float(self._shift))
