"""Which worker holds which experts. Pure."""

from __future__ import annotations

from itertools import pairwise

from forefetch.errors import ConfigError


def shard_of(num_experts: int, shards: int) -> tuple[tuple[int, ...], ...]:
    """The experts of each shard: contiguous ranges in order whose sizes differ by at most one, larger ones first.

    `shards` need not divide `num_experts`. Raises ConfigError for less than one shard or more shards than experts.
    """
    if shards < 1:
        raise ConfigError(f"--shards: must be at least 1, got {shards}")
    if shards > num_experts:
        raise ConfigError(f"--shards: {shards} shards for {num_experts} experts would leave a worker without experts")
    size, larger = divmod(num_experts, shards)
    starts = [shard * size + min(shard, larger) for shard in range(shards + 1)]
    return tuple(tuple(range(start, end)) for start, end in pairwise(starts))
