"""The runtime form: at the gate of layer L, which experts the gates of the next two MoE layers will choose.

Two ways. Without attention, in a dozen small operations for both targets:

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
from torch.nn.functional import linear, rms_norm, silu

from forefetch.kernels.gate import choose
from router_service.lookahead.estimate import Estimator, Network
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


class Lookahead:
    """Makes hints out of an estimator and heads, on the trunk's device in its dtype."""

    def __init__(self, trunk: Trunk, estimator: Estimator, heads: Heads) -> None:
        self.spec, self.estimator, self._heads = trunk.spec, estimator, heads
        self._ahead: dict[int, _Stack] = {}
        self._refined: dict[int, _Stack] = {}
        moe = trunk.spec.moe_layers
        self.targets = {layer: moe[place + 1 : place + 3] for place, layer in enumerate(moe)}
        for layer, targets in self.targets.items():
            if targets:
                self._ahead[layer] = _Stack(trunk, targets, [self._head(layer, d + 1) for d in range(len(targets))])
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
        estimates = self._estimates(layer, stack.targets, self.estimator.behind(layer, x, ids, weights))
        seen = self.estimator.features(x, estimates[0], ids, weights) if stack.corrects else None
        return stack.hints(estimates, seen)

    def refine(self, layer: int, x: Tensor) -> Hint | None:
        """The true residual x [T, H] behind `layer` -> a better hint for the next MoE layer; None behind the last."""
        stack = self._refined.get(layer)
        if stack is None:
            return None
        estimates = self._estimates(layer, stack.targets, x)
        return stack.hints(estimates, self.estimator.unit(estimates[0]) if stack.corrects else None)[0]

    def _head(self, layer: int, distance: int) -> Head:
        return self._heads.get((layer, distance), Head())

    def _walk(self, layer: int, x: Tensor, ids: Tensor, weights: Tensor, attend: Attend) -> list[Hint]:
        """Through the next two MoE layers and what lies in between, as the trunk will go, with estimates for its experts."""
        spec, at, hints = self.spec, layer, list[Hint]()
        for distance, target in enumerate(self.targets[layer], 1):
            x = self.estimator.reach(at, target, self.estimator.behind(at, x, ids, weights), attend)
            logits, head = self.estimator.logits(target, x), self._head(layer, ATTENDED + distance)
            hints.append(Hint(target, *named(logits, spec.top_k, head.scale, head.shift)))
            if distance < len(self.targets[layer]):
                ids, weights = choose(logits, spec.top_k, spec.gate_rule, spec.renormalise)
            at = target
        return hints

    def _estimates(self, layer: int, targets: Sequence[int], x: Tensor) -> Tensor:
        """x [T, H] behind `layer` -> what reaches each target [D, T, H]; what MoE layers in between add is left out."""
        found = []
        for before, target in zip((layer, *targets), targets, strict=False):
            x = self.estimator.reach(before, target, x)
            found.append(x)
        return x.expand(len(targets), *x.shape) if all(each is x for each in found) else torch.stack(found)


def named(logits: Tensor, top_k: int, scale: float | Tensor, shift: float | Tensor) -> tuple[Tensor, Tensor]:
    """logits [.., T, E] -> the M best of each row and their probabilities.

    A row's threshold lies midway between its K-th logit and the next.
    """
    best, experts = logits.float().topk(min(top_k + EXTRA, logits.shape[-1]), dim=-1)
    edge = best[..., top_k - 1 : top_k + 1].mean(-1, keepdim=True)
    return experts, torch.sigmoid((best - edge) * scale + shift)


class _Stack:
    """Gates and corrections of the D targets that one layer looks ahead to, side by side: few operations for all of them."""

    def __init__(self, trunk: Trunk, targets: Sequence[int], heads: Sequence[Head]) -> None:
        self.targets, self._eps, spec = tuple(targets), trunk.spec.rms_eps, trunk.spec
        self._top_k = spec.top_k
        folded = [_gate(trunk, target) for target in targets]  # norm weight and gate in one matrix [H, E]
        like = folded[0]
        self._gates = torch.stack(folded)
        self.corrects = any(head.correction is not None for head in heads)
        parts = _padded([head.correction for head in heads], spec.num_experts, like)
        self._down, self._bias = torch.cat([c.down for c in parts]).to(like), torch.cat([c.bias for c in parts]).to(like)
        self._up = torch.stack([c.up.T for c in parts]).to(like)  # [D, R, E]
        self._offset = torch.stack([c.offset for c in parts]).to(like)[:, None]  # [D, 1, E]
        self._scale, self._shift = (
            like.new_tensor([getattr(h, name) for h in heads]).view(-1, 1, 1) for name in ("scale", "shift")
        )

    def logits(self, estimates: Tensor, features: Tensor | None) -> Tensor:
        """estimates [D, T, H], features [T, F] -> [D, T, E]."""
        logits = torch.bmm(rms_norm(estimates, estimates.shape[-1:], None, self._eps), self._gates)
        if features is None:
            return logits
        hidden = silu(linear(features, self._down, self._bias)).view(len(features), len(self.targets), -1)
        return torch.baddbmm(logits + self._offset, hidden.transpose(0, 1), self._up)

    def hints(self, estimates: Tensor, features: Tensor | None) -> list[Hint]:
        """One per target."""
        experts, probabilities = named(self.logits(estimates, features), self._top_k, self._scale, self._shift)
        return [Hint(target, experts[d], probabilities[d]) for d, target in enumerate(self.targets)]


def _gate(trunk: Trunk, layer: int) -> Tensor:
    weights = trunk.layers[layer]
    assert weights.gate is not None
    return (weights.gate * weights.post_norm).T


def _padded(corrections: Sequence[Network | None], experts: int, like: Tensor) -> list[Network]:
    """Zeros in place of the missing ones. All others have one shape."""
    shapes = [c.down.shape for c in corrections if c is not None] or [torch.Size((0, 0))]
    rank, width = shapes[0]
    empty = Network(like.new_zeros(rank, width), like.new_zeros(rank), like.new_zeros(experts, rank), like.new_zeros(experts))
    return [empty if c is None else c for c in corrections]
