"""Blocks out of the cache and back, byte for byte."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from forefetch.spec import ModelSpec
from router_service.cache import KvCache

PAGES, PAGE = 5, 4


@pytest.fixture(params=[torch.float32, torch.float16, torch.bfloat16], ids=str)
def cache(request: pytest.FixtureRequest, checkpoint: Callable[[str], Path]) -> KvCache:
    spec = ModelSpec.load(checkpoint("qwen3"))
    made = KvCache(spec, pages=PAGES, page_size=PAGE, dtype=request.param, device=torch.device("cpu"))
    for pool in (*made.k, *made.v):
        pool.copy_(torch.randn(pool.shape))
    return made


def test_a_block_written_to_another_page_is_the_same_and_nothing_else_changes(cache: KvCache) -> None:
    block = cache.read_block(1)
    others = {page: cache.read_block(page) for page in (0, 1, 2, 4)}
    assert len(block) == cache.block_bytes
    cache.write_block(3, block)
    assert cache.read_block(3) == block
    assert {page: cache.read_block(page) for page in others} == others
    for pool in (*cache.k, *cache.v):
        assert torch.equal(pool[:, 3], pool[:, 1])


@pytest.mark.parametrize("change", [-1, 1])
def test_a_block_of_another_length_is_refused_and_nothing_is_written(cache: KvCache, change: int) -> None:
    before = cache.read_block(3)
    with pytest.raises(ValueError, match=str(cache.block_bytes)):
        cache.write_block(3, bytes(cache.block_bytes + change))
    assert cache.read_block(3) == before
