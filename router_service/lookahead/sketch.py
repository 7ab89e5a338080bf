"""A layer's experts in miniature: what its mean outputs leave unexplained, from a few hundred hidden units instead of all.

    sketch(x, g) = outer (silu(gate x) * (up x) * (gains g)) + offset

is what a layer of gated experts computes if `gains` says which units belong to which expert (g holds the weights of the
chosen). So it starts as the units that matter most, copied out of the experts, and is trained from there; the gains may
then share a unit among experts. Letters: T rows, H hidden, E experts, I expert width, R units that are kept.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import linear, silu

from forefetch.kernels.grouped_mlp import SlotWeights

WEIGHT_SCALE = 4.0  # brings the choice's weights to about the size of the other features


@dataclass(frozen=True)
class Sketch:
    """inner [2R, H] (gate rows, then up rows), bias [2R], gains [R, E], base [R], outer [H, R], offset [H]."""

    inner: Tensor
    bias: Tensor
    gains: Tensor
    base: Tensor
    outer: Tensor
    offset: Tensor

    def __call__(self, unit: Tensor, choice: Tensor) -> Tensor:
        """Residual over its root mean square [T, H] and WEIGHT_SCALE times the weights by expert [T, E] -> [T, H]."""
        gate, up = linear(unit, self.inner, self.bias).chunk(2, dim=-1)
        return linear(silu(gate) * up * linear(choice, self.gains, self.base), self.outer, self.offset)

    def to(self, like: Tensor) -> Sketch:
        """On the device of `like`, in its dtype."""
        return Sketch(*(part.to(like) for part in vars(self).values()))


@torch.no_grad()
def copied(experts: SlotWeights, norm: Tensor, unit: Tensor, choice: Tensor, width: int, multiplier: float) -> Sketch:
    """The `width` units (all, if there are fewer) whose outputs vary most over rows unit [T, H], choice [T, E].

    `norm` [H]: the weight of the norm before the gate. `multiplier`: of what the layer adds to the residual.
    """
    gates, ups = (experts.w13.float() * norm.float()).chunk(2, dim=1)  # [E, I, H]
    outers = multiplier * experts.w2.float()  # [E, H, I]
    weights = choice / WEIGHT_SCALE
    energy = torch.stack([_energy(unit, weights[:, e], gates[e], ups[e]) for e in range(len(gates))])  # [E, I]
    units = gates.shape[1]
    best = (energy * outers.square().sum(1)).flatten().topk(min(width, energy.numel())).indices
    expert, place = best // units, best % units
    gains = torch.zeros(len(best), len(gates), device=unit.device)
    gains[torch.arange(len(best), device=unit.device), expert] = 1.0 / WEIGHT_SCALE
    inner = torch.cat((gates[expert, place], ups[expert, place]))
    blank = [torch.zeros(n, device=unit.device) for n in (2 * len(best), len(best), unit.shape[1])]
    return Sketch(inner, blank[0], gains, blank[1], outers[expert, :, place].T.contiguous(), blank[2])


def _energy(unit: Tensor, weight: Tensor, gate: Tensor, up: Tensor) -> Tensor:
    """Sum over rows of the squared weighted activation [I] of one expert's units, less what a constant output explains."""
    chosen = weight > 0
    weight = weight[chosen, None]
    hidden = silu(unit[chosen] @ gate.T) * (unit[chosen] @ up.T) * weight
    mean = (hidden * weight).sum(0) / weight.square().sum().clamp(min=1e-12)
    return (hidden - weight * mean).square().sum(0)
