"""Sealed blocks on their way to the KV services: which block goes down which lane. For the engine's thread; never waits."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from forefetch.telemetry.context import SpanContext
from forefetch.v1 import router_pb2
from kv_service.client import TRANSFER_S, Key
from router_service.lane import Lane, ReadBlock
from router_service.replicas import Replicas
from router_service.segments import owner, segment_of

if TYPE_CHECKING:
    from forefetch.telemetry.spans import Exporter
    from kv_service.client import Pool


class Handover:
    """Requests are named by numbers; their blocks come in order, from the first on, loaded ones included."""

    def __init__(
        self,
        replicas: Replicas,
        *,
        block_bytes: int,
        budget_bytes: int,
        read_block: ReadBlock,
        exporter: Exporter | None = None,
        transfer_s: float = TRANSFER_S,
        shared_bytes: int = 0,
        most_block_bytes: int = 0,
        pool: Pool | None = None,
    ) -> None:
        """`budget_bytes`: most bytes that wait, over all services, in blocks of `block_bytes` each. `read_block`, `transfer_s`,
        `pool`: see Lane. `shared_bytes`: most memory shared with each service of this host, in blocks of at most
        `most_block_bytes`."""
        self._addresses = replicas.addresses
        room = max(1, budget_bytes // block_bytes // len(replicas.all))
        size = max(block_bytes, most_block_bytes)
        shared = min(room, shared_bytes // size), size
        self.lanes = [
            Lane(
                replica,
                room=room,
                read_block=read_block,
                exporter=exporter,
                transfer_s=transfer_s,
                shared=shared,
                pool=pool,
            )
            for replica in replicas.all
        ]
        self._segments: dict[int, list[Lane]] = {}  # of each request, who takes its segments

    def offer(self, request: int, block: int, key: Key, page: int, trace: SpanContext | None = None) -> bool:
        """A request's next sealed block, whose page the caller has pinned. False: take the pin off, now."""
        lane, segment = self._place(request, block, key)
        return lane.offer((request, segment), key, page, trace)

    def adopt(self, request: int, keys: Sequence[Key], pages: Sequence[int]) -> None:
        """The request's first blocks were loaded into `pages`; they are sent only if their service loses them."""
        for block, page in enumerate(pages):
            lane, segment = self._place(request, block, keys[block])
            lane.adopt((request, segment), keys[block], page)

    def _place(self, request: int, block: int, key: Key) -> tuple[Lane, int]:
        """Who takes a block, and in which segment."""
        segment, first = segment_of(block, len(self.lanes))
        lanes = self._segments.setdefault(request, [])
        if block == first:
            lanes.append(self.lanes[owner(key.digest, self._addresses)])
        return lanes[segment], segment

    def forget(self, request: int) -> None:
        """The request ended. To be called before anything else is written to its pages."""
        for segment, lane in enumerate(self._segments.pop(request, ())):
            lane.forget((request, segment))

    def unpinned(self) -> list[int]:
        """Pages whose pins are to be taken off, each reported once."""
        return [page for lane in self.lanes for page in lane.unpinned()]

    def status(self) -> list[router_pb2.KvReplica]:
        """Counters since start, of each service. Any thread."""
        return [lane.status() for lane in self.lanes]

    def close(self, timeout_s: float) -> None:
        """Sends what is queued, for at most `timeout_s`, and ends the threads."""
        for lane in self.lanes:
            lane.end()
        for lane in self.lanes:
            lane.close(timeout_s)
