"""A caller's end of memory that it shares with a KV service of its host: slots for blocks, and frames that announce them.

The caller makes the segment, so it counts as the caller's memory. A slot is taken as long as anybody refers to its bytes. A
service that does not answer in time has the segment taken from it, because it may still read there: a new one must be opened.
"""

from __future__ import annotations

import ctypes
import threading
import weakref
from collections.abc import Iterator, Sequence
from time import monotonic
from typing import TYPE_CHECKING, Any

import grpc

from forefetch import rpc, shm
from forefetch.errors import DeadlineExceeded, Mismatch, Unavailable
from forefetch.v1 import kv_pb2 as pb
from kv_service.block_messages import Buffer, wire_key
from kv_service.parts import checksum_of, cut
from kv_service.shared_frames import FRAME, MOST, REPLY_BYTES, Pool, area_bytes, give_up, read_reply, slot_stride, write_frame

if TYPE_CHECKING:
    from collections.abc import Callable

    from kv_service.keys import Key

    Placed = Sequence[tuple[Key, dict[str, Any]]]  # blocks, and the fields of SharedBlock that say where they lie

HEADROOM = 256
"""What a block in a frame takes beside its token ids, bytes at most."""

TOKEN_BYTES = 5
"""Most bytes of a token id in a message."""


class Slots:
    """Equal places in memory. Thread-safe: a place comes back when the last view of it is gone, on whichever thread."""

    def __init__(self, memory: memoryview, count: int, size: int) -> None:
        self._memory, self.size, self._stride = memory, size, slot_stride(size)
        self._base = ctypes.addressof(ctypes.c_char.from_buffer(memory))
        self._free = list(range(count))
        self._taken: dict[int, weakref.ref[Any]] = {}

    def take(self, size: int) -> memoryview | None:
        """A place for so many bytes; None: there is none."""
        if not 0 < size <= self.size:
            return None
        try:
            slot = self._free.pop()
        except IndexError:
            return None
        place = (ctypes.c_ubyte * size).from_buffer(self._memory, slot * self._stride)

        def back(_: object) -> None:
            del self._taken[slot]
            self._free.append(slot)

        self._taken[slot] = weakref.ref(place, back)
        return memoryview(place).cast("B")

    def offset(self, data: Buffer) -> int | None:
        """Where bytes lie, if here."""
        if isinstance(data, bytes) or data.readonly:
            return None
        offset = ctypes.addressof(ctypes.c_char.from_buffer(data)) - self._base
        return offset if 0 <= offset < len(self._memory) else None


class Sharing:
    """A segment that a KV service has mapped. Thread-safe."""

    def __init__(
        self,
        open_shm: Callable[..., Any],
        slots: int,
        slot_bytes: int,
        origin: pb.BlockOrigin | None = None,
        pool: Pool | None = None,
    ) -> None:
        """Makes the segment; `open` offers it. `open_shm`: the stub's method, with the caller's metadata. `pool`: where blocks
        lie that need not be copied. Mismatch: there is no shared memory left."""
        if reason := shm.unsupported():
            raise Mismatch(reason)
        shm.reclaim()
        self._segment = shm.Segment.create(area_bytes(slots, slot_bytes), REPLY_BYTES)
        self._slots = Slots(self._segment.request[FRAME:], slots, slot_bytes)
        self._lock, self._number, self._down = threading.Lock(), 0, "it is not open yet"
        hello = pb.KvServiceOpenShmRequest(segment=self._segment.name, nonce=self._segment.nonce, origin=origin)
        self._pool, self._lends = pool, False
        if pool is not None:
            hello.pool.CopyFrom(pool.to_wire())
        self._stream: Any = open_shm(iter((hello,)))

    def open(self, timeout_s: float) -> None:
        """Returns when the service has mapped the segment. Raises what it says, or Unavailable."""
        late = threading.Timer(timeout_s, self._stream.cancel)  # a stream has no deadline for its start alone
        late.start()
        try:
            self._lends = next(self._stream).pool
        except StopIteration:
            raise Unavailable("the KV service ended the stream") from None
        except grpc.RpcError as error:
            raise rpc.error_of(error) from None
        finally:
            late.cancel()
            self._segment.unlink()
        self._down = ""
        self._stream.add_done_callback(self._ended)

    def _ended(self, _: object) -> None:
        give_up(self._segment.request)  # before anybody learns of it
        self._down = self._down or "the KV service ended it"
        self._segment.reply_bell.nudge()

    @property
    def alive(self) -> bool:
        """Whether the service still has the segment."""
        return not self._down

    @property
    def lends(self) -> bool:
        """Whether the service reads blocks in the pool."""
        return self._lends and self.alive

    def room(self, size: int) -> memoryview | None:
        """A place for a block that is to be put; None: there is none left, or none so large."""
        return self._slots.take(size) if self.alive else None

    def holds(self, data: Buffer) -> bool:
        """Whether a block lies here."""
        return self.alive and self._slots.offset(data) is not None

    def put(self, blocks: Sequence[tuple[Key, Buffer]], timeout_s: float, traceparent: str = "") -> tuple[int, int]:
        """Announces blocks that lie here, parents before children; (held now, refused). None at all: asks whether the service
        is there. Raises Unavailable, DeadlineExceeded, or what the service ended the stream with."""
        return self._put([(key, self._place(data)) for key, data in blocks], timeout_s, traceparent)

    def put_pages(self, blocks: Sequence[tuple[Key, int]], timeout_s: float, traceparent: str = "") -> tuple[int, int]:
        """`put` of pages of the pool. Until it returns or raises nobody may write to them."""
        assert self._pool is not None
        size = self._pool.block_bytes
        return self._put([(key, {"size": size, "page": page}) for key, page in blocks], timeout_s, traceparent)

    def _place(self, data: Buffer) -> dict[str, Any]:
        offset = self._slots.offset(data)
        assert offset is not None
        return {"offset": offset, "size": len(data), "checksum": checksum_of(cut(data))}

    def _put(self, blocks: Placed, timeout_s: float, traceparent: str) -> tuple[int, int]:
        stored = refused = 0
        deadline = monotonic() + timeout_s
        with self._lock:
            for frame in self._frames(blocks, traceparent):
                answer = self._exchange(frame, deadline)
                stored, refused = stored + answer[0], refused + answer[1]
        return stored, refused

    @staticmethod
    def _frames(blocks: Placed, traceparent: str) -> Iterator[pb.SharedPut]:
        frame, size = pb.SharedPut(traceparent=traceparent), HEADROOM
        for key, where in blocks:
            more = TOKEN_BYTES * len(key.token_ids) + HEADROOM
            if frame.blocks and size + more > MOST:
                yield frame
                frame, size = pb.SharedPut(traceparent=traceparent), HEADROOM
            frame.blocks.add(key=wire_key(key), **where)
            size += more
        yield frame

    def _exchange(self, frame: pb.SharedPut, deadline: float) -> tuple[int, int]:
        segment, before = self._segment, self._number
        if self._down:
            raise Unavailable(self._down)
        self._number = before + 1 & 0xFFFFFFFF
        write_frame(segment.request, frame)
        segment.request_bell.ring(self._number)
        while not segment.reply_bell.wait(before, 0):
            if self._down:
                self._raise_why()
            if monotonic() > deadline:
                self.close()
                raise DeadlineExceeded("the KV service did not take blocks out of shared memory in time")
        _, stored, refused = read_reply(segment.reply)
        return stored, refused

    def _raise_why(self) -> None:
        code = self._stream.code()
        if code not in (None, grpc.StatusCode.OK, grpc.StatusCode.CANCELLED):
            raise rpc.error_of(self._stream)
        raise Unavailable(self._down)

    def close(self) -> None:
        """Takes the segment from the service. Views of it stay valid."""
        give_up(self._segment.request)
        self._down = self._down or "it was closed"
        self._segment.unlink()
        self._stream.cancel()
        self._segment.reply_bell.nudge()
