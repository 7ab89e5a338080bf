"""Heads inside a recorded step: they run beside the layers, and what they say stays on the device.

Where experts move by themselves (`expert_worker/in_place.py`) nobody on the host needs hints. So heads are recorded with the
step, on a stream of their own, from the residual that the decoder shows them and the choice that the experts made.
"""

from __future__ import annotations

import torch
from torch import Tensor

from router_service.hints import Heads


class RecordedHeads:
    """`see` is a Decoder's, calls are the experts'."""

    def __init__(self, heads: Heads) -> None:
        self._heads = heads
        self._seen: dict[int, Tensor] = {}  # kept until the next step: another stream reads them

    def see(self, layer: int, x: Tensor) -> None:
        """The residual [T, H] at the layer's gate."""
        self._seen[layer] = x

    def __call__(self, layer: int, ids: Tensor, weights: Tensor) -> tuple[Tensor, Tensor] | None:
        """The layer's choice [T, K], -1 in idle rows -> experts and probabilities [D, T, M] of the next MoE layers, nearer
        first."""
        hints = self._heads.predict(layer, self._seen[layer], ids.clamp(min=0), weights)
        if not hints:
            return None
        busy = ids[:, :1] >= 0
        return torch.stack([h.experts for h in hints]), torch.stack([h.probabilities * busy for h in hints]).float()
