from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from router_service.quality import cells
from router_service.quality.cells import BLOCK, Cell


def draws(count: int, seed: int, together: int = 1) -> Tensor:
    """Numbers of mean 0.1 and deviation 1, `together` of which in a row are equal."""
    return torch.randn(count // together, generator=torch.Generator().manual_seed(seed)).repeat_interleave(together) + 0.1


def cell(nats: Tensor, plain: Tensor, apart: Tensor) -> Cell:
    made = Cell()
    for first in range(0, len(nats), 2000):  # windows, the last block of each shorter
        span = slice(first, first + 2000)
        made.add(nats[span], plain[span], nats[span] > 0, apart[span])
    return made


def test_sums_of_blocks_are_those_of_predictions() -> None:
    nats, plain, apart = (draws(2500, seed) for seed in range(3))
    one = cell(nats, plain, apart)
    assert one.count == 2500
    assert one.ppl == pytest.approx(math.exp(float(nats.double().mean())))
    assert one.ppl / one.ppl_fp16 - 1 == pytest.approx(one.change.value)
    assert one.divergence.value == pytest.approx(float(apart.double().mean()))
    assert one.agreement == pytest.approx(float((nats > 0).double().mean()))
    assert max(float(block[cells.COUNT]) for block in one.blocks) == BLOCK


def covered(together: int) -> int:
    """In how many of 50 draws the interval has the true mean."""
    zero = torch.zeros(4000)
    intervals = [cell(zero, zero, draws(4000, seed, together)).divergence for seed in range(50)]
    return sum(each.low <= 0.1 <= each.high for each in intervals)


def test_intervals_hold_where_neighbours_err_together(monkeypatch: pytest.MonkeyPatch) -> None:
    """47 of 50 are expected, somewhat fewer with 16 blocks. Single predictions, of which 50 err alike, make one a seventh
    as wide, which has the mean in one of five."""
    monkeypatch.setattr(cells, "DRAWS", 300)
    monkeypatch.setattr(cells, "BLOCK", 250)
    cells.drawn.cache_clear()
    assert covered(50) >= 42
    monkeypatch.setattr(cells, "BLOCK", 1)
    assert covered(50) < 25
    cells.drawn.cache_clear()


def test_what_is_hard_for_both_falls_out_of_their_difference() -> None:
    hard, plain = 3 + draws(4096, 1), draws(4096, 2)
    one, other = cell(plain + 0.9 * hard, plain, 0.9 * hard), cell(plain + hard, plain, hard)
    change, divergence = one.beside(other)
    assert divergence.value == pytest.approx(-0.1)
    assert divergence.high - divergence.low < 1e-6
    assert change.value == pytest.approx(one.ppl / other.ppl - 1)
    assert change.high - change.low < 0.2 * (one.change.high - one.change.low)
    assert change.low < change.value < change.high < 0


def test_of_one_block_there_is_no_interval() -> None:
    plain = draws(500, 1)
    value, low, high = cell(plain + 0.1, plain, plain).change
    assert value == pytest.approx(math.expm1(0.1), rel=1e-5)
    assert math.isnan(low)
    assert math.isnan(high)


def test_nothing_beside_nothing_is_no_difference() -> None:
    plain = draws(1500, 1)
    same = cell(plain, plain, torch.zeros(1500))
    assert same.beside(same) == ((0.0, 0.0, 0.0), (0.0, 0.0, 0.0))


def test_an_interval_is_written_in_per_cent() -> None:
    assert cells.Interval(0.0157, 0.01, 0.021).percent() == "+1.57 [+1.00, +2.10]"
    assert cells.Interval(0.0157, math.nan, math.nan).percent() == "+1.57"
    assert cells.Interval(0.00183, 0.0017, 0.002).percent(3, signed=False) == "0.183 [0.170, 0.200]"
