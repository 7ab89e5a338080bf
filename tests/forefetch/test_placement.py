from __future__ import annotations

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from forefetch.errors import ConfigError
from forefetch.placement import burden, dump, parse, plan, shard_of


@pytest.mark.parametrize(
    ("experts", "shards", "sizes"), [(8, 1, [8]), (8, 3, [3, 3, 2]), (7, 7, [1] * 7), (128, 3, [43, 43, 42])]
)
def test_shards_cover_every_expert_once_in_order(experts: int, shards: int, sizes: list[int]) -> None:
    found = shard_of(experts, shards)
    assert [len(shard) for shard in found] == sizes
    assert [expert for shard in found for expert in shard] == list(range(experts))


@pytest.mark.parametrize(("experts", "shards"), [(8, 0), (8, -1), (8, 9)])
def test_shards_that_cannot_be_are_refused(experts: int, shards: int) -> None:
    with pytest.raises(ConfigError, match="--shards"):
        shard_of(experts, shards)


loads = st.lists(st.floats(0, 1e6), min_size=1, max_size=24)


@settings(max_examples=300)
@given(loads, st.integers(1, 6), st.integers(0, 4))
def test_a_plan_covers_everything_fits_and_repeats(load: list[float], workers: int, extra: int) -> None:
    places = -(-len(load) // workers) + extra
    if workers > len(load) or places > len(load):
        with pytest.raises(ConfigError):
            plan({3: load}, workers, extra)
        return
    shards = plan({3: load}, workers, extra)
    assert shards == plan({3: load}, workers, extra)
    assert all(len(shard[3]) <= places for shard in shards)
    assert all(list(shard[3]) == sorted(set(shard[3])) for shard in shards), "no worker holds an expert twice"
    assert {expert for shard in shards for expert in shard[3]} == set(range(len(load)))
    assert parse(dump(shards), (3,), len(load)) == shards
    if workers * places >= len(load):
        assert sum(len(shard[3]) for shard in shards) == workers * places, "all places are used"


def test_the_hottest_expert_is_the_one_with_replicas() -> None:
    shards = plan({0: [100.0, 1, 1, 1, 1, 1, 1, 1]}, 4, 1)
    assert sum(0 in shard[0] for shard in shards) == 4
    assert all(len(shard[0]) == 3 for shard in shards)


def test_a_plan_evens_out_a_skewed_load() -> None:
    load = {0: [1 / (1 + expert) for expert in range(64)], 1: [2.0] * 64}
    equal = [dict.fromkeys(load, shard) for shard in shard_of(64, 4)]
    assert burden(load, equal)[0] > 2.5
    packed = burden(load, plan(load, 4))
    assert packed[0] < 1.1
    assert burden(load, plan(load, 4, 2))[0] <= packed[0]
    assert packed[1] == pytest.approx(1.0)


def test_idle_layers_are_planned_too() -> None:
    assert burden({0: [0.0] * 4}, plan({0: [0.0] * 4}, 2)) == [1.0]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda c: c.pop("forefetch placement"), "not a placement file"),
        (lambda c: c.update({"forefetch placement": 2}), "version 2"),
        (lambda c: c.pop("workers"), "not a placement file"),
        (lambda c: c["workers"][0].update({"0": [0, 0]}), "layer 0"),
        (lambda c: c["workers"][0].update({"0": [0, 4]}), "layer 0"),
        (lambda c: c["workers"][0].update({"0": []}), "layer 0"),
        (lambda c: c["workers"][0].update({"0": ["x"]}), "not a placement file"),
        (lambda c: c["workers"][0].pop("0"), "layers"),
        (lambda c: c["workers"].pop(), "no worker holds expert"),
    ],
)
def test_a_wrong_file_is_named(change: object, message: str) -> None:
    content = json.loads(dump(plan({0: [1.0] * 4, 2: [1.0] * 4}, 2)))
    change(content)  # type: ignore[operator]
    with pytest.raises(ConfigError, match=message):
        parse(json.dumps(content), (0, 2), 4)


def test_what_is_no_json_is_named() -> None:
    with pytest.raises(ConfigError, match="not a placement file"):
        parse("{", (0,), 4)
