"""Many threads put, look up and get on one small service: every get gives the right bytes or a miss."""

from __future__ import annotations

import random
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

from forefetch.errors import Overloaded
from kv_service.client import KvClient
from kv_service.config import KvConfig

if TYPE_CHECKING:
    from kv_calls import Kv

THREADS, ROUNDS, LIMIT_S = 8, 60, 4.0  # a slow machine does fewer rounds
SIZE = 90_000  # 11 of them fill the budget; the threads' chains have up to 8 blocks, with common beginnings


def test_concurrent_use(start_kv: Callable[[KvConfig], Kv]) -> None:
    kv = start_kv(KvConfig(budget_mb=1, max_block_mb=1))
    limit = time.monotonic() + LIMIT_S

    def use(seed: int) -> Counter[str]:
        draw, client, seen = random.Random(seed), KvClient(kv.address), Counter[str]()
        for _ in range(ROUNDS):
            if time.monotonic() > limit and seen["whole"] and seen["blocks"]:
                break
            keys = kv.keys(*(draw.randrange(2) for _ in range(draw.randint(1, 8))))
            try:
                if draw.random() < 0.5:
                    stored, refused = client.put([(key, kv.block(key, SIZE)) for key in keys])
                    assert stored + refused == len(keys)
                    seen["put"] += 1
                held = client.look_up(keys)
                blocks = client.get(keys)
            except Overloaded:
                continue
            assert blocks == [kv.block(key, SIZE) for key in keys[: len(blocks)]]
            seen["whole"] += len(blocks) == held
            seen["blocks"] += len(blocks)
        assert client.broken_reads == 0
        client.close()
        return seen

    with ThreadPoolExecutor(THREADS) as pool:
        seen = sum(pool.map(use, range(THREADS)), Counter[str]())
    stats = kv.client.stats()
    assert min(seen.values()) > 0, seen
    assert stats.evicted > 0
    assert stats.conflicts == 0
    assert stats.bytes == stats.blocks * SIZE <= stats.budget_bytes
    assert kv.servicer.vault.store.room.memory == stats.bytes
