"""The definition in plain PyTorch, and what a CPU runs."""

from __future__ import annotations

from torch import Tensor


def bring(staged: Tensor, chosen: Tensor, rows: Tensor, placed: Tensor, count: int) -> None:
    """See the package."""
    decodes, source = min(count, placed.shape[1]), staged[4, :count]
    rows[:, :count] = staged[:4, :count]
    owed = source >= 0
    if owed.any():
        rows[0, :count][owed] = chosen[source[owed]]
    placed[:, :decodes] = staged[5:, :decodes]
