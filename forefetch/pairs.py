"""(row, expert) pairs of a layer call, sorted on the host for `kernels/grouped_mlp`."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from forefetch.kernels.grouped_mlp import Pairs

Ints = npt.NDArray[np.int32]


def sort_pairs(row: Ints, expert: Ints, weight: Tensor, rows: int, device: torch.device) -> Pairs:
    """row, expert, weight [P] in any order, weight on the host. ValueError for negative numbers.

    Within an expert and within a row, pairs keep the order in which they came. In numpy, which takes a third of the time that
    torch does for arrays this small.
    """
    by_expert = expert.argsort(kind="stable")
    counts = np.bincount(expert)
    experts = counts.nonzero()[0]
    place = by_expert.argsort()  # the inverse
    per_row = np.bincount(row, minlength=rows)
    if (row[1:] < row[:-1]).any():
        by_row = row.argsort(kind="stable")
        place, weight = place[by_row], weight[torch.from_numpy(by_row)]
    # Not waiting is safe: these are not pinned, so they have been read when the copy is under way.
    arrays = row[by_expert], place, per_row.cumsum() - per_row
    by, at, first = (torch.from_numpy(array).to(device, non_blocking=True) for array in arrays)
    return Pairs(experts.tolist(), counts[experts].tolist(), by, at, weight.to(device, non_blocking=True), first)
