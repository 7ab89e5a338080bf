"""Weights of a trunk's layers, as they are kept and as they are read."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch.nn.functional import linear, silu

from forefetch.kernels.few_rows import Matrix, Rounded, projection, times
from forefetch.spec import ModelSpec
from forefetch.weights import Checkpoint

HEAD_ROWS = 16384
"""Rows of the head that are rounded at a time, in float32."""


@dataclass(frozen=True)
class Mlp:
    """A gated MLP: w13 [H, 2I] (gate columns, then up columns), w2 [I, H]."""

    w13: Matrix
    w2: Matrix

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """x [T, H] -> [T, H]."""
        gate, up = times(x, self.w13).chunk(2, dim=-1)
        return times(silu(gate) * up, self.w2)


@dataclass(frozen=True)
class Layer:
    """Weights of one layer. q, k and v are stacked: one product instead of three.

    Projections are kept as [in, out], the other way round than checkpoints store them: for the few rows of a decode step
    a CPU multiplies by that layout up to 1.8 times as fast (benchmarks/LOG.md), and a GPU does not mind. With --trunk int8
    they are kept in 8 bits; norms, biases and gates never are.
    """

    input_norm: torch.Tensor
    qkv: Matrix  # [H, (Hq + 2 Hkv) D]
    qkv_bias: torch.Tensor | None
    q_norm: torch.Tensor | None
    k_norm: torch.Tensor | None
    o: Matrix  # [Hq D, H]
    o_bias: torch.Tensor | None
    post_norm: torch.Tensor
    gate: torch.Tensor | None  # [E, H]; None in a dense layer
    dense: Mlp | None
    shared: Mlp | None
    shared_gate: torch.Tensor | None  # [1, H]


class Loader:
    """Reads trunk tensors by name; a routed expert's name is never asked for. `rounded`: projections are kept in 8 bits."""

    def __init__(
        self, spec: ModelSpec, checkpoint: Checkpoint, dtype: torch.dtype, device: torch.device, rounded: bool = False
    ) -> None:
        self.spec, self.checkpoint, self.dtype, self.device, self.rounded = spec, checkpoint, dtype, device, rounded

    def __call__(self, name: str) -> torch.Tensor:
        """A tensor in the compute type."""
        return self.checkpoint.read(name, dtype=self.dtype, device=self.device)

    def layer(self, index: int) -> Layer:
        """All of a layer but its routed experts."""
        spec, prefix = self.spec, self.spec.layer_prefix(index)
        attention_prefix, normed, moe = prefix + "self_attn.", spec.qk_norm != "none", spec.is_moe(index)
        qkv = [attention_prefix + f"{part}_proj." for part in "qkv"]
        shared = moe and spec.shared_width > 0
        return Layer(
            input_norm=self(prefix + "input_layernorm.weight"),
            qkv=self._projection(*(self(part + "weight") for part in qkv)),
            qkv_bias=torch.cat([self(part + "bias") for part in qkv]) if spec.qkv_bias else None,
            q_norm=self(attention_prefix + "q_norm.weight") if normed else None,
            k_norm=self(attention_prefix + "k_norm.weight") if normed else None,
            o=self._projection(self(attention_prefix + "o_proj.weight")),
            o_bias=self(attention_prefix + "o_proj.bias") if spec.o_bias else None,
            post_norm=self(prefix + "post_attention_layernorm.weight"),
            gate=self(prefix + spec.gate_name) if moe else None,
            dense=None if moe else self._mlp(prefix + "mlp."),
            shared=self._mlp(prefix + "mlp.shared_expert.") if shared else None,
            shared_gate=self(prefix + "mlp.shared_expert_gate.weight") if shared else None,
        )

    def head(self, embedding: torch.Tensor) -> torch.Tensor | Rounded:
        """[V, H], or 8 bits of it, [H, V]; the embedding [V, H] if it is tied to that."""
        head = embedding if self.spec.tied_embeddings else self("lm_head.weight")
        return projection(Rounded.of(*torch.split(head, HEAD_ROWS)), self.dtype) if self.rounded else head

    def _mlp(self, prefix: str) -> Mlp:
        w13 = self._turned(self(prefix + "gate_proj.weight"), self(prefix + "up_proj.weight"))
        return Mlp(w13, self._turned(self(prefix + "down_proj.weight")))

    def _projection(self, *weights: torch.Tensor) -> Matrix:
        """The same, for decode steps' kernels to read."""
        kept = self._turned(*weights)
        return projection(kept, self.dtype) if isinstance(kept, Rounded) else kept

    def _turned(self, *weights: torch.Tensor) -> Matrix:
        """[out, in] each, stacked over out -> one [in, out], contiguous."""
        return Rounded.of(*weights) if self.rounded else torch.cat(weights).t().contiguous()


def project(x: torch.Tensor, weight: Matrix, bias: torch.Tensor | None) -> torch.Tensor:
    """x [T, in], weight [in, out] -> [T, out]."""
    if bias is None:
        return times(x, weight)
    return torch.addmm(bias, x, weight) if isinstance(weight, torch.Tensor) else times(x, weight) + bias


def head_logits(x: torch.Tensor, head: torch.Tensor | Rounded) -> torch.Tensor:
    """Normed rows x [T, H] -> [T, V] of x's type."""
    return linear(x, head) if isinstance(head, torch.Tensor) else times(x, head)
