"""The training forward of a Qwen3-MoE: the architecture in one file, with sorted tokens and grouped products.

Letters: B sequences, S positions, T = B*S tokens, H hidden, N query heads, G key/value heads, D head dim, E experts,
K experts a token, I expert width, V vocabulary, L layers. Weights are kept in fp32 and used in `dtype`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn


@dataclass(frozen=True)
class ModelConfig:
    """Sizes. The defaults are the reference model: 30.5 million weights, 8.5 million of them used by one token."""

    vocabulary: int = 8192
    hidden: int = 256
    layers: int = 8
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 128
    experts: int = 64
    top_k: int = 8
    expert_width: int = 64
    context: int = 4096
    rope_theta: float = 10_000.0
    norm_eps: float = 1e-6


@dataclass
class Routing:
    """What the router did in one layer: tokens per expert [E], balance loss and z loss (scalars)."""

    counts: Tensor
    balance: Tensor
    z: Tensor


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Root-mean-square norm over the last dimension, computed in fp32."""
    wide = x.float()
    wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
    return weight.to(x.dtype) * wide.to(x.dtype)


def rope_tables(positions: Tensor, config: ModelConfig, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Cosines and sines [T, 1, D] for positions [T]."""
    powers = torch.arange(0, config.head_dim, 2, device=positions.device).float() / config.head_dim
    angles = positions.float()[:, None] / config.rope_theta**powers  # [T, D/2]
    angles = torch.cat([angles, angles], dim=-1)[:, None]
    return angles.cos().to(dtype), angles.sin().to(dtype)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary embedding of x [T, heads, D], halves rotated against each other."""
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat([-second, first], dim=-1) * sin


class _Gather(torch.autograd.Function):
    """Rows of x [T, H] in expert order [T*K, H]; the gradient is `_Combine`'s forward, so no atomic additions."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, token: Tensor, inverse: Tensor) -> Tensor:
        """token [T*K]: which row each slot reads; inverse [T*K]: where each (token, choice) went."""
        ctx.save_for_backward(inverse)
        ctx.rows = x.shape[0]
        return x[token]

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        """Sum over the K copies of each row."""
        (inverse,) = ctx.saved_tensors
        return grad[inverse].view(ctx.rows, -1, grad.shape[-1]).sum(1), None, None


class _Combine(torch.autograd.Function):
    """Sum of the K expert outputs of each token [T, H] from rows in expert order [T*K, H]."""

    @staticmethod
    def forward(ctx: Any, y: Tensor, token: Tensor, inverse: Tensor, rows: int) -> Tensor:
        """Arguments as in `_Gather`; rows is T."""
        ctx.save_for_backward(token)
        return y[inverse].view(rows, -1, y.shape[-1]).sum(1)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        """Every copy gets its token's gradient."""
        (token,) = ctx.saved_tensors
        return grad[token], None, None, None


class _Permute(torch.autograd.Function):
    """x [T*K] in another order, with a gather for its gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, order: Tensor, inverse: Tensor) -> Tensor:
        """Returns x[order]; inverse undoes order."""
        ctx.save_for_backward(inverse)
        return x[order]

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        """Back in the old order."""
        (inverse,) = ctx.saved_tensors
        return grad[inverse], None, None


def grouped_linear(x: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
    """x [T*K, in] times weight [E, out, in] by groups of rows; ends [E] int32 closes each expert's rows."""
    if x.is_cuda:
        return torch._grouped_mm(x, weight.transpose(-2, -1), offs=ends)
    sizes = torch.diff(ends, prepend=ends.new_zeros(1)).tolist()
    return torch.cat([F.linear(rows, w) for rows, w in zip(torch.split(x, sizes), weight, strict=True)])


class Layer(nn.Module):
    """One decoder layer: attention with query/key norms, then the sparse experts."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = c = config
        out_std = 0.02 / (2 * c.layers) ** 0.5

        def matrix(*shape: int, std: float = 0.02) -> nn.Parameter:
            return nn.Parameter(torch.randn(*shape) * std)

        self.norm1, self.norm2 = nn.Parameter(torch.ones(c.hidden)), nn.Parameter(torch.ones(c.hidden))
        self.q_norm, self.k_norm = nn.Parameter(torch.ones(c.head_dim)), nn.Parameter(torch.ones(c.head_dim))
        self.q = matrix(c.heads * c.head_dim, c.hidden)
        self.k = matrix(c.kv_heads * c.head_dim, c.hidden)
        self.v = matrix(c.kv_heads * c.head_dim, c.hidden)
        self.o = matrix(c.hidden, c.heads * c.head_dim, std=out_std)
        self.router = matrix(c.experts, c.hidden)
        self.gate_up = matrix(c.experts, 2 * c.expert_width, c.hidden)
        self.down = matrix(c.experts, c.hidden, c.expert_width, std=out_std)

    def project(self, x: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """x [T, H] to queries [T, N, D], keys and values [T, G, D]."""
        c, h = self.config, rms_norm(x, self.norm1, self.config.norm_eps)
        q = F.linear(h, self.q.to(x.dtype)).view(-1, c.heads, c.head_dim)
        k = F.linear(h, self.k.to(x.dtype)).view(-1, c.kv_heads, c.head_dim)
        v = F.linear(h, self.v.to(x.dtype)).view(-1, c.kv_heads, c.head_dim)
        q, k = rms_norm(q, self.q_norm, c.norm_eps), rms_norm(k, self.k_norm, c.norm_eps)
        return rotate(q, cos, sin), rotate(k, cos, sin), v

    def finish(self, x: Tensor, mixed: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Residual x [T, H] and attention output [T, N*D] to the layer's output [T, H], counts, balance and z."""
        x = x + F.linear(mixed, self.o.to(x.dtype))
        h = rms_norm(x, self.norm2, self.config.norm_eps)
        out, counts, balance, z = self.experts(h)
        return x + out, counts, balance, z

    def experts(self, h: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Normed tokens h [T, H] to the weighted sum of their K experts [T, H], and the router's statistics."""
        c, rows = self.config, h.shape[0]
        logits = F.linear(h, self.router.to(h.dtype)).float()  # [T, E]
        scores = logits.softmax(-1)
        weights, chosen = scores.topk(c.top_k, dim=-1)  # [T, K]
        weights = weights / weights.sum(-1, keepdim=True)
        counts = (chosen[..., None] == torch.arange(c.experts, device=h.device)).sum((0, 1))  # [E]
        order = chosen.flatten().to(torch.uint8).sort(stable=True).indices  # [T*K], expert order
        inverse = torch.empty_like(order).scatter_(0, order, torch.arange(order.numel(), device=h.device))
        gather, combine, permute = cast(Any, _Gather.apply), cast(Any, _Combine.apply), cast(Any, _Permute.apply)
        token, ends = order // c.top_k, counts.cumsum(0).to(torch.int32)
        gate_up = grouped_linear(gather(h, token, inverse), self.gate_up.to(h.dtype), ends)  # [T*K, 2I]
        gate, up = gate_up.chunk(2, dim=-1)
        # The router's weight enters before the down product: I numbers a row instead of H, and the same sum.
        share = permute(weights.flatten(), order, inverse)[:, None]
        inner = (F.silu(gate.float()) * up.float() * share).to(h.dtype)  # [T*K, I]
        out = combine(grouped_linear(inner, self.down.to(h.dtype), ends), token, inverse, rows)
        balance = c.experts * (counts / (rows * c.top_k) * scores.mean(0)).sum()
        return out, counts, balance, logits.logsumexp(-1).square().mean()


class Model(nn.Module):
    """The decoder. `compiled` fuses the parts of a layer that do not depend on the sequence length."""

    def __init__(self, config: ModelConfig, dtype: torch.dtype = torch.float32, compiled: bool = False) -> None:
        super().__init__()
        self.config, self.dtype = config, dtype
        self.embedding = nn.Parameter(torch.randn(config.vocabulary, config.hidden) * 0.02)
        self.layers = nn.ModuleList([Layer(config) for _ in range(config.layers)])
        self.norm = nn.Parameter(torch.ones(config.hidden))
        wrap: Any = (lambda f: torch.compile(f, dynamic=False)) if compiled else (lambda f: f)
        self._project, self._finish, self._loss = wrap(Layer.project), wrap(Layer.finish), wrap(next_token_loss)

    def blocks(self) -> list[Layer]:
        """The layers, typed."""
        return [cast(Layer, layer) for layer in self.layers]

    def trunk(self, ids: Tensor) -> tuple[Tensor, list[Routing]]:
        """Token ids [B, S] to normed hidden states [T, H] and each layer's routing."""
        batch, length = ids.shape
        positions = torch.arange(length, device=ids.device).repeat(batch)
        cos, sin = rope_tables(positions, self.config, self.dtype)
        x = F.embedding(ids.flatten(), self.embedding).to(self.dtype)
        routing = []
        for layer in self.blocks():
            q, k, v = self._project(layer, x, cos, sin)
            mixed = attention(q, k, v, batch)
            x, counts, balance, z = self._finish(layer, x, mixed)
            routing.append(Routing(counts, balance, z))
        return rms_norm(x, self.norm, self.config.norm_eps), routing

    def logits(self, ids: Tensor) -> Tensor:
        """Token ids [B, S] to logits [B, S, V]."""
        hidden, _ = self.trunk(ids)
        return F.linear(hidden, self.embedding.to(hidden.dtype)).view(*ids.shape, -1)

    def forward(self, ids: Tensor) -> tuple[Tensor, list[Routing]]:
        """Windows [B, S+1] to the mean next-token loss and the routing."""
        hidden, routing = self.trunk(ids[:, :-1])
        return self._loss(hidden, self.embedding, ids[:, 1:].flatten()), routing


def attention(q: Tensor, k: Tensor, v: Tensor, batch: int) -> Tensor:
    """Causal attention within each sequence: q [T, N, D], k and v [T, G, D] to [T, N*D]."""
    q, k, v = (t.view(batch, -1, *t.shape[1:]).transpose(1, 2) for t in (q, k, v))  # [B, heads, S, D]
    mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
    return mixed.transpose(1, 2).reshape(-1, q.shape[1] * q.shape[-1])


def next_token_loss(hidden: Tensor, embedding: Tensor, targets: Tensor) -> Tensor:
    """Mean cross-entropy of hidden [T, H] against targets [T]; the head is the embedding."""
    logits = F.linear(hidden, embedding.to(hidden.dtype)).float()
    return F.cross_entropy(logits, targets)
