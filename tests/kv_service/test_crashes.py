"""Kills a service at random moments, more than a hundred times, while blocks and session records arrive.

Every block that is served after a restart is what was put under its key, every acknowledged session record is there, and what
was damaged on disk meanwhile is a miss. The seed is fixed; the moments within a write are the machine's.
"""

from __future__ import annotations

import hashlib
import random
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from forks import Forks, ForkServer
from waiting import until

from forefetch.errors import ForefetchError
from kv_service.client import Key, KvClient, SessionRecord, chain

KILLS, SEED = 110, 20261129
ROOT = bytes(32)
CHAINS, BLOCKS, SIZE = 6, 12, 60_000
SESSIONS = 3


def content(key: Key) -> bytes:
    """What the key's block must be; it has no run of bytes in common with another's."""
    return hashlib.shake_128(key.digest).digest(SIZE)


def token(session: int, position: int) -> int:
    return (session * 1_000_003 + position * 7919) % 50_000


class Callers:
    """Routers, as far as a KV service sees them: a thread puts blocks, another appends to sessions."""

    def __init__(self) -> None:
        self.chains = [chain(ROOT, [[first, block] for block in range(BLOCKS)]) for first in range(CHAINS)]
        self.epochs = [0] * SESSIONS
        self.acked = [0] * SESSIONS
        self.seen: Counter[str] = Counter()

    def run(self, client: KvClient, seed: int) -> list[threading.Thread]:
        threads = [threading.Thread(target=one, args=(client, random.Random(seed))) for one in (self.put, self.append)]
        for thread in threads:
            thread.start()
        return threads

    def put(self, client: KvClient, draw: random.Random) -> None:
        try:
            while True:
                keys = self.chains[draw.randrange(CHAINS)]
                first = draw.randrange(BLOCKS)
                batch = keys[first : first + draw.randint(1, 6)]
                stored, _ = client.put([(key, content(key)) for key in batch], timeout_s=30)
                self.seen["put"] += stored
        except ForefetchError:
            return

    def append(self, client: KvClient, draw: random.Random) -> None:
        try:
            while True:
                session = draw.randrange(SESSIONS)
                if draw.random() < 0.1 or not self.epochs[session]:
                    claimed = client.get_session(f"session {session}", claim=True)
                    assert claimed is not None
                    assert claimed.epoch > self.epochs[session]
                    self.epochs[session] = claimed.epoch
                position = self.acked[session]
                count = draw.randint(1, 20)
                tokens = [token(session, at) for at in range(position, position + count)]
                record = SessionRecord(position, tokens, state=b"%d" % (position + count), tail=bytes(draw.randint(0, 3000)))
                client.append_session(f"session {session}", self.epochs[session], record, timeout_s=30)
                self.acked[session] = position + count
                self.seen["appended"] += 1
        except ForefetchError:
            return

    def more(self, by: int) -> Callable[[], bool]:
        """Whether so many blocks more have been put, and so many records appended, than when this was asked for."""
        wanted = {name: self.seen[name] + by for name in ("put", "appended")}
        return lambda: all(self.seen[name] >= count for name, count in wanted.items())

    def check(self, client: KvClient) -> None:
        """After a restart."""
        for keys in self.chains:
            for first in (0, BLOCKS // 2):
                blocks = client.get(keys[first:])
                assert blocks == [content(key) for key in keys[first : first + len(blocks)]]
                self.seen["served"] += len(blocks)
        for session in range(SESSIONS):
            state = client.get_session(f"session {session}")
            held = len(state.token_ids) if state else 0
            assert held >= self.acked[session]
            if state:
                assert list(state.token_ids) == [token(session, at) for at in range(held)]
                assert state.state == (b"%d" % held if held else b"")
                assert state.epoch >= self.epochs[session]
                self.epochs[session] = 0  # claims anew: it is another router
                self.acked[session] = held
        stats = client.stats()
        for name in ("disk_reads", "corrupt", "damaged_at_start", "conflicts", "short_reads", "read_errors"):
            self.seen[name] += getattr(stats, name)
        self.seen["found"] += stats.disk_blocks


def damage(file: Path, draw: random.Random, keys: list[Key]) -> bool:
    """Flips a bit of a block that is on disk."""
    data = bytearray(file.read_bytes())
    start = content(draw.choice(keys))[:64]
    at = data.find(start)
    if at >= 0:
        data[at + draw.randrange(SIZE)] ^= 1 << draw.randrange(8)
        file.write_bytes(data)
    return at >= 0


@pytest.fixture
def service(tmp_path: Path) -> Iterator[Forks]:
    flags = [f"--dir={tmp_path}", "--budget-mb=2", "--max-block-mb=1", "--disk-gb=0.003", "--log-level=error"]
    server = ForkServer(["kv_service"])
    one = Forks(server, "kv_service", flags)
    yield one
    one.close()
    server.close()


def test_killed_at_random_points(service: Forks, tmp_path: Path) -> None:
    draw, callers, flipped = random.Random(SEED), Callers(), 0
    for round_ in range(KILLS):
        client = KvClient(service.start())
        callers.check(client)
        threads = callers.run(client, draw.getrandbits(32))
        if round_ % 2:  # when some have been acknowledged, else at any time
            until(callers.more(3))
        threading.Event().wait(draw.uniform(0.0, 0.12))
        service.kill()
        for thread in threads:
            thread.join(60)
            assert not thread.is_alive()
        client.close()
        if round_ % 6 == 5:
            flipped += damage(tmp_path / "blocks" / "data.mdb", draw, [key for keys in callers.chains for key in keys])
    client = KvClient(service.start())
    callers.check(client)
    client.close()
    service.kill()
    seen = callers.seen
    assert min(seen[name] for name in ("put", "appended", "served", "disk_reads", "found")) > KILLS, seen
    assert 0 < seen["corrupt"] <= flipped, (flipped, seen)
    assert (seen["conflicts"], seen["short_reads"], seen["read_errors"], seen["damaged_at_start"]) == (0, 0, 0, 0), seen
