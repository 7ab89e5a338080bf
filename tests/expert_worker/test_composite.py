"""A worker made of several shards answers as one that holds the same experts in one piece, whatever comes and goes."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from expert_worker.config import ExpertConfig
from expert_worker.core import Core
from expert_worker.loading import Loader
from expert_worker.placer import Placer
from forefetch.errors import BadRequest, Moved, StaleEpoch
from forefetch.hints import ExpertHint
from forefetch.wire import LayerCall

SHARDS = 4


@pytest.fixture(scope="module")
def config(checkpoint: Callable[[str], Path]) -> ExpertConfig:
    return ExpertConfig(model=str(checkpoint("qwen3")), device="cpu", placed=True, shards=SHARDS)


@pytest.fixture(scope="module")
def loader(config: ExpertConfig) -> Loader:
    return Loader(config)


@pytest.fixture(scope="module")
def whole(checkpoint: Callable[[str], Path]) -> Core:
    """All experts in one piece."""
    return Loader(ExpertConfig(model=str(checkpoint("qwen3")), device="cpu")).core()


def made_of(loader: Loader, *shards: int) -> Core:
    core = loader.core()
    made = loader.composite({shard: loader.shard(shard) for shard in shards})
    core.replace(core.info, made)
    return core


def call(core: Core, experts: list[int], rows: int = 5, layer: int = 1) -> LayerCall:
    """Every row to `experts`, with different weights."""
    random = torch.Generator().manual_seed(len(experts))
    x = torch.randn(rows, core.info.hidden_size, generator=random)
    row = torch.arange(rows).repeat_interleave(len(experts)).int()
    weight = torch.rand(len(row), generator=random)
    return LayerCall(0, layer, x, row, torch.tensor(experts * rows).int(), weight)


def answer(core: Core, asked: LayerCall) -> torch.Tensor:
    out = torch.full_like(asked.x, torch.nan)
    core.forward(asked, out)
    return out


def experts_of(whole: Core) -> int:
    return len(next(iter(whole.info.layers.values())))


def test_all_shards_together_are_the_whole(loader: Loader, whole: Core) -> None:
    core, count = made_of(loader, *range(SHARDS)), experts_of(whole)
    for experts in ([0, count - 1], [count - 1], list(range(count))):
        asked = call(core, experts)
        # The parts' sums are rounded in another order: some units in the last place of the largest partial sum.
        torch.testing.assert_close(answer(core, asked), answer(whole, asked), rtol=1e-5, atol=1e-5)


def test_one_shard_answers_to_the_bit(loader: Loader, whole: Core) -> None:
    core = made_of(loader, 1, 3)
    shard = list(loader.held(1)[1])
    assert torch.equal(answer(core, call(core, shard)), answer(whole, call(core, shard)))


def test_rows_without_a_pair_of_a_shard_get_nothing_from_it(loader: Loader, whole: Core) -> None:
    core = made_of(loader, 0, 3)
    last = experts_of(whole) - 1
    asked = LayerCall(
        0, 1, call(core, [0]).x, torch.tensor([0, 4]).int(), torch.tensor([0, last]).int(), torch.tensor([1.0, 2.0])
    )
    out = answer(core, asked)
    assert torch.equal(out[1:4], torch.zeros_like(out[1:4]))
    torch.testing.assert_close(out, answer(whole, asked), rtol=1e-5, atol=1e-5)


def test_an_expert_that_is_elsewhere_is_told_apart_from_nonsense(loader: Loader) -> None:
    core = made_of(loader, 0)
    elsewhere = loader.held(2)[1][0]
    with pytest.raises(Moved, match="not held by this worker any more"):
        answer(core, call(core, [0, elsewhere]))
    for nonsense in (10_000, -1):
        with pytest.raises(BadRequest):
            answer(core, call(core, [nonsense]))
    with pytest.raises(BadRequest):
        answer(core, call(core, [0], layer=99))


def test_load_is_counted_where_describe_says(loader: Loader) -> None:
    core = made_of(loader, 3, 1)
    shard = loader.held(3)[1]
    answer(core, call(core, [shard[0]], rows=7))
    held = core.experts.held  # type: ignore[attr-defined]
    load = np.asarray(core.experts.load)
    assert load.shape == (len(held), len(held[1]))
    assert held[1] == (*loader.held(1)[1], *shard)
    assert load[list(held).index(1), held[1].index(shard[0])] == 7
    assert load.sum() == 7


def test_hints_reach_the_shard_that_holds_the_expert(checkpoint: Callable[[str], Path]) -> None:
    loader = Loader(ExpertConfig(model=str(checkpoint("qwen3")), device="cpu", placed=True, shards=2, slots="60%"))
    core = made_of(loader, 0, 1)
    experts = np.array([loader.held(0)[1][0], loader.held(1)[1][-1], 10_000], dtype=np.int32)
    hint = ExpertHint(0, 0, 1, 0, experts, np.full(3, 0.9, dtype=np.float32), 10**9)
    assert core.experts.hint(hint, "r") in (True, False), "it is taken in or dropped, and nothing breaks"
    until(lambda: set(experts[:2].tolist()) <= set(core.experts.resident(1)))


def until(condition: Callable[[], bool], timeout: float = 30.0) -> None:
    end = time.monotonic() + timeout
    while not condition():
        assert time.monotonic() < end, "did not happen in time"
        time.sleep(0.01)


def test_a_placed_worker_follows_commands(loader: Loader, whole: Core) -> None:
    core = loader.core()
    assert (core.info.layers, core.info.capacity, core.info.generation) == ({}, SHARDS, 0)
    placer = Placer(core, loader)
    placer.command(3, "a", [1, 2])
    until(lambda: core.info.held_shards == (1, 2))
    generation = core.info.generation
    assert core.info.layers[1] == (*loader.held(1)[1], *loader.held(2)[1])
    assert placer.command(3, "a", [1, 2]) == (1, 2), "the same command again changes nothing"
    with pytest.raises(StaleEpoch):
        placer.command(2, "b", [0])
    placer.command(4, "b", [2, 0])
    until(lambda: core.info.held_shards == (0, 2))
    assert core.info.generation > generation
    shard = list(loader.held(2)[1])
    assert torch.equal(answer(core, call(core, shard)), answer(whole, call(core, shard)))
    placer.command(4, "b", [])
    until(lambda: core.info.layers == {})
    placer.close()


def test_commands_that_cannot_be_followed_are_refused(checkpoint: Callable[[str], Path]) -> None:
    loader = Loader(ExpertConfig(model=str(checkpoint("qwen3")), device="cpu", placed=True, shards=SHARDS, max_shards=2))
    placer = Placer(loader.core(), loader)
    with pytest.raises(BadRequest, match="2 at most"):
        placer.command(1, "a", [0, 1, 2])
    with pytest.raises(BadRequest, match="shard 4 of 4"):
        placer.command(1, "a", [4])
    placer.close()
