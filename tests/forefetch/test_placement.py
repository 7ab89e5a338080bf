from __future__ import annotations

import pytest

from forefetch.errors import ConfigError
from forefetch.placement import shard_of


@pytest.mark.parametrize(("experts", "shards"), [(8, 1), (8, 2), (8, 3), (128, 3), (5, 5), (1, 1), (60, 7)])
def test_every_expert_has_one_shard_and_sizes_differ_by_at_most_one(experts: int, shards: int) -> None:
    placement = shard_of(experts, shards)
    assert len(placement) == shards
    assert [expert for shard in placement for expert in shard] == list(range(experts))
    sizes = [len(shard) for shard in placement]
    assert max(sizes) - min(sizes) <= 1
    assert sizes == sorted(sizes, reverse=True)


@pytest.mark.parametrize(("experts", "shards"), [(8, 0), (8, -1), (8, 9)])
def test_impossible_placements_are_refused_by_name(experts: int, shards: int) -> None:
    with pytest.raises(ConfigError, match=f"--shards.*{shards}"):
        shard_of(experts, shards)
