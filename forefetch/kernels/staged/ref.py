"""The definition in numpy, and what a CPU runs: of so few numbers PyTorch's calls cost more than the copies."""

from __future__ import annotations

from torch import Tensor


def bring(staged: Tensor, chosen: Tensor, rows: Tensor, placed: Tensor, count: int) -> None:
    """See the package."""
    lines, there = staged.numpy(), rows.numpy()
    decodes, source = min(count, placed.shape[1]), lines[4, :count]
    there[:, :count] = lines[:4, :count]
    owed = source >= 0
    if owed.any():
        there[0, :count][owed] = chosen.numpy()[source[owed]]
    placed.numpy()[:, :decodes] = lines[5:, :decodes]
