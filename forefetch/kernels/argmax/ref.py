"""The definition in plain PyTorch, and what a CPU runs."""

from __future__ import annotations

from torch import Tensor


def argmax(logits: Tensor, into: tuple[Tensor, Tensor] | None = None) -> Tensor:
    """See the package."""
    best, ids = logits.max(dim=-1)  # the first of equal maxima; NaN wins
    ids = ids.where(best.isfinite(), -1)
    if into is None:
        return ids
    into[0][: len(ids)] = ids.clamp_min(0)
    told = into[1][: len(ids)]
    return told.copy_(ids)
