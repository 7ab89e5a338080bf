"""A router's end of a p2p lane to one worker. Opened beside a link that is up, over the same connection."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from typing import Any, cast

import grpc
import torch

from expert_worker.links import Link
from expert_worker.wired import WiredLink, refusal, within
from forefetch import shm
from forefetch.errors import Mismatch, Unavailable
from forefetch.p2p.host import HostPort
from forefetch.p2p.lane import LaneShape, Step
from forefetch.p2p.ring import RING_BYTES, Announcer
from forefetch.v1 import expert_pb2, expert_pb2_grpc

_GONE = "the worker's process ended or gave the lane up"


class Lane:
    """`port` is the lane's memory; steps are announced before they are launched. Used by the engine's thread, closed by any."""

    def __init__(self, link: WiredLink, port: Any, announcer: Announcer, stream: Any) -> None:
        self.link, self.port = link, port
        self.announce: Callable[[Step, int], None] = announcer.announce
        self.down = ""  # why the worker no longer follows
        self.on_down: Callable[[str], None] = lambda reason: None  # from gRPC's thread
        self._stream = stream
        stream.add_done_callback(self._ended)

    def _ended(self, _: object) -> None:
        reason = _GONE
        with contextlib.suppress(Exception):
            reason = self._stream.details() or _GONE
        self.down = self.down or reason
        self.on_down(self.down)

    def close(self) -> None:
        """The worker stops following. On a GPU nothing may use the port any more."""
        self.on_down = lambda reason: None
        self.down = self.down or "the lane was closed"
        self._stream.cancel()
        if not isinstance(self.port, HostPort):
            self.port.close()


def open_lane(
    link: Link,
    shape: LaneShape,
    steps: Sequence[Step],
    *,
    device: torch.device,
    patience_s: float,
    timeout_s: float,
) -> Lane:
    """A lane to the worker behind `link`, for rows of the link's type and any of `steps`.

    Raises Mismatch when the two cannot have one, Unavailable when the worker does not come to it in time.
    """
    if not isinstance(link, WiredLink) or link.info.lanes != ("cuda" if device.type == "cuda" else "host"):
        raise Mismatch(f"the worker at {link.address} can have no lane to a router on {device.type}")
    if link.info.shm_domain != shm.domain():
        raise Mismatch(f"the worker at {link.address} is on another node")
    ring = shm.Segment.create(RING_BYTES, 0)
    hello = expert_pb2.OpenLaneRequest(
        ring=ring.name,
        ring_nonce=ring.nonce,
        rows=shape.rows,
        top_k=shape.top_k,
        patience_ms=int(patience_s * 1e3),
        steps=[expert_pb2.StepShape(rows=step.rows, parts=step.parts) for step in steps],
    )
    try:
        opened = _host if device.type == "cpu" else _device
        port, stream = opened(link, hello, shape, device, timeout_s)
    finally:
        ring.unlink()
    return Lane(link, port, Announcer(ring), stream)


def _host(
    link: WiredLink, hello: expert_pb2.OpenLaneRequest, shape: LaneShape, device: torch.device, timeout_s: float
) -> tuple[HostPort, Any]:
    data = shm.Segment.create(shape.inbox_bytes, shape.outbox_bytes)
    hello.data, hello.data_nonce = data.name, data.nonce
    try:
        stream = _asked(link, hello, timeout_s)
    finally:
        data.unlink()
    return HostPort(data, shape, link.info.dtype), stream


def _device(
    link: WiredLink, hello: expert_pb2.OpenLaneRequest, shape: LaneShape, device: torch.device, timeout_s: float
) -> tuple[Any, Any]:
    """Each side makes the memory that it reads; the exchange happens while the worker answers."""
    from forefetch.p2p.device import DevicePort
    from forefetch.p2p.memory import Mapped, Meeting

    outbox, meeting = Mapped(shape.outbox_bytes, device), Meeting(timeout_s)
    hello.meeting = meeting.name
    inbox: Mapped | None = None
    try:
        stub = expert_pb2_grpc.ExpertServiceStub(link._channel)
        stream = cast(Any, stub.OpenLane(iter((hello,))))
        stream.add_done_callback(lambda _: meeting.close())  # a refusal ends the wait for the worker
        inbox = Mapped(shape.inbox_bytes, device, meeting.host(outbox.export()))
        _answered(link, stream, timeout_s)
        return DevicePort(inbox, outbox, shape, link.info.dtype), stream
    except BaseException as error:
        for area in filter(None, (inbox, outbox)):
            area.close()
        if isinstance(error, Unavailable) and not stream.is_active():
            raise refusal(stream) from None
        stream.cancel()
        raise
    finally:
        meeting.close()


def _asked(link: WiredLink, hello: expert_pb2.OpenLaneRequest, timeout_s: float) -> Any:
    stub = expert_pb2_grpc.ExpertServiceStub(link._channel)
    stream = cast(Any, stub.OpenLane(iter((hello,))))
    _answered(link, stream, timeout_s)
    return stream


def _answered(link: WiredLink, stream: Any, timeout_s: float) -> None:
    """Waits until the worker follows. Mismatch or Unavailable, as it says."""
    try:
        answer = within(timeout_s, stream, lambda: next(stream))
    except grpc.RpcError as error:
        raise refusal(error) from None
    except StopIteration:
        raise Unavailable(_GONE) from None
    if (answer.instance_id, answer.generation) != (link.info.instance_id, link.info.generation):
        stream.cancel()
        raise Unavailable("the worker holds something else now")
