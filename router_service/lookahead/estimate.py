"""Tier 0: what later gates will see, estimated.

At the gate of layer L the residual x and the choice are known, the experts' outputs are not. A calibrated mean output per
(layer, expert) stands in for them, and a sketch of the experts (`sketch.py`) for what the means leave unexplained; the shared
expert and dense layers in between are run exactly. Attention in between is left out, or run on the estimate. The later layer's
own norm and gate then rank its experts. Letters: T rows, H hidden, E experts, K top-k, F = H + E features, R rank.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import embedding_bag, linear, rms_norm, silu

from router_service.layers import Layer
from router_service.lookahead.sketch import WEIGHT_SCALE, Sketch
from router_service.trunk import Attend, Trunk


@dataclass(frozen=True)
class Network:
    """down [R, F], bias [R], up [O, R], offset [O]: features [T, F] -> [T, O]."""

    down: Tensor
    bias: Tensor
    up: Tensor
    offset: Tensor

    def __call__(self, features: Tensor) -> Tensor:
        """Two layers with a SiLU between."""
        return linear(silu(linear(features, self.down, self.bias)), self.up, self.offset)

    def to(self, like: Tensor) -> Network:
        """On the device of `like`, in its dtype."""
        return Network(*(part.to(like) for part in (self.down, self.bias, self.up, self.offset)))

    @staticmethod
    def zero(features: int, rank: int, outputs: int, device: torch.device, seed: int = 1) -> Network:
        """A network that gives zeros until it is trained."""
        down = torch.randn(rank, features, generator=torch.Generator().manual_seed(seed)).to(device) / features**0.5
        blank = [torch.zeros(shape, device=device) for shape in ((rank,), (outputs, rank), (outputs,))]
        return Network(down, *blank)


class Estimator:
    """`outputs`: layer -> mean outputs [E, H]; `sketches`: layer -> the rest. A layer in neither counts as adding nothing."""

    def __init__(self, trunk: Trunk, outputs: Mapping[int, Tensor], sketches: Mapping[int, Sketch] | None = None) -> None:
        self.spec, self.layers, like = trunk.spec, trunk.layers, trunk.embedding
        self.outputs = {layer: table.to(like) for layer, table in outputs.items()}
        self.sketches = {layer: sketch.to(like) for layer, sketch in (sketches or {}).items()}

    def normed(self, layer: int, x: Tensor) -> Tensor:
        """The gate's input of `layer` if its residual is x [T, H]."""
        return rms_norm(x, x.shape[-1:], self.layers[layer].post_norm, self.spec.rms_eps)

    def logits(self, layer: int, x: Tensor) -> Tensor:
        """The gate logits [T, E] of `layer` if its residual is x [T, H]."""
        gate = self.layers[layer].gate
        assert gate is not None
        return linear(self.normed(layer, x), gate)

    def behind(self, layer: int, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        """Residual x [T, H] at the gate of `layer` and its choice [T, K] -> the residual behind that layer."""
        out = shared_output(self.layers[layer], x, self.spec.rms_eps)
        if layer in self.outputs:
            table = self.outputs[layer]
            mean = embedding_bag(ids, table, mode="sum", per_sample_weights=weights.to(table.dtype))
            out = mean if out is None else out + mean
        found = x if out is None else torch.add(x, out, alpha=self.spec.residual_multiplier)
        sketch = self.sketches.get(layer)
        return found if sketch is None else found + sketch(self.unit(x), self.choice(x, ids, weights))

    def reach(self, layer: int, target: int, x: Tensor, attend: Attend | None = None) -> Tensor:
        """x [T, H] behind `layer` -> the residual at the gate of `target`; only dense layers lie in between."""
        for index in range(layer + 1, target):
            dense = self.layers[index].dense
            assert dense is not None
            x = x if attend is None else attend(index, x)
            x = torch.add(x, dense(self.normed(index, x)), alpha=self.spec.residual_multiplier)
        return x if attend is None else attend(target, x)

    def unit(self, x: Tensor) -> Tensor:
        """x [T, H] divided by its root mean square: what networks see of a residual."""
        return rms_norm(x, x.shape[-1:], None, self.spec.rms_eps)

    def choice(self, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        """A choice [T, K] by expert [T, E], on the device of x [T, H] in its dtype."""
        chosen = x.new_zeros(len(x), self.spec.num_experts)
        return chosen.scatter_(1, ids.long(), WEIGHT_SCALE * weights.to(x.dtype))

    def features(self, x: Tensor, estimate: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        """What a head sees [T, 2H + E]: the residual at the gate and its choice, and the estimate behind the layer."""
        return torch.cat((self.unit(x), self.choice(x, ids, weights), self.unit(estimate)), dim=1)


def shared_output(layer: Layer, x: Tensor, eps: float) -> Tensor | None:
    """The shared expert's part of the layer's sum when the residual at its gate is x [T, H]; None without one."""
    if layer.shared is None or layer.shared_gate is None:
        return None
    h = rms_norm(x, x.shape[-1:], layer.post_norm, eps)
    return torch.sigmoid(linear(h, layer.shared_gate)) * layer.shared(h)
