"""Expert choice in plain PyTorch: the truth for every gate rule that a ModelSpec can name."""

from __future__ import annotations

from typing import Literal

import torch


def choose(
    logits: torch.Tensor, top_k: int, rule: Literal["softmax_topk", "topk_softmax"], renormalise: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """logits [T, E] -> expert ids [T, K] int64 and weights [T, K] float32.

    "softmax_topk" takes the softmax over ALL experts first, so that weights sum to less than one unless `renormalise`
    divides them by their sum; "topk_softmax" takes the softmax over the chosen K. Ids of a row are always distinct, even
    if its logits are NaN, and no row depends on another.
    """
    logits = logits.float()
    if rule == "topk_softmax":
        chosen, ids = torch.topk(logits, top_k, dim=-1)
        return ids, torch.softmax(chosen, dim=-1)
    weights, ids = torch.topk(torch.softmax(logits, dim=-1), top_k, dim=-1)
    return ids, weights / weights.sum(dim=-1, keepdim=True) if renormalise else weights
