"""What predictions differ by, summed in blocks, and intervals from blocks drawn anew.

Errors of neighbouring predictions go together, for they read the same sealed pages in the same text; by single predictions an
interval would be half as wide as it should. So the sums of BLOCK predictions in a row are one draw (a block bootstrap; each
draw takes one block fewer than there are, which makes its variance unbiased), and setups that are compared are drawn alike:
what a hard passage does to both falls out of their difference. Fewer than ten blocks still make intervals too narrow, and of
one block there is none.

Two measures. **Perplexity** is what text shows, and whether a prediction becomes better or worse by an error hangs on which
token happened to come: two nearly lossless formats drown in that. **Divergence** (KL) is the mean of that difference over all
tokens that could have come, by float16's own prediction: it is what a cache changes, it is never below zero, and no error
betters it by luck.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

BLOCK = 1024
"""Predictions of a block. With twice as many intervals come out as wide, with 256 half as wide (benchmarks/LOG.md)."""
DRAWS = 2000
COUNT, NATS, NATS_FP16, AGREED, APART = range(COLUMNS := 5)


class Interval(NamedTuple):
    """A figure and where it lies in 95 of 100 draws of blocks; not a number where there is one block."""

    value: float
    low: float
    high: float

    def percent(self, digits: int = 2, *, signed: bool = True) -> str:
        """Like "+1.57 [+1.02, +2.11]"; the figure alone where it has no interval."""
        sign = "+" if signed else ""
        value, low, high = (f"{100 * part:{sign}.{digits}f}" for part in self)
        return value if math.isnan(self.low) else f"{value} [{low}, {high}]"


@dataclass
class Cell:
    """One setup at one context. `blocks`: sums of each block, [n, 5] float64: predictions, nats, nats under float16, likeliest
    tokens that are float16's, divergence."""

    blocks: list[Tensor] = field(default_factory=list)

    def add(self, nats: Tensor, plain: Tensor, agreed: Tensor, apart: Tensor | None = None) -> None:
        """Of consecutive predictions, [n] each: nats under the setup and under float16, whether the likeliest tokens are the
        same, and the divergence where it is asked for."""
        columns = (torch.ones_like(nats), nats, plain, agreed, torch.zeros_like(nats) if apart is None else apart)
        each = torch.stack([column.cpu().double() for column in columns], 1)
        self.blocks += [block.sum(0) for block in torch.split(each, BLOCK)]

    @property
    def sums(self) -> Tensor:
        """Of all blocks, [5]."""
        return torch.stack(self.blocks).sum(0)

    @property
    def count(self) -> int:
        """Predictions."""
        return int(self.sums[COUNT])

    @property
    def nats(self) -> float:
        """Of all predictions together."""
        return float(self.sums[NATS])

    @property
    def ppl(self) -> float:
        """Perplexity."""
        return math.exp(self.nats / self.count)

    @property
    def ppl_fp16(self) -> float:
        """Perplexity of the same predictions over float16 K and V."""
        return math.exp(float(self.sums[NATS_FP16]) / self.count)

    @property
    def change(self) -> Interval:
        """Perplexity relative to float16's, minus 1."""
        return self._interval(lambda sums: torch.expm1((sums[:, NATS] - sums[:, NATS_FP16]) / sums[:, COUNT]))

    @property
    def divergence(self) -> Interval:
        """Mean divergence (KL) of the predictions from float16's, in nats."""
        return self._interval(lambda sums: sums[:, APART] / sums[:, COUNT])

    @property
    def agreement(self) -> float:
        """Share of predictions whose likeliest token is float16's."""
        return float(self.sums[AGREED]) / self.count

    def beside(self, other: Cell) -> Beside:
        """This cell less `other`, which is of the same predictions."""
        both = torch.stack((torch.stack(self.blocks), torch.stack(other.blocks)), 1).flatten(1)  # [b, 10]
        return Beside(
            _interval(both, lambda sums: torch.expm1((sums[:, NATS] - sums[:, COLUMNS + NATS]) / sums[:, COUNT])),
            _interval(both, lambda sums: sums[:, APART] / sums[:, COLUMNS + APART] - 1),
        )

    def _interval(self, of: Callable[[Tensor], Tensor]) -> Interval:
        return _interval(torch.stack(self.blocks), of)


class Beside(NamedTuple):
    """Perplexity and divergence relative to another setup's, minus 1: below zero is better than that one."""

    change: Interval
    divergence: Interval


def _interval(blocks: Tensor, of: Callable[[Tensor], Tensor]) -> Interval:
    """`of` sums [n, columns] -> [n], for all blocks [b, columns] and for blocks drawn anew."""
    found = of(drawn(len(blocks)) @ blocks).nan_to_num(0.0)  # float16 beside float16 is 0 / 0
    ends = torch.tensor([0.025, 0.975], dtype=torch.float64)
    low, high = torch.quantile(found, ends).tolist() if len(blocks) > 1 else (math.nan, math.nan)
    return Interval(float(of(blocks.sum(0, keepdim=True)).nan_to_num(0.0)), low, high)


@lru_cache(maxsize=8)
def drawn(blocks: int) -> Tensor:
    """How often each draw has each block: [DRAWS, blocks] float64, always the same."""
    chosen = torch.randint(blocks, (DRAWS, max(1, blocks - 1)), generator=torch.Generator().manual_seed(0))
    once = torch.ones_like(chosen, dtype=torch.float64)
    return torch.zeros((DRAWS, blocks), dtype=torch.float64).scatter_add_(1, chosen, once)
