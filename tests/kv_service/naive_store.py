"""The store's rules said once more, without any thought of speed: memory only."""

from __future__ import annotations

from dataclasses import dataclass, field

from kv_service.keys import Key
from kv_service.store_order import ATTENTION_TOKENS
from kv_service.store_room import HIGH, LOW


@dataclass(eq=False)
class Plain:
    """A block of the naive model."""

    tag: bytes
    key: Key
    size: int
    until: float
    sealed: bool = False
    leases: int = 0
    rank: float = 0.0
    seen: float = 0.0
    used: int = 0

    @property
    def worth(self) -> float:
        return len(self.key.token_ids) * (1 + self.key.position / ATTENTION_TOKENS) / self.size


@dataclass
class Naive:
    budget: int
    share: int
    blocks: list[Plain] = field(default_factory=list)
    clock: float = 0.0
    ticks: int = 0

    def find(self, tag: bytes, digest: bytes) -> Plain | None:
        return next((block for block in self.blocks if (block.tag, block.key.digest) == (tag, digest)), None)

    def used_by(self, tag: bytes | None) -> int:
        return sum(block.size for block in self.blocks if tag in (None, block.tag))

    def touch(self, block: Plain) -> None:
        self.ticks += 1
        block.used, block.seen = self.ticks, self.clock
        block.rank = max(block.rank, self.clock + block.worth)

    def remove(self, block: Plain) -> None:
        self.blocks.remove(block)
        before = self.find(block.tag, block.key.parent)
        if before is not None and before.sealed:
            before.used, before.seen = max(before.used, block.used), max(before.seen, block.seen)
            before.rank = max(before.rank, block.rank, block.seen + before.worth)

    def may_go(self, block: Plain, coming: tuple[bytes, bytes]) -> bool:
        parents = {(other.tag, other.key.parent) for other in self.blocks} | {coming}
        return block.sealed and not block.leases and (block.tag, block.key.digest) not in parents

    def make_room(self, tag: bytes, key: Key, size: int) -> bool:
        for whose, budget in ((tag, self.share), (None, self.budget)):
            if self.used_by(whose) + size > budget * HIGH:
                while self.used_by(whose) > budget * LOW - size:
                    candidates = [b for b in self.blocks if whose in (None, b.tag) and self.may_go(b, (tag, key.parent))]
                    if not candidates:
                        break
                    victim = min(candidates, key=lambda block: (block.rank, block.used))
                    self.clock = max(self.clock, victim.rank)
                    self.remove(victim)
            if self.used_by(whose) + size > budget:
                return False
        return True
