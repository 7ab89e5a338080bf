"""Sealed blocks that one KV service does not hold yet. Pure: no threads, no clock; the caller holds a lock.

A chain is a run of consecutive blocks of one request that this service is to hold. A block is queued (and its page pinned) as
long as there is room. One that finds no room stays in its chain and is queued later, in order, if the request lives that
long; else it is dropped and counted. The chains of live requests are gone through again when the service has lost everything.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from forefetch.telemetry.context import SpanContext
    from kv_service.client import Buffer, Key


BATCH_BYTES = 16 << 20
"""Most bytes sent in one call, unless a single block has more."""


@dataclass(slots=True, eq=False)
class Chain:
    """Consecutive sealed blocks of a request. Those from `queued` on are not queued yet."""

    blocks: list[Block] = field(default_factory=list)
    queued: int = 0
    live: bool = True
    absent: bool = False  # the service was found not to hold a block of it


@dataclass(slots=True, eq=False)
class Block:
    """A sealed block. `data` holds its bytes between copy and send."""

    chain: Chain
    key: Key
    page: int
    trace: SpanContext | None
    pinned: bool = False
    data: Buffer = b""


class Outbox:
    """At most `room` blocks are queued, being copied, copied or being sent at a time."""

    def __init__(self, room: int) -> None:
        self.unpinned: list[int] = []  # pages whose pin has served
        self.used = self.sent = self.dropped = self.restarts = 0
        self._room = room
        self._chains: dict[Hashable, Chain] = {}
        self._behind: dict[Hashable, Chain] = {}  # chains with blocks that found no room
        self._todo: deque[Block] = deque()  # pinned, to be copied
        self._ready: deque[Block] = deque()  # copied, to be sent
        self._copying = 0

    @property
    def waiting(self) -> int:
        """Blocks that are queued or will be when there is room."""
        return self.used + sum(len(chain.blocks) - chain.queued for chain in self._behind.values())

    @property
    def ready(self) -> bool:
        """Whether it is time to send: blocks that were sealed together are copied first, and go together."""
        if not self._ready:
            return False
        return not (self._copying or self.copyable) or sum(len(block.data) for block in self._ready) >= BATCH_BYTES

    @property
    def lendable(self) -> bool:
        """Whether `lend` would give a block."""
        return bool(self._todo)

    @property
    def copyable(self) -> bool:
        """Whether `take` would give a block."""
        return bool(self._todo) or (bool(self._behind) and self.used < self._room)

    def offer(self, name: Hashable, key: Key, page: int, trace: SpanContext | None) -> bool:
        """Takes note of a chain's next sealed block. True: it is queued, its page to stay pinned until `unpinned` has it."""
        chain = self._chains.setdefault(name, Chain())
        index, block = len(chain.blocks), Block(chain, key, page, trace)
        chain.blocks.append(block)
        if chain.queued < index or self.used >= self._room:
            self._behind[name] = chain
            return False
        self._todo.append(self._queued(block, pinned=True))
        return True

    def adopt(self, name: Hashable, key: Key, page: int) -> None:
        """A chain's next block came from the service: it is sent only if the service loses it while the request lives."""
        chain = self._chains.setdefault(name, Chain())
        chain.blocks.append(Block(chain, key, page, None))
        chain.queued += 1

    def forget(self, name: Hashable) -> None:
        """The request ended: what is queued goes on, the rest is dropped, and nothing is sent again."""
        chain = self._chains.pop(name, None)
        if chain is not None:
            chain.live = False
            self._behind.pop(name, None)
            self.dropped += len(chain.blocks) - chain.queued

    def take(self) -> Block:
        """The next block to copy: one whose page is pinned, else one that had found no room."""
        self._copying += 1
        if self._todo:
            return self._todo.popleft()
        name, chain = next(iter(self._behind.items()))
        # A copy: after a restart the original may still be on its way.
        block = self._queued(replace(chain.blocks[chain.queued], data=b""), pinned=False)
        if chain.queued == len(chain.blocks):
            del self._behind[name]
        return block

    def lend(self, most: int) -> list[Block]:
        """Blocks to be read where they lie, pinned: at most so many. They end in `finish` or `not_read`."""
        return [self._todo.popleft() for _ in range(min(most, len(self._todo)))]

    def not_read(self, blocks: Sequence[Block]) -> None:
        """To be copied after all."""
        self._todo.extendleft(reversed(blocks))

    def _queued(self, block: Block, pinned: bool) -> Block:
        block.pinned = pinned
        block.chain.queued += 1
        self.used += 1
        return block

    def copied(self, block: Block, data: Buffer) -> None:
        """The bytes of a taken block; b"" when its page could not be read.

        Without a pin the page is intact only if its request still lives: the engine forgets a request before it writes
        anything else to the request's pages.
        """
        self._copying -= 1
        intact = block.pinned or block.chain.live
        self._unpin(block)
        if data and intact:
            block.data = data
            self._ready.append(block)
        else:
            self.finish([block], stored=0)

    def _unpin(self, block: Block) -> None:
        if block.pinned:
            block.pinned = False
            self.unpinned.append(block.page)

    def batch(self) -> list[Block]:
        """The blocks to send next, at least one. They end in `finish` or `put_back`."""
        blocks = [self._ready.popleft()]
        size = len(blocks[0].data)
        while self._ready and size + len(self._ready[0].data) <= BATCH_BYTES:
            blocks.append(self._ready.popleft())
            size += len(blocks[-1].data)
        return blocks

    def put_back(self, blocks: Sequence[Block]) -> None:
        """To be sent again."""
        self._ready.extendleft(reversed(blocks))

    def finish(self, blocks: Sequence[Block], stored: int) -> None:
        """These blocks are done with; `stored` of them are held by the service now."""
        self.used -= len(blocks)
        self.sent += stored
        self.dropped += len(blocks) - stored
        for block in blocks:
            block.data = b""
            self._unpin(block)

    def restart(self) -> None:
        """The service lost everything: all blocks of live requests go again, in order."""
        self.restarts += 1
        self._todo, self._ready = (deque(self._without_live(queue)) for queue in (self._todo, self._ready))
        for chain in self._chains.values():
            chain.queued, chain.absent = 0, False
        self._behind = {name: chain for name, chain in self._chains.items() if chain.blocks}

    def _without_live(self, queue: deque[Block]) -> list[Block]:
        left = []
        for block in queue:
            if not block.chain.live:
                left.append(block)
                continue
            self._unpin(block)
            block.data = b""
            self.used -= 1
        return left


def runs(blocks: Sequence[Block]) -> list[list[Block]]:
    """Cut where a block is not the child of the one before."""
    cut: list[list[Block]] = []
    for block in blocks:
        if cut and block.key.parent == cut[-1][-1].key.digest:
            cut[-1].append(block)
        else:
            cut.append([block])
    return cut
