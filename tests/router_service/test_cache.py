"""Blocks out of the cache and back, byte for byte."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from forefetch.lending import Name, borrow
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


def test_lent_pages_are_what_read_block_gives(checkpoint: Callable[[str], Path]) -> None:
    spec = ModelSpec.load(checkpoint("qwen3"))
    cache = KvCache(spec, pages=PAGES, page_size=PAGE, dtype=torch.float16, device=torch.device("cpu"), lend=True)
    assert cache.pool is not None
    memory = borrow(Name(*cache.pool.name))
    assert cache.pool.fits(len(memory))
    assert not any(memory)
    cache.pools.copy_(torch.randn(cache.pools.shape))
    for page in range(PAGES):
        assert b"".join(cache.pool.page_in(memory, page)) == cache.read_block(page)
        place = memoryview(bytearray(cache.block_bytes))
        assert cache.read_block(page, lambda size, place=place: place[:size]) == cache.read_block(page)  # type: ignore[misc]


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


@pytest.mark.parametrize(("start", "end"), [(4, 5), (4, 7), (3, 9), (0, 0)])
def test_a_tail_written_to_other_pages_is_the_same_and_nothing_else_changes(start: int, end: int, cache: KvCache) -> None:
    here, there = [1, 3, 4], [2, 0, 1]
    tail = cache.read_tail(here, 0, start, end)
    data = tail.numpy().tobytes()
    assert len(data) * PAGE == (end - start) * cache.block_bytes
    before = [pool.clone() for pool in (*cache.k, *cache.v)]
    cache.write_tail(there, 0, start, end, data)
    assert cache.read_tail(there, 0, start, end).numpy().tobytes() == data
    changed = {(there[position // PAGE], position % PAGE) for position in range(start, end)}
    for pool, old in zip((*cache.k, *cache.v), before, strict=True):
        for page in range(PAGES):
            for offset in range(PAGE):
                if (page, offset) not in changed:
                    assert torch.equal(pool[:, page, offset], old[:, page, offset])
    with pytest.raises(ValueError, match="bytes"):
        cache.write_tail(there, 0, start, end + 1, data)


def test_a_tail_begins_behind_the_last_full_page(cache: KvCache) -> None:
    assert [cache.tail_start(computed, 0) for computed in (0, 3, 4, 7, 8)] == [0, 0, 4, 4, 8]
