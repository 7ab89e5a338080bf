"""How blocks lie in a segment that a caller shares with the service. Pure.

    request area   u32 length and SharedPut, in FRAME bytes, then the blocks
    reply area     the frame's number, blocks stored, blocks refused

Frames are numbered by the bells: the caller writes one, rings its number, and writes the next when the answer's bell says that
number.
"""

from __future__ import annotations

import struct

from google.protobuf.message import DecodeError

from forefetch.errors import BadRequest
from forefetch.v1 import kv_pb2 as pb
from kv_service.block_messages import Buffer

FRAME = 64 << 10
"""Room for a frame: a block of 4,096 tokens, the longest there may be, takes a third of it."""
ALIGN = 64
"""Blocks begin on cache lines."""
REPLY_BYTES = 16
_LENGTH, _REPLY = struct.Struct("<I"), struct.Struct("<III")
MOST = FRAME - _LENGTH.size
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
    area[_LENGTH.size : _LENGTH.size + len(message)] = message
    _LENGTH.pack_into(area, 0, len(message))


def read_frame(area: memoryview) -> pb.SharedPut:
    """The inverse, of a copy: the other side may write meanwhile. Raises BadRequest for what is no frame."""
    (length,) = _LENGTH.unpack_from(area)
    if length > MOST:
        raise BadRequest("frame", f"must be at most {MOST} bytes, is {length}")
    try:
        return pb.SharedPut.FromString(bytes(area[_LENGTH.size : _LENGTH.size + length]))
    except DecodeError:
        raise BadRequest("frame", "is not a SharedPut") from None


def block_in(area: memoryview, block: pb.SharedBlock) -> Buffer:
    """A block's bytes where they lie; the other side may still write to them. Raises BadRequest outside the area."""
    begin = FRAME + block.offset
    if begin + block.size > len(area):
        raise BadRequest("blocks.offset", "the block does not lie within the segment")
    return area[begin : begin + block.size]


def write_reply(area: memoryview, number: int, stored: int, refused: int) -> None:
    """Answers a frame."""
    _REPLY.pack_into(area, 0, number, stored, refused)


def read_reply(area: memoryview) -> tuple[int, int, int]:
    """The inverse: (the frame's number, stored, refused)."""
    number, stored, refused = _REPLY.unpack_from(area)
    return number, stored, refused
