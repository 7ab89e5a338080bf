"""The runtime form: at the gate of layer L, which experts the gates of the next two MoE layers will choose.

    logits of layer L+d = gate(norm(estimate)) + up @ silu(down @ [norm(x), norm(estimate), weights])

The first term is tier 0 (`estimate.py`); the second is a trained correction that starts at zero. A head without one is
tier 0. Once layer L's output is back, `refine` ranks L+1 again from the true residual: what it misses is attention alone.

Letters: T rows, H hidden, E experts, K top-k, M = K + 2 named experts, F features, R rank, D targets.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import linear, rms_norm, silu

from router_service.lookahead.estimate import Estimator
from router_service.trunk import Trunk

EXTRA = 2  # experts named beyond the top-k
REFINED = 0  # the distance that refining heads are filed under: L+1, seen from behind layer L


@dataclass(frozen=True)
class Correction:
    """down [R, F], bias [R], up [E, R], offset [E]: features [T, F] -> what is added to tier 0's logits [T, E]."""

    down: Tensor
    bias: Tensor
    up: Tensor
    offset: Tensor

    def __call__(self, features: Tensor) -> Tensor:
        """The definition; `_Stack` computes it for all targets at once."""
        return linear(silu(linear(features, self.down, self.bias)), self.up, self.offset)


@dataclass(frozen=True)
class Head:
    """One (layer, distance). `scale` and `shift` make a probability of a logit's lead over the row's threshold."""

    correction: Correction | None = None  # None: tier 0
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
    """Tier 0 with the corrections of `heads`, on the trunk's device in its dtype."""

    def __init__(self, trunk: Trunk, outputs: Mapping[int, Tensor], heads: Heads) -> None:
        """`outputs`: layer -> mean outputs [E, H] of its experts; a layer without an entry counts as adding nothing."""
        self.estimator, self._experts = Estimator(trunk, outputs), trunk.spec.num_experts
        self._ahead: dict[int, _Stack] = {}
        self._refined: dict[int, _Stack] = {}
        moe = trunk.spec.moe_layers
        for place, layer in enumerate(moe[:-1]):
            targets = moe[place + 1 : place + 3]
            self._ahead[layer] = _Stack(trunk, targets, [heads.get((layer, d + 1), Head()) for d in range(len(targets))])
            self._refined[layer] = _Stack(trunk, targets[:1], [heads.get((layer, REFINED), Head())])

    def predict(self, layer: int, x: Tensor, ids: Tensor, weights: Tensor) -> list[Hint]:
        """Residual x [T, H] at the gate of `layer` and its choice [T, K] -> hints for the next two MoE layers, nearer first."""
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

    def _estimates(self, layer: int, targets: Sequence[int], x: Tensor) -> Tensor:
        """x [T, H] behind `layer` -> what reaches each target [D, T, H]; what MoE layers in between add is left out."""
        found = []
        for before, target in zip((layer, *targets), targets, strict=False):
            x = self.estimator.between(before, target, x)
            found.append(x)
        return x.expand(len(targets), *x.shape) if all(each is x for each in found) else torch.stack(found)


class _Stack:
    """Gates and corrections of the D targets that one layer looks ahead to, side by side: few operations for all of them."""

    def __init__(self, trunk: Trunk, targets: Sequence[int], heads: Sequence[Head]) -> None:
        self.targets, self._eps, spec = tuple(targets), trunk.spec.rms_eps, trunk.spec
        self._top_k, self._named = spec.top_k, min(spec.top_k + EXTRA, spec.num_experts)
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
        """The M best of each row and target. The threshold of a row lies midway between its K-th and next logit."""
        best, experts = self.logits(estimates, features).float().topk(self._named, dim=-1)
        edge = best[..., self._top_k - 1 : self._top_k + 1].mean(-1, keepdim=True)
        probabilities = torch.sigmoid((best - edge) * self._scale + self._shift)
        return [Hint(target, experts[d], probabilities[d]) for d, target in enumerate(self.targets)]


def _gate(trunk: Trunk, layer: int) -> Tensor:
    weights = trunk.layers[layer]
    assert weights.gate is not None
    return (weights.gate * weights.post_norm).T


def _padded(corrections: Sequence[Correction | None], experts: int, like: Tensor) -> list[Correction]:
    """Zeros in place of the missing ones. All others have one shape."""
    shapes = [c.down.shape for c in corrections if c is not None] or [torch.Size((0, 0))]
    rank, width = shapes[0]
    empty = Correction(
        like.new_zeros(rank, width), like.new_zeros(rank), like.new_zeros(experts, rank), like.new_zeros(experts)
    )
    return [empty if c is None else c for c in corrections]
