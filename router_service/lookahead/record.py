"""Traces of a run: what heads are trained on, and the experts' mean outputs. Letters: N rows, H hidden, E experts, K top-k.

Memory: N * (4 H + 4 K) bytes per MoE layer, so for the reference model about 9 KB a row. Rows beyond `capacity` are dropped.
"""

from __future__ import annotations

from collections.abc import Sequence, Set

import torch
from torch import Tensor

from router_service.lookahead.corpus import Chunk
from router_service.lookahead.estimate import shared_output
from router_service.trunk import Attend, Trunk

LARGEST = torch.finfo(torch.float16).max


class Trace:
    """Rows of all MoE layers, by layer. `held_in` [N] marks rows of documents that heads are chosen by, not trained on."""

    def __init__(self, trunk: Trunk, capacity: int, device: torch.device) -> None:
        spec, self.capacity, self.rows = trunk.spec, capacity, 0

        def buffers(width: int, dtype: torch.dtype) -> dict[int, Tensor]:
            return {layer: torch.empty(capacity, width, dtype=dtype, device=device) for layer in spec.moe_layers}

        self.x = buffers(spec.hidden_size, torch.float16)  # residual at the gate
        self.after = buffers(spec.hidden_size, torch.float16)  # residual behind the layer
        self.ids = buffers(spec.top_k, torch.int16)
        self.weights = buffers(spec.top_k, torch.float16)
        self.held_in = torch.empty(capacity, dtype=torch.bool, device=device)
        self.tokens = torch.empty(capacity, dtype=torch.int64, device=device)
        self.follows = torch.empty(capacity, dtype=torch.bool, device=device)  # the row before is the position before


class Recorder:
    """A trunk's observer that fills a Trace and gathers what `mean_outputs` needs."""

    def __init__(self, trunk: Trunk, capacity: int, device: torch.device) -> None:
        self.trace, self._trunk = Trace(trunk, capacity, device), trunk
        experts, hidden = trunk.spec.num_experts, trunk.spec.hidden_size

        def sums(*shape: int) -> dict[int, Tensor]:
            return {layer: torch.zeros(shape, dtype=torch.float64, device=device) for layer in trunk.spec.moe_layers}

        # Normal equations of a layer: weights as a sparse row [E] against the sum of its experts' outputs [H].
        self._square, self._moment, self.load = sums(experts, experts), sums(experts, hidden), sums(experts)
        self._last: tuple[Tensor, Tensor, Tensor] | None = None
        self._place = slice(0, 0)

    def begin(self, group: Sequence[Chunk], kept_aside: Set[str]) -> int:
        """Announces the next forward's rows; returns how many of them there is room for."""
        flags = [chunk.document in kept_aside for chunk in group for _ in chunk.ids]
        trace = self.trace
        end = min(trace.rows + len(flags), trace.capacity)
        self._place = slice(trace.rows, end)
        tokens = [token for chunk in group for token in chunk.ids]
        follows = [place > 0 for chunk in group for place in range(len(chunk.ids))]
        for kept_of, values in ((trace.held_in, flags), (trace.tokens, tokens), (trace.follows, follows)):
            kept_of[self._place] = torch.tensor(values[: end - trace.rows], dtype=kept_of.dtype, device=kept_of.device)
        kept, trace.rows = end - trace.rows, end
        return kept

    def chosen(self, layer: int, x: Tensor, ids: Tensor, weights: Tensor, attend: Attend) -> None:
        """Keeps the gate's side of the layer."""
        self._last, trace, kept = (x, ids, weights), self.trace, self._place.stop - self._place.start
        trace.x[layer][self._place] = narrow(x[:kept])
        trace.ids[layer][self._place] = ids[:kept].to(torch.int16)
        trace.weights[layer][self._place] = weights[:kept].to(torch.float16)

    def returned(self, layer: int, x: Tensor) -> None:
        """Keeps the residual behind the layer, and adds its experts' outputs to the sums."""
        assert self._last is not None
        (before, ids, weights), kept = self._last, self._place.stop - self._place.start
        self.trace.after[layer][self._place] = narrow(x[:kept])
        spec, weight_of = self._trunk.spec, scattered(ids, weights, self._trunk.spec.num_experts).double()
        out = (x - before) / spec.residual_multiplier
        shared = shared_output(self._trunk.layers[layer], before, spec.rms_eps)
        out = (out if shared is None else out - shared).double()
        self._square[layer] += weight_of.T @ weight_of
        self._moment[layer] += weight_of.T @ out
        self.load[layer] += torch.bincount(ids.flatten(), minlength=spec.num_experts)

    def mean_outputs(self) -> dict[int, Tensor]:
        """Layer (but the last) -> [E, H] float32: the constants that best explain the layer's weighted sums (least squares).

        That is the mean output for experts which never meet; it is better where experts come together. The ridge leaves an
        expert that was never chosen at zero.
        """
        found = {}
        for layer, square in list(self._square.items())[:-1]:
            ridge = 1e-3 * square.diagonal().mean() * torch.eye(len(square), dtype=square.dtype, device=square.device)
            found[layer] = torch.linalg.solve(square + ridge, self._moment[layer]).float()
        return found


def narrow(x: Tensor) -> Tensor:
    """x as float16, saturated."""
    return x.clamp(-LARGEST, LARGEST).to(torch.float16)


def scattered(ids: Tensor, weights: Tensor, experts: int) -> Tensor:
    """ids, weights [T, K] -> weights by expert [T, E], zero for the others."""
    return weights.new_zeros(len(ids), experts).scatter_(1, ids.long(), weights)
