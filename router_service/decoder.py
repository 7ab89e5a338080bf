"""The trunk's decode step again, in few kernels: what a GPU records and replays.

The same layers, weights and cache as `trunk.py`, which is the plain form and the one to read first; tests hold the two
together. Here a residual and the norm behind it are one operation, and so is everything between the QKV product and
attention, so that a layer is a dozen launches. Steps come in fixed layouts, and no layer asks the host for anything.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import torch
from torch import Tensor
from torch.nn.functional import linear, rms_norm

from forefetch.kernels.few_rows import few_rows, logits
from forefetch.kernels.grouped_mlp.unsummed import Unsummed
from forefetch.kernels.norm import add_rms_norm
from forefetch.kernels.qkv import HeadNorms
from forefetch.wire import Verified
from router_service.batch import StepBatch
from router_service.layers import Layer, head_logits, project
from router_service.trunk import Trunk


class Resident(Protocol):
    """Experts that are all on the trunk's device and evaluated without the host."""

    shadows: bool
    """Whether some may be evaluated from copies in fewer bits: what `counters` say of every step is reported then."""

    def run(self, layer: int, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        """x [T, H], ids, weights [T, K] -> [T, H]; pairs with id -1 count nothing. Valid until the next call."""

    def route(self, layer: int, x: Tensor, logits: Tensor) -> Tensor:
        """x [T, H], gate logits [T, E] -> [T, H], the model's choice included. Valid until the next call."""

    def unsummed(self, layer: int, x: Tensor, logits: Tensor) -> Tensor | Unsummed:
        """`route`, or a token's experts left for `add_rms_norm`, which is what has to follow."""

    def begin(self, idle: Tensor) -> None:
        """The layers of a step follow; idle rows [T, 1] are padding, whatever becomes of them."""

    def settle(self, idle: Tensor) -> None:
        """All layers of a step were routed: takes its pairs into account, but for idle rows [T, 1]."""

    @property
    def fault(self) -> Tensor:
        """int32 [1] on the device: not 0 when something went wrong since the last `check`."""

    @property
    def counters(self) -> Tensor:
        """int64 on the device: how experts were found and moved since they were loaded."""

    def verified(self, counters: Tensor) -> Verified:
        """What of `counters`, on the host, is new since this was asked last."""

    def check(self) -> None:
        """RuntimeError when something went wrong on the device since the last check; waits for the device."""


# mark(layer, part): a point in time of the device; parts as in PARTS.
Mark = Callable[[int, int], None]
See = Callable[[int, Tensor], None]
"""(layer, the residual [T, H] at its gate): for heads that look ahead inside the step."""
PARTS = ("start", "attention", "gate", "experts", "end")


class Decoder:
    """Decode steps of `trunk` with experts on its own device."""

    def __init__(self, trunk: Trunk, experts: Resident) -> None:
        self.trunk, self.spec, self.experts = trunk, trunk.spec, experts
        self.see: See = lambda layer, x: None
        head_norm = trunk.spec.qk_norm == "head"
        self._head_norms = [_head_norms(layer, trunk.spec.rms_eps) if head_norm else None for layer in trunk.layers]

    @torch.inference_mode()
    def forward(self, batch: StepBatch, mark: Mark = lambda layer, part: None) -> Tensor:
        """Rows of a step in a fixed layout -> logits [S, V] of its `logit_rows`, idle ones included, in the trunk's type."""
        spec, trunk = self.spec, self.trunk
        assert batch.paged is not None
        attention = self.trunk.cache.step(batch, trunk.dtype, spec.attention_scale)
        cos, sin = trunk.rope.tables(batch.positions, trunk.dtype)
        idle = batch.slots[:, None] < trunk.cache.page_size  # padding is written to the scratch page, page 0
        self.experts.begin(idle)
        x = trunk.embedding[batch.token_ids]
        if spec.embedding_multiplier != 1.0:
            x = x * spec.embedding_multiplier
        following = [*(layer.input_norm for layer in trunk.layers[1:]), trunk.final_norm]
        x, h = add_rms_norm(x, None, trunk.layers[0].input_norm, spec.rms_eps)
        for index, layer in enumerate(trunk.layers):
            mark(index, 0)
            y = attention.decode(index, self._qkv(layer, h), cos, sin, self._head_norms[index])
            y = self._output(layer, y.flatten(1))
            x, h = add_rms_norm(x, y, layer.post_norm, spec.rms_eps, spec.residual_multiplier)
            mark(index, 1)
            self.see(index, x)
            added = self._mlp(index, layer, h, mark)
            x, h = add_rms_norm(x, added, following[index], spec.rms_eps, spec.residual_multiplier)
            mark(index, 4)
        self.experts.settle(idle)
        out = head_logits(h if batch.chunked is None else h[batch.logit_rows], trunk.head)
        return out.float() / spec.logits_divisor if spec.logits_divisor != 1.0 else out

    def _qkv(self, layer: Layer, h: Tensor) -> Tensor:
        """Normed rows h [T, H] -> their projections [T, (Hq + 2 Hkv) D], or shares of them."""
        if layer.qkv_bias is None and not self._shapes:
            return few_rows(h, layer.qkv)
        return self._shaped(layer, project(h, layer.qkv, layer.qkv_bias))

    @staticmethod
    def _output(layer: Layer, y: Tensor) -> Tensor:
        """What attention gave [T, Hq D] -> its projection [T, H], or shares of it."""
        return few_rows(y, layer.o) if layer.o_bias is None else project(y, layer.o, layer.o_bias)

    @staticmethod
    def _choices(gate: Tensor, h: Tensor) -> Tensor:
        """gate [E, H], normed rows h [T, H] -> logits of the experts [T, E]."""
        return logits(h, gate)

    @property
    def _shapes(self) -> bool:
        """Whether the family does something to whole projections."""
        return self.spec.qk_norm == "full" or self.spec.clip_qkv is not None

    def _shaped(self, layer: Layer, qkv: Tensor) -> Tensor:
        """What families do to whole projections before heads exist."""
        spec = self.spec
        if not self._shapes:
            return qkv
        q, k, v = qkv.split_with_sizes([heads * spec.head_dim for heads in (spec.heads, spec.kv_heads, spec.kv_heads)], dim=-1)
        if spec.qk_norm == "full":
            q, k = (rms_norm(t, t.shape[-1:], w, spec.rms_eps) for t, w in ((q, layer.q_norm), (k, layer.k_norm)))
        qkv = torch.cat((q, k, v), dim=-1)
        return qkv if spec.clip_qkv is None else qkv.clamp_(-spec.clip_qkv, spec.clip_qkv)

    def _mlp(self, index: int, layer: Layer, h: Tensor, mark: Mark) -> Tensor | Unsummed:
        """Normed rows h [T, H] -> what the MLP adds [T, H], as the next norm takes it."""
        if layer.gate is None:
            assert layer.dense is not None
            mark(index, 2)
            mark(index, 3)
            return layer.dense(h)
        choices = self._choices(layer.gate, h)
        mark(index, 2)
        if layer.shared is None or layer.shared_gate is None:
            rows = self.experts.unsummed(index, h, choices)
            mark(index, 3)
            return rows
        out = self.experts.route(index, h, choices)
        mark(index, 3)
        return out + torch.sigmoid(linear(h, layer.shared_gate)) * layer.shared(h)


def _head_norms(layer: Layer, eps: float) -> HeadNorms:
    assert layer.q_norm is not None
    assert layer.k_norm is not None
    return HeadNorms(layer.q_norm, layer.k_norm, eps)
