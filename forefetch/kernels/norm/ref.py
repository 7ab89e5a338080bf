"""The definition in plain PyTorch, and what a CPU runs."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import rms_norm

from forefetch.kernels.few_rows import shared
from forefetch.kernels.grouped_mlp.unsummed import Unsummed


def add_rms_norm(x: Tensor, y: Tensor | Unsummed | None, weight: Tensor, eps: float, alpha: float) -> tuple[Tensor, Tensor]:
    """See the package."""
    if y is not None:
        y = _summed(y, len(x)).to(x.dtype) if isinstance(y, Unsummed) else shared(y, x.dtype)
        x = x + y if alpha == 1.0 else torch.add(x, y, alpha=alpha)
    return x, rms_norm(x, x.shape[-1:], weight, eps)


def _summed(y: Unsummed, tokens: int) -> Tensor:
    """The tokens' weighted sums [T, H], float32, and the counters at zero."""
    for counter in y.counters:
        counter.zero_()
    live = (y.live != 0)[:, None]
    return torch.where(live, y.weights[:, None] * y.rows, 0.0).view(tokens, -1, y.rows.shape[1]).sum(1)
