"""A use of a block is a use of all before it, although it is written down at the last one only."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import zip_longest

from hypothesis import given, settings
from hypothesis import strategies as st
from store_calls import ME, flush, line, put

from kv_service.keys import Key
from kv_service.store import Store
from kv_service.store_order import ATTENTION_TOKENS
from kv_service.store_room import Limits


@dataclass(eq=False)
class Block:
    key: Key
    worth: float
    rank: float = 0.0
    used: int = 0


class Eager:
    """Writes every use down at every block of the chain."""

    def __init__(self) -> None:
        self.blocks: dict[bytes, Block] = {}
        self.clock, self.ticks = 0.0, 0

    def put(self, key: Key, size: int) -> None:
        if key.digest not in self.blocks:
            worth = len(key.token_ids) * (1 + key.position / ATTENTION_TOKENS) / size
            self.blocks[key.digest] = Block(key, worth)
        self.use(key.digest)

    def use(self, digest: bytes) -> None:
        self.ticks += 1
        rank, block = 0.0, self.blocks.get(digest)
        while block is not None:
            rank = max(rank, block.rank, self.clock + block.worth)
            block.rank, block.used = rank, self.ticks
            block = self.blocks.get(block.key.parent)

    def evict(self) -> None:
        parents = {block.key.parent for block in self.blocks.values()}
        leaves = [block for block in self.blocks.values() if block.key.digest not in parents]
        if leaves:
            victim = min(leaves, key=lambda block: (block.rank, block.used))
            self.clock = max(self.clock, victim.rank)
            del self.blocks[victim.key.digest]


CHAINS = [[first, second, third] for first in range(2) for second in range(2) for third in range(2)]
EVICT = ([], 0)
STEPS = st.lists(st.tuples(st.sampled_from(CHAINS), st.integers(0, 3)) | st.just(EVICT), max_size=20)


@given(st.lists(st.integers(1, 9), min_size=8, max_size=8), STEPS)
@settings(max_examples=100)
def test_blocks_go_in_the_order_that_every_use_at_every_block_gives(
    sizes: list[int], steps: list[tuple[list[int], int]]
) -> None:
    store, eager = Store(Limits(1 << 30, disk=1 << 30)), Eager()
    for chain, size in zip(CHAINS, sizes, strict=True):
        for key in line(*chain):
            put(store, key, size)
            eager.put(key, size)
    for chain, without in [*steps, *[EVICT] * 14]:
        flush(store)
        if not chain:
            store.room.shrink(1)
            eager.evict()
        keys = [key for index, key in enumerate(line(*chain)) if index != without]  # all, or a replica's share
        held = keys[: store.look_up(ME, [key.digest for key in keys])[0]]
        for key, after in zip_longest(held, held[1:]):
            if after is None or after.parent != key.digest:
                eager.use(key.digest)
        assert {entry.name for entry in store} == {ME + digest for digest in eager.blocks}
    assert not store.blocks
