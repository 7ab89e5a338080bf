"""Float16 rows behind blocks, on their way to the KV services in the background.

Formats with a window read their newest tokens as float16 rows, which no block holds. Who goes on behind a cached prefix needs
those behind its last block: without them a warm answer would not be the cold one. They are offered where requests are likely to
go on, and looked for by the name that `naming.rows_key` gives them. What finds no room is dropped: later requests compute more.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING

from forefetch.errors import ForefetchError
from forefetch.priority import give_way
from kv_service.client import CALL_S, Key
from router_service.naming import rows_key

if TYPE_CHECKING:
    from kv_service.client import KvClient
    from router_service.live import Snapshot
    from router_service.replicas import Replica

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class _Offer:
    replica: Replica
    key: Key
    snapshot: Snapshot

    @property
    def nbytes(self) -> int:
        return self.snapshot.rows.numel()


class Rows:
    """`budget_bytes`: most that wait, on the device, unless a single one has more. `sent` and `dropped` count since start."""

    def __init__(self, budget_bytes: int) -> None:
        self.sent = self.dropped = 0
        self._budget, self._used = budget_bytes, 0
        self._waiting: deque[_Offer] = deque()
        self._clients: dict[Replica, KvClient] = {}
        self._changed = threading.Condition()
        self._closing = False
        self._sender = threading.Thread(target=self._send_loop, name="kv-rows", daemon=True)
        self._sender.start()

    @property
    def waiting(self) -> int:
        """How many are on their way."""
        return len(self._waiting)

    def offer(self, replica: Replica, key: Key, snapshot: Snapshot) -> None:
        """Rows behind the block of `key`, for its holder. For the engine's thread; never waits."""
        offer = _Offer(replica, key, snapshot)
        with self._changed:
            if self._closing or (self._waiting and self._used + offer.nbytes > self._budget):
                self.dropped += 1
                return
            self._used += offer.nbytes
            self._waiting.append(offer)
            self._changed.notify_all()

    def close(self, timeout_s: float) -> None:
        """Sends what waits, for at most `timeout_s`, and ends the thread."""
        with self._changed:
            self._closing = True
            self._changed.notify_all()
        self._sender.join(timeout_s)
        for client in list(self._clients.values()):
            client.close()
        self._sender.join(timeout_s)

    def _send_loop(self) -> None:
        give_way()
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._closing or self._waiting)
                if not self._waiting:
                    return
                offer = self._waiting[0]
            sent = self._send(offer)
            with self._changed:
                self._waiting.popleft()
                self._used -= offer.nbytes
                self.sent += sent
                self.dropped += not sent

    def _send(self, offer: _Offer) -> bool:
        """Whether the service holds them now."""
        try:
            if not offer.replica.up:
                return False
            client = self._clients.get(offer.replica)
            if client is None:
                client = self._clients[offer.replica] = offer.replica.connect()
            name = rows_key(offer.key)
            return bool(client.look_up([name], CALL_S)) or client.put([(name, offer.snapshot.tail().encode())])[0] == 1
        except ForefetchError as error:
            _log.debug("rows could not be handed over: %s", error)
        except Exception:
            _log.exception("rows could not be handed over")
        return False
