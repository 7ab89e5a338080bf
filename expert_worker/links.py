"""The three forms of a link to an expert worker: `local` in this process, `shm` on this host, `grpc` anywhere."""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections.abc import Callable
from queue import SimpleQueue
from time import monotonic, perf_counter_ns
from typing import Any, Literal, TypeVar, cast

import grpc
import torch

from expert_worker.core import Core, WorkerInfo
from expert_worker.hinting import HintStream
from forefetch import rpc, shm, wire
from forefetch.errors import ForefetchError, LinkDown, Mismatch, Unavailable
from forefetch.frames import HEADROOM, FrameBuffer
from forefetch.hints import ExpertHint
from forefetch.v1 import expert_pb2, expert_pb2_grpc
from forefetch.wire import LayerCall, LayerReply

R = TypeVar("R")

FORWARD = "/forefetch.v1.ExpertService/Forward"
_WATCH_S = 0.05  # how late a missed deadline may be noticed on a gRPC link
_GONE = "the worker's process ended or its connection broke"


class Link(ABC):
    """One worker as a router sees it. Not for concurrent use."""

    kind: Literal["local", "shm", "grpc"]

    def __init__(self, address: str, info: WorkerInfo) -> None:
        self.address, self.info = address, info

    @abstractmethod
    def submit(self, call: LayerCall) -> None:
        """Sends a call and does not wait for the worker (a local link computes here). x may lie on any device.

        Mismatch or BadRequest when x does not fit what was agreed on; nothing is outstanding then.
        """

    @abstractmethod
    def collect(self, timeout_s: float) -> LayerReply:
        """The reply to the submitted call; its rows are valid until the next submit.

        LinkDown when the worker died or did not answer in time: the link is of no more use then. Mismatch, BadRequest or
        another ForefetchError when the worker refused the call: the link can be used further.
        """

    @property
    @abstractmethod
    def alive(self) -> bool:
        """False once the other side is known to be gone, also between calls. True proves nothing."""

    @abstractmethod
    def hint(self, hint: ExpertHint) -> None:
        """Tells the worker what a later layer will probably need, at any time, from any thread. Never blocks, never raises; a
        hint that cannot be delivered is dropped and counted in `hints_dropped`."""

    @property
    @abstractmethod
    def hints_dropped(self) -> int:
        """Hints that never left."""

    @abstractmethod
    def close(self) -> None:
        """Gives up the link. A collect under way in another thread ends in LinkDown."""


class SingleLink(Link):
    """One way to a worker: one call at a time."""

    def __init__(self, address: str, info: WorkerInfo) -> None:
        super().__init__(address, info)
        self._call: LayerCall | None = None
        self._since_ns = 0
        self._down = ""  # why the link can no longer be used

    def submit(self, call: LayerCall) -> None:
        """As Link.submit; RuntimeError while a call is outstanding."""
        if self._call is not None:
            raise RuntimeError("the previous call has not been collected")
        info, form = self.info, call.form
        if form.hidden != info.hidden_size or form.dtype != info.dtype:
            agreed = f"{info.hidden_size} x {info.dtype}"
            raise Mismatch(f"rows are {tuple(call.x.shape)} {call.x.dtype}, the worker's {agreed}")
        self._since_ns = perf_counter_ns()
        self._send(call)
        self._call = call

    def collect(self, timeout_s: float) -> LayerReply:
        """As Link.collect; RuntimeError when no call is outstanding."""
        if self._call is None:
            raise RuntimeError("no call was submitted")
        call, self._call = self._call, None
        if self._down:
            raise LinkDown(-1, self._down)
        try:
            reply = self._receive(call, timeout_s)
        except LinkDown as error:
            self._down = str(error)
            raise
        reply.round_trip_ns = perf_counter_ns() - self._since_ns
        return reply

    @property
    def alive(self) -> bool:
        """See Link."""
        return not self._down

    @abstractmethod
    def _send(self, call: LayerCall) -> None:
        """Puts the call on its way."""

    @abstractmethod
    def _receive(self, call: LayerCall, timeout_s: float) -> LayerReply:
        """Waits for the answer to `call`."""


class LocalLink(SingleLink):
    """A worker in this process. It computes during submit; on a GPU that only launches."""

    kind = "local"

    def __init__(self, core: Core) -> None:
        super().__init__("local", core.info)
        self.core = core
        self._answer: LayerReply | ForefetchError | None = None

    def _send(self, call: LayerCall) -> None:
        out = torch.empty_like(call.x)
        try:
            queue_ns, copy_wait_ns, compute_ns, verified = self.core.forward(call, out)
            self._answer = LayerReply(out, queue_ns, copy_wait_ns, compute_ns, 0, verified)
        except ForefetchError as error:
            self._answer = error

    def _receive(self, call: LayerCall, timeout_s: float) -> LayerReply:
        answer, self._answer = self._answer, None
        assert answer is not None
        if isinstance(answer, ForefetchError):
            raise answer
        return answer

    def hint(self, hint: ExpertHint) -> None:
        """Straight to the worker."""
        self.core.hint(hint)

    @property
    def hints_dropped(self) -> int:
        """There is nothing between to drop any."""
        return 0

    def close(self) -> None:
        """Nothing to give up."""


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
        _within(timeout_s, self._replies, self._replies.initial_metadata)
        if not self._replies.is_active():
            self.close()
            raise _refusal(self._replies)
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
            answer = _within(timeout_s, self._alive, lambda: next(self._alive))
        except grpc.RpcError as error:
            raise _refusal(error) from None
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


def _within(timeout_s: float, call: Any, wait: Callable[[], R]) -> R:
    """What `wait`, a blocking read of `call`, returns. A stream has no deadline for its start alone: a timer cancels it."""
    late = threading.Timer(timeout_s, call.cancel)
    late.start()
    try:
        return wait()
    finally:
        late.cancel()


def _refusal(error: Any) -> Mismatch | Unavailable:
    """Why a stream did not come up, as `connect` says it."""
    if error.code() is grpc.StatusCode.CANCELLED:
        return Unavailable("the worker did not answer in time")
    meant = rpc.error_of(error)
    return meant if isinstance(meant, Mismatch | Unavailable) else Unavailable(str(meant))
