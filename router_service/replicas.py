"""The KV services that a router uses, and what is asked of all of them together.

Blocks are spread by `segments`, sessions by their id. A replica that is away costs its own share: look-ups end at its first
segment, sessions that it holds cannot be gone on with.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence

from forefetch import rpc
from forefetch.errors import ForefetchError, Unavailable
from kv_service.client import Key, KvClient, Metadata
from router_service.segments import cut, owner

_log = logging.getLogger(__name__)


class Replica:
    """One KV service. `up` is what its last heartbeat said; `client` is for calls that users wait for."""

    def __init__(self, address: str, tls: rpc.Tls | None) -> None:
        self.address, self.up = address, False
        self._tls = tls
        self.client = self.connect()

    def connect(self) -> KvClient:
        """A connection of its own, so that bulk transfers do not queue in front of others' calls."""
        return KvClient(self.address, self._tls)

    def is_up(self, up: bool, reason: str = "") -> None:
        """What a call found."""
        if up != self.up:
            _log.info("KV service %s is %s", self.address, "up" if up else f"away: {reason}")
        self.up = up


class Replicas:
    """All of them, in the order of `--kv`."""

    def __init__(self, addresses: Sequence[str], tls: rpc.Tls | None) -> None:
        self.addresses = tuple(addresses)
        self.all = [Replica(address, tls) for address in addresses]

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

    def look_up(self, keys: Sequence[Key], timeout_s: float, metadata: Metadata = ()) -> int:
        """How many of a chain of keys, from the first on, are held. Raises what a call raises before any hit."""
        held = 0
        for replica, run in self.runs(keys):
            try:
                if not replica.up:
                    raise Unavailable(f"KV service {replica.address} is away")
                found = replica.client.look_up(run, timeout_s, metadata)
            except ForefetchError:
                if not held:
                    raise
                break
            held += found
            if found < len(run):
                break
        return held
