"""The two forms of a link to a worker in another process: `shm` on this host, `grpc` anywhere."""

from __future__ import annotations

import threading
from collections.abc import Callable
from queue import SimpleQueue
from time import monotonic
from typing import Any, TypeVar, cast

import grpc

from expert_worker.core import WorkerInfo
from expert_worker.hinting import HintStream
from expert_worker.links import SingleLink
from forefetch import rpc, shm, wire
from forefetch.errors import LinkDown, Mismatch, Unavailable
from forefetch.frames import HEADROOM, FrameBuffer
from forefetch.hints import ExpertHint
from forefetch.v1 import expert_pb2, expert_pb2_grpc
from forefetch.wire import LayerCall, LayerReply

R = TypeVar("R")

FORWARD = "/forefetch.v1.ExpertService/Forward"
_WATCH_S = 0.05  # how late a missed deadline may be noticed on a gRPC link
_GONE = "the worker's process ended or its connection broke"


class WiredLink(SingleLink):
    """What links to another process share: the channel, and the stream that hints take."""

    def __init__(self, address: str, info: WorkerInfo, channel: grpc.Channel) -> None:
        super().__init__(address, info)
        self._channel = channel
        self._hints: HintStream | None = None

    def _open_hints(self) -> None:
        """Once the worker has admitted us."""
        self._hints = HintStream(self.address, self._channel)

    def hint(self, hint: ExpertHint) -> None:
        """Over a stream of its own."""
        if self._hints is not None:
            self._hints.send(hint)

    @property
    def hints_dropped(self) -> int:
        """Because the stream was down or did not keep up."""
        return self._hints.dropped if self._hints else 0

    def _close_channel(self) -> None:
        if self._hints is not None:
            self._hints.close()
        self._channel.close()


class GrpcLink(WiredLink):
    """One long-lived bidirectional stream, a message each way per call."""

    kind = "grpc"

    def __init__(self, address: str, info: WorkerInfo, channel: grpc.Channel, max_rows: int, timeout_s: float) -> None:
        """Mismatch when `max_rows` rows exceed gRPC's message limit, Unavailable when the worker does not admit us."""
        super().__init__(address, info, channel)
        request, reply = info.request_room(max_rows), info.reply_room(max_rows)
        if max(request, reply) + HEADROOM > rpc.MESSAGE_LIMIT:
            limit = f"gRPC carries {rpc.MESSAGE_LIMIT} at most; lower the router's --max-step-tokens"
            raise Mismatch(f"{max_rows} rows make frames of {request} bytes; {limit}")
        self._room, self._reply = request, FrameBuffer.allocate(reply)
        self._messages: SimpleQueue[bytes | None] = SimpleQueue()
        self._deadline = 0.0
        self._closed = threading.Event()
        stream: Any = channel.stream_stream(FORWARD)  # raw messages, see FrameBuffer.seal
        self._replies = stream(iter(self._messages.get, None))
        within(timeout_s, self._replies, self._replies.initial_metadata)
        if not self._replies.is_active():
            self.close()
            raise refusal(self._replies)
        self._open_hints()
        threading.Thread(target=self._watch, name=f"watch-{address}", daemon=True).start()

    @property
    def alive(self) -> bool:
        """The stream is open."""
        return not self._down and bool(self._replies.is_active())

    def _watch(self) -> None:
        """A sync stream's next() knows no deadline; this thread cancels the stream when one is missed."""
        while not self._closed.wait(_WATCH_S):
            if 0.0 < self._deadline < monotonic():
                self._replies.cancel()
                return

    def _send(self, call: LayerCall) -> None:
        self._messages.put(wire.request_message(self._room, call))

    def _receive(self, call: LayerCall, timeout_s: float) -> LayerReply:
        self._deadline = deadline = monotonic() + timeout_s
        try:
            message = next(self._replies)
        except StopIteration:
            raise LinkDown(-1, _GONE) from None
        except grpc.RpcError as error:
            late = f"no answer within {timeout_s:g} s"
            raise LinkDown(-1, late if monotonic() > deadline else str(rpc.error_of(error)) or _GONE) from None
        finally:
            self._deadline = 0.0
        return wire.decode_reply(self._reply, self._reply.unseal(message), call)

    def close(self) -> None:
        """Ends the stream and the connection."""
        self._closed.set()
        self._messages.put(None)
        self._replies.cancel()
        self._close_channel()


class ShmLink(WiredLink):
    """Frames in a shared-memory segment, bells beside them; a gRPC stream tells each side that the other lives."""

    kind = "shm"

    def __init__(
        self, address: str, info: WorkerInfo, channel: grpc.Channel, max_rows: int, timeout_s: float, spin: int
    ) -> None:
        """Mismatch when there is no shared memory left or the worker cannot reach it, Unavailable when it does not admit us."""
        super().__init__(address, info, channel)
        shm.reclaim()
        self._segment = segment = shm.Segment.create(
            HEADROOM + info.request_room(max_rows), HEADROOM + info.reply_room(max_rows)
        )
        self._request, self._reply = FrameBuffer(segment.request), FrameBuffer(segment.reply)
        self._spin, self._sequence = spin, 0
        hello = expert_pb2.OpenShmRequest(segment=segment.name, nonce=segment.nonce)
        self._alive = cast(Any, expert_pb2_grpc.ExpertServiceStub(channel).OpenShm(iter((hello,))))
        try:
            answer = within(timeout_s, self._alive, lambda: next(self._alive))
        except grpc.RpcError as error:
            raise refusal(error) from None
        except StopIteration:
            raise Unavailable(_GONE) from None
        finally:
            segment.unlink()
        if answer.instance_id != info.instance_id:
            self._alive.cancel()
            raise Unavailable("the worker was restarted meanwhile")
        self._alive.add_done_callback(self._ended)
        self._open_hints()

    def _ended(self, _: object) -> None:
        self._down = self._down or _GONE
        self._segment.reply_bell.nudge()

    def _send(self, call: LayerCall) -> None:
        wire.encode_request(self._request, call)
        self._sequence = self._sequence + 1 & 0xFFFFFFFF
        self._segment.request_bell.ring(self._sequence)

    def _receive(self, call: LayerCall, timeout_s: float) -> LayerReply:
        bell, before = self._segment.reply_bell, self._sequence - 1 & 0xFFFFFFFF
        deadline, spin = monotonic() + timeout_s, self._spin
        while not bell.wait(before, spin):
            if self._down:
                raise LinkDown(-1, self._down)
            if monotonic() > deadline:
                raise LinkDown(-1, f"no answer within {timeout_s:g} s")
            spin = 0
        return wire.decode_reply(self._reply, len(self._reply), call)

    def close(self) -> None:
        """Ends the control stream, which makes the worker drop the segment, and the connection."""
        self._down = self._down or "the link was closed"
        self._alive.cancel()
        self._close_channel()


def within(timeout_s: float, call: Any, wait: Callable[[], R]) -> R:
    """What `wait`, a blocking read of `call`, returns. A stream has no deadline for its start alone: a timer cancels it."""
    late = threading.Timer(timeout_s, call.cancel)
    late.start()
    try:
        return wait()
    finally:
        late.cancel()


def refusal(error: Any) -> Mismatch | Unavailable:
    """Why a stream did not come up, as `connect` says it."""
    if error.code() is grpc.StatusCode.CANCELLED:
        return Unavailable("the worker did not answer in time")
    meant = rpc.error_of(error)
    return meant if isinstance(meant, Mismatch | Unavailable) else Unavailable(str(meant))
