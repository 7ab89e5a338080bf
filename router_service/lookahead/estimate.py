"""Tier 0: what later gates will see, estimated without any training.

At the gate of layer L the residual x and the choice are known, the experts' outputs are not. A calibrated mean output per
(layer, expert) stands in for them; the shared expert and dense layers in between are run exactly; attention in between is
left out. The later layer's own norm and gate then rank its experts. Letters: T rows, H hidden, E experts, K top-k.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor
from torch.nn.functional import embedding_bag, linear, rms_norm

from router_service.trunk import Layer, Trunk

WEIGHT_SCALE = 4.0  # brings the choice's weights to about the size of the other features


class Estimator:
    """`outputs`: layer -> mean outputs [E, H] of its experts; a layer without an entry counts as adding nothing."""

    def __init__(self, trunk: Trunk, outputs: Mapping[int, Tensor]) -> None:
        self.spec, self.layers, self.outputs = trunk.spec, trunk.layers, outputs

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
        return x if out is None else torch.add(x, out, alpha=self.spec.residual_multiplier)

    def between(self, layer: int, target: int, x: Tensor) -> Tensor:
        """x [T, H] behind `layer` -> what reaches the gate of `target` through the dense layers in between."""
        for index in range(layer + 1, target):
            dense = self.layers[index].dense
            assert dense is not None
            x = torch.add(x, dense(self.normed(index, x)), alpha=self.spec.residual_multiplier)
        return x

    def unit(self, x: Tensor) -> Tensor:
        """x [T, H] divided by its root mean square: what heads see of a residual."""
        return rms_norm(x, x.shape[-1:], None, self.spec.rms_eps)

    def features(self, x: Tensor, estimate: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        """What a head sees [T, 2H + E]: the residual at the gate, the estimate behind the layer, the weights by expert."""
        chosen = x.new_zeros(len(x), self.spec.num_experts)
        chosen.scatter_(1, ids.long(), WEIGHT_SCALE * weights.to(x.dtype))
        return torch.cat((self.unit(x), self.unit(estimate), chosen), dim=1)


def shared_output(layer: Layer, x: Tensor, eps: float) -> Tensor | None:
    """The shared expert's part of the layer's sum when the residual at its gate is x [T, H]; None without one."""
    if layer.shared is None or layer.shared_gate is None:
        return None
    h = rms_norm(x, x.shape[-1:], layer.post_norm, eps)
    return torch.sigmoid(linear(h, layer.shared_gate)) * layer.shared(h)
