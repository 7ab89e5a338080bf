"""Counting a step's pairs by layer and expert, in one launch behind all layers."""

from __future__ import annotations

from torch import Tensor


def tally(load: Tensor, chosen: Tensor, idle: Tensor) -> None:
    """load int64 [L, >= E] += how often chosen [L, T, K], int32 with rows of pairs contiguous, names each expert of a layer in
    rows that are not idle [T, 1]; ids < 0 count nothing."""
    if load.is_cuda:
        from forefetch.kernels.grouped_mlp import counting

        counting.tally(load, chosen, idle)
        return
    named = chosen.masked_fill(idle, -1).flatten(1).long()
    load.scatter_add_(1, named.clamp_min(0), (named >= 0).long())
