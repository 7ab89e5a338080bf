"""What heads.py and estimate.py define, folded for running: a look-up and three products for a layer and both its targets.

    seen  = unit(x) first + bias             [T, 2R + C]    a sketch's two halves; what corrections see of the residual
    known = weights . table[ids] + constant  [T, R + C + H]  its gains; what corrections see of the choice; mean outputs
    estimate = x + known[H part] + (silu(gate) * up * gains) outer
    both  = unit(estimate) second + offset   [T, D E + C]   later gates; what corrections see of the estimate
    logits = both[E part] + silu(all that corrections see) up

On one row the time goes into starting operations and reading weights; matrices lie [in, out], which is what a product of few
rows reads fastest. Nothing here waits for the host. Letters: T rows, H hidden, E experts, K top-k, R units of a sketch, C = D *
rank columns of corrections, D targets, M named experts.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn.functional import embedding_bag, rms_norm, silu

from router_service.lookahead.estimate import Estimator, Network, shared_output
from router_service.lookahead.sketch import WEIGHT_SCALE, Sketch
from router_service.trunk import Trunk


class Corrections:
    """The corrections of D targets side by side; `None` among them: zeros. All others have one shape."""

    def __init__(self, corrections: Sequence[Network | None], experts: int, like: Tensor) -> None:
        shapes = [c.down.shape for c in corrections if c is not None] or [torch.Size((0, 0))]
        rank, width = shapes[0]
        empty = Network(*(like.new_zeros(shape) for shape in ((rank, width), (rank,), (experts, rank), (experts,))))
        parts = [empty if c is None else c.to(like) for c in corrections]
        down, self.bias, offset = (torch.cat([getattr(c, name) for c in parts]) for name in ("down", "bias", "offset"))
        self.down, self.offset = down.T, offset  # [F, C], [D E]
        self.up = like.new_zeros(len(parts) * rank, len(parts) * experts)  # [C, D E], one block for each target
        for d, part in enumerate(parts):
            self.up[d * rank : (d + 1) * rank, d * experts : (d + 1) * experts] = part.up.T


class Behind:
    """Estimates the residual behind one layer, and carries along what corrections see of its gate's side."""

    def __init__(self, trunk: Trunk, estimator: Estimator, layer: int, seen: Tensor | None = None) -> None:
        """`seen` [H + E, C]: corrections' weights for unit(x) and the choice."""
        like, spec = trunk.embedding, trunk.spec
        hidden, experts = spec.hidden_size, spec.num_experts
        self._layer, self._eps, self._multiplier = trunk.layers[layer], spec.rms_eps, spec.residual_multiplier
        sketch = estimator.sketches.get(layer) or _no_sketch(experts, hidden, like)
        seen = like.new_zeros(hidden + experts, 0) if seen is None else seen.to(like)
        means = estimator.outputs.get(layer)
        means = like.new_zeros(experts, hidden) if means is None else self._multiplier * means
        self.units = len(sketch.base)
        blank = like.new_zeros(seen.shape[1])
        self._first = torch.cat((sketch.inner.T, seen[:hidden]), 1).contiguous()
        self._bias = torch.cat((sketch.bias, blank))
        self._table = torch.cat((WEIGHT_SCALE * sketch.gains.T, WEIGHT_SCALE * seen[hidden:], means), 1)
        self._constant = torch.cat((sketch.base, blank, sketch.offset))
        self._outer = sketch.outer.T.contiguous()

    def __call__(self, x: Tensor, ids: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
        """Residual x [T, H] at the gate and its choice [T, K] -> residual behind the layer [T, H], [T, C]."""
        units, hidden = self.units, x.shape[1]
        known = embedding_bag(ids, self._table, mode="sum", per_sample_weights=weights.to(x.dtype)) + self._constant
        estimate = x + known[:, -hidden:]
        if (shared := shared_output(self._layer, x, self._eps)) is not None:
            estimate = torch.add(estimate, shared, alpha=self._multiplier)
        if not self._first.shape[1]:
            return estimate, known[:, :-hidden]
        seen = torch.addmm(self._bias, _unit(x, self._eps), self._first)
        if units:
            active = silu(seen[:, :units]).mul_(seen[:, units : 2 * units]).mul_(known[:, :units])
            estimate = torch.addmm(estimate, active, self._outer)
        return estimate, seen[:, 2 * units :] + known[:, units:-hidden]


class Ahead:
    """The gates of D targets and their corrections."""

    def __init__(self, trunk: Trunk, targets: Sequence[int], corrections: Corrections) -> None:
        self.targets, self._eps, self._experts = tuple(targets), trunk.spec.rms_eps, trunk.spec.num_experts
        gates = torch.cat([_gate(trunk, target) for target in targets], 1)  # [H, D E], with the norms' weights
        corrects, hidden = len(corrections.down) > 0, len(gates)
        down = corrections.down[-hidden:] if corrects else gates.new_zeros(hidden, 0)
        self.second = torch.cat((gates, down), 1).contiguous()
        self.offset = torch.cat((corrections.offset, corrections.bias))
        self.up = corrections.up.contiguous() if corrects else None

    def logits(self, estimates: Sequence[Tensor], seen: Tensor | None) -> Tensor:
        """What reaches each target, [T, H] each, and what corrections see beside the first of them, [T, C] -> [T, D, E]."""
        width = len(self.targets) * self._experts
        both = self._product(estimates[0])
        logits = both[:, :width]
        if any(estimate is not estimates[0] for estimate in estimates):  # dense layers lie in between
            logits = torch.cat([self._product(e)[:, self._place(d)] for d, e in enumerate(estimates)], 1)
        if self.up is not None:
            hidden = both[:, width:] if seen is None else both[:, width:] + seen
            logits = torch.addmm(logits, silu(hidden), self.up)
        return logits.view(len(logits), len(self.targets), self._experts)

    def _product(self, estimate: Tensor) -> Tensor:
        return torch.addmm(self.offset, _unit(estimate, self._eps), self.second)

    def _place(self, target: int) -> slice:
        return slice(target * self._experts, (target + 1) * self._experts)


def _unit(x: Tensor, eps: float) -> Tensor:
    return rms_norm(x, x.shape[-1:], None, eps)


def _gate(trunk: Trunk, layer: int) -> Tensor:
    """Norm weight and gate in one matrix [H, E]."""
    weights = trunk.layers[layer]
    assert weights.gate is not None
    return (weights.gate * weights.post_norm).T


def _no_sketch(experts: int, hidden: int, like: Tensor) -> Sketch:
    shapes = (0, hidden), (0,), (0, experts), (0,), (hidden, 0), (hidden,)
    return Sketch(*(like.new_zeros(shape) for shape in shapes))
