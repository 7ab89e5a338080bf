"""The definition in plain PyTorch, and what a CPU runs."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import rms_norm

from forefetch.kernels.few_rows import shared


def add_rms_norm(x: Tensor, y: Tensor | None, weight: Tensor, eps: float, alpha: float) -> tuple[Tensor, Tensor]:
    """See the package."""
    if y is not None:
        y = shared(y, x.dtype)
        x = x + y if alpha == 1.0 else torch.add(x, y, alpha=alpha)
    return x, rms_norm(x, x.shape[-1:], weight, eps)
