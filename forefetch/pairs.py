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
    return Pairs(
        experts.tolist(),
        counts[experts].tolist(),
        torch.from_numpy(row[by_expert]).to(device),
        torch.from_numpy(place).to(device),
        weight.to(device),
        torch.from_numpy(per_row.cumsum() - per_row).to(device),
    )
