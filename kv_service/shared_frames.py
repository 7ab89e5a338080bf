"""How blocks lie in a segment that a caller shares with the service. Pure.

    request area   u32 length, u32 void and SharedPut, in FRAME bytes, then the blocks
    reply area     the frame's number, blocks stored, blocks refused

Frames are numbered by the bells: the caller writes one, rings its number, and writes the next when the answer's bell says that
number. `void` is 0 until the caller gives the segment up: pages of its pool that were read before that were read whole.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass

from google.protobuf.message import DecodeError

from forefetch.errors import BadRequest
from forefetch.v1 import kv_pb2 as pb
from kv_service.block_messages import Buffer

FRAME = 64 << 10
"""Room for a frame: a block of 4,096 tokens, the longest there may be, takes a third of it."""
ALIGN = 64
"""Blocks begin on cache lines."""
REPLY_BYTES = 16
MOST_PARTS = 1 << 16
"""Parts of a page: layers, K and V, heads."""
_LENGTH, _REPLY = struct.Struct("<I"), struct.Struct("<III")
_VOID, _BEGIN = 4, 8
MOST = FRAME - _BEGIN
"""Most bytes of a SharedPut."""


def area_bytes(slots: int, slot_bytes: int) -> int:
    """Bytes of a request area for so many blocks of at most so many bytes."""
    return FRAME + slots * slot_stride(slot_bytes)


def slot_stride(slot_bytes: int) -> int:
    """Bytes from one block's place to the next."""
    return -(-slot_bytes // ALIGN) * ALIGN


def write_frame(area: memoryview, frame: pb.SharedPut) -> None:
    """Puts a frame of at most MOST bytes into a request area."""
    message = frame.SerializeToString()
    area[_BEGIN : _BEGIN + len(message)] = message
    _LENGTH.pack_into(area, 0, len(message))


def read_frame(area: memoryview) -> pb.SharedPut:
    """The inverse, of a copy: the other side may write meanwhile. Raises BadRequest for what is no frame."""
    (length,) = _LENGTH.unpack_from(area)
    if length > MOST:
        raise BadRequest("frame", f"must be at most {MOST} bytes, is {length}")
    try:
        return pb.SharedPut.FromString(bytes(area[_BEGIN : _BEGIN + length]))
    except DecodeError:
        raise BadRequest("frame", "is not a SharedPut") from None


def block_in(area: memoryview, block: pb.SharedBlock) -> Buffer:
    """A block's bytes where they lie; the other side may still write to them. Raises BadRequest outside the area."""
    begin = FRAME + block.offset
    if begin + block.size > len(area):
        raise BadRequest("blocks.offset", "the block does not lie within the segment")
    return area[begin : begin + block.size]


def give_up(area: memoryview) -> None:
    """Marks a segment void: pages that it announced may change from now on."""
    area[_VOID] = 1


def given_up(area: memoryview) -> bool:
    """Whether it is marked."""
    return area[_VOID] != 0


@dataclass(frozen=True)
class Pool:
    """Pages in a caller's memory; see SharedPool. `name`: as `forefetch/lending.py` has it."""

    name: tuple[int, int, bytes]
    parts: int
    stride: int
    part_bytes: int
    pages: int

    @property
    def block_bytes(self) -> int:
        """Bytes of a page."""
        return self.parts * self.part_bytes

    def page_in(self, memory: memoryview, page: int) -> list[Buffer]:
        """A page's parts where they lie. Raises BadRequest for a page that there is not."""
        if page >= self.pages:
            raise BadRequest("blocks.page", f"must be below {self.pages}, is {page}")
        begins = range(page * self.part_bytes, self.parts * self.stride, self.stride)
        return [memory[begin : begin + self.part_bytes] for begin in begins]

    def fits(self, size: int) -> bool:
        """Whether all pages lie within so many bytes."""
        lies = self.part_bytes * self.pages <= self.stride and self.parts * self.stride <= size
        return lies and 0 < self.parts <= MOST_PARTS and self.part_bytes > 0

    def to_wire(self) -> pb.SharedPool:
        """As a message."""
        pid, file, nonce = self.name
        shape = {"parts": self.parts, "stride": self.stride, "part_bytes": self.part_bytes, "pages": self.pages}
        return pb.SharedPool(pid=pid, file=file, nonce=nonce, **shape)

    @classmethod
    def of_wire(cls, pool: pb.SharedPool) -> Pool:
        """The inverse."""
        return cls((pool.pid, pool.file, pool.nonce), pool.parts, pool.stride, pool.part_bytes, pool.pages)


def write_reply(area: memoryview, number: int, stored: int, refused: int) -> None:
    """Answers a frame."""
    _REPLY.pack_into(area, 0, number, stored, refused)


def read_reply(area: memoryview) -> tuple[int, int, int]:
    """The inverse: (the frame's number, stored, refused)."""
    number, stored, refused = _REPLY.unpack_from(area)
    return number, stored, refused
