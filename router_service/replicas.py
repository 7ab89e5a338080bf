"""The KV services that a router uses, and what is asked of all of them together.

Blocks are spread by `segments`, sessions by their id. A replica that is away costs its own share: look-ups end at its first
segment, sessions that it holds cannot be gone on with.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from contextlib import suppress

from forefetch.errors import ForefetchError, Unavailable
from kv_service.client import Key, KvClient, Metadata
from router_service.segments import cut, owner, segment_of

_log = logging.getLogger(__name__)


class Replica:
    """One KV service. `up` is what its last heartbeat said; `client` is for calls that users wait for."""

    def __init__(self, address: str, connect: Callable[[str], KvClient]) -> None:
        self.address, self.up = address, False
        self._connect = connect
        self.client = self.connect()

    def connect(self) -> KvClient:
        """A connection of its own, so that bulk transfers do not queue in front of others' calls."""
        return self._connect(self.address)

    def locate(self, keys: Sequence[Key], timeout_s: float, metadata: Metadata = ()) -> tuple[int, int]:
        """See KvClient. Unavailable at once while its heartbeat fails."""
        if not self.up:
            raise Unavailable(f"KV service {self.address} is away")
        return self.client.locate(keys, timeout_s, metadata)

    def is_up(self, up: bool, reason: str = "") -> None:
        """What a call found."""
        if up != self.up:
            _log.info("KV service %s is %s", self.address, "up" if up else f"away: {reason}")
        self.up = up


class Replicas:
    """All of them, in the order of `--kv`."""

    def __init__(self, addresses: Sequence[str], connect: Callable[[str], KvClient] = KvClient) -> None:
        self.addresses = tuple(addresses)
        self.all = [Replica(address, connect) for address in addresses]

    def close(self) -> None:
        """Ends running calls."""
        for replica in self.all:
            replica.client.close()

    def of_session(self, session_id: str) -> Replica:
        """Who holds a session."""
        return self.all[owner(session_id.encode(), self.addresses)]

    def runs(self, keys: Sequence[Key]) -> list[tuple[Replica, list[Key]]]:
        """A chain of keys from the first block on -> who holds which run of it."""
        runs = cut(keys, len(self.all))
        return [(self.all[owner(run[0].digest, self.addresses)], run) for run in runs]

    def holder(self, keys: Sequence[Key], block: int) -> Replica:
        """Who holds a block of a chain, given its keys up to that block at least."""
        first = segment_of(block, len(self.all))[1]
        return self.all[owner(keys[first].digest, self.addresses)]

    def find_last(
        self, keys: Sequence[Key], name: Callable[[Key], Key], timeout_s: float, metadata: Metadata = ()
    ) -> tuple[int, Replica | None]:
        """(blocks of the chain up to the last one whose `name` is held where the block is, by whom); (0, None): none is."""
        end = len(keys)
        for replica, run in reversed(self.runs(keys)):
            with suppress(ForefetchError):
                if found := replica.client.find_last([name(key) for key in run], timeout_s, metadata):
                    return end - len(run) + found, replica
            end -= len(run)
        return 0, None

    def locate(self, keys: Sequence[Key], timeout_s: float, metadata: Metadata = ()) -> tuple[int, int]:
        """How many of a chain of keys, from the first on, are held, and how many of these are on disk. One call for each
        service that may hold some. Raises what a call raises when nothing can be said of the first block."""
        wanted: dict[Replica, list[int]] = {}  # positions in the chain, in the order in which services first come
        at = 0
        for replica, run in self.runs(keys):
            wanted.setdefault(replica, []).extend(range(at, at + len(run)))
            at += len(run)
        held, on_disk = len(keys), 0
        for replica, positions in wanted.items():
            try:
                found, slow = replica.locate([keys[position] for position in positions], timeout_s, metadata)
            except ForefetchError:
                if positions[0] == 0:
                    raise
                found = slow = 0
            on_disk += slow
            if found < len(positions):
                held = min(held, positions[found])
            if not held:
                break
        return held, min(held, on_disk)
