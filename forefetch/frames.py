"""Memory that holds one frame at a time, its typed views, and the protobuf message around it."""

from __future__ import annotations

import ctypes
import struct
from functools import lru_cache
from typing import Any, NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt
import torch
from google.protobuf.message import DecodeError
from torch import Tensor

from forefetch.errors import BadRequest
from forefetch.v1 import expert_pb2

Ints = npt.NDArray[np.int32]
Floats = npt.NDArray[np.float32]

HEADER_BYTES = 96
HEADROOM = 32
"""Bytes before a frame: `seal` puts protobuf's tag and length there, and with them rows begin on a cache line, which halves
the time of a copy."""
T = TypeVar("T")
KEPT = 256
"""Shapes of which what was worked out is kept."""

# Keeps the GIL, as ctypes' own memmove does not: giving it away can cost more than a small copy.
_memmove = ctypes.PyDLL(None).memmove
_memmove.argtypes = ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t


class Sections(NamedTuple):
    """Views of a frame's sections; of a reply, only `x` means something."""

    x: Tensor  # [N, H]
    row: Ints  # [P]
    expert: Ints  # [P]
    weight: Floats  # [P]


class Layout(NamedTuple):
    """Where things lie in a request: worked out once per shape, see `layout`."""

    row: int  # where pair rows, pair experts and pair weights begin, each at a multiple of 32
    expert: int
    weight: int
    end: int  # bytes of the frame
    rows_bytes: int
    pair_bytes: int  # of each pair section
    pairs: struct.Struct  # all three, from `row` on

    def pair_parts(self, row: Ints, expert: Ints, weight: Floats) -> tuple[bytes, bytes, bytes]:
        """What `pairs` packs. ValueError if a part has another size, which struct would cut or fill up."""
        parts = row.tobytes(), expert.tobytes(), weight.tobytes()
        if not len(parts[0]) == len(parts[1]) == len(parts[2]) == self.pair_bytes:
            raise ValueError(f"pairs of {row.nbytes}, {expert.nbytes}, {weight.nbytes} bytes do not fit into {self}")
        return parts


@lru_cache(KEPT)
def layout(rows: int, hidden: int, pairs: int, itemsize: int) -> Layout:
    """The layout of a request of these sizes."""
    rows_bytes, pair_bytes = rows * hidden * itemsize, 4 * pairs
    row = (HEADER_BYTES + rows_bytes + 31) & ~31
    expert = (row + pair_bytes + 31) & ~31
    weight = (expert + pair_bytes + 31) & ~31
    one, gap = f"{pair_bytes}s", f"{expert - row - pair_bytes}x"
    pairs_of = struct.Struct(one + gap + one + gap + one)
    return Layout(row, expert, weight, weight + pair_bytes, rows_bytes, pair_bytes, pairs_of)


def bytes_of(x: Tensor, size: int) -> bytes:
    """x's elements in order, from any device. ValueError if they are not `size` bytes."""
    if x.nbytes != size:
        raise ValueError(f"{x.nbytes} bytes of rows are not {size}")
    if not x.is_cpu or not x.is_contiguous():
        x = x.to("cpu").contiguous()
    return _at(x.data_ptr(), size).raw


@lru_cache(KEPT)
def _at(address: int, size: int) -> ctypes.Array[ctypes.c_char]:
    """Memory as it is seen while somebody else holds it: steps use the same few blocks again and again."""
    return (ctypes.c_char * size).from_address(address)


class FrameBuffer:
    """One frame in memory of its own or in shared memory.

    Coding a frame of few rows must not wake up half of torch and numpy: where the experts' weights have just swept the caches,
    a first call into either costs tens of microseconds. So tensors are written by address, and views are kept by shape, since
    decode steps repeat their shapes. `accepted` keeps what a header's sizes were found to mean, for decoders to fill.
    """

    def __init__(self, room: memoryview) -> None:
        """room: HEADROOM bytes, then the frame; should begin on a cache line."""
        self._room, self.memory = room, room[HEADROOM:]
        self._size = len(self.memory)
        self._address = ctypes.addressof(ctypes.c_char.from_buffer(room)) + HEADROOM
        self._sections: dict[tuple[int, int, int, torch.dtype], Sections] = {}
        self.accepted: dict[object, Any] = {}

    @staticmethod
    def allocate(size: int) -> FrameBuffer:
        """A buffer for frames of up to `size` bytes. Pages are used up only where frames reach."""
        return FrameBuffer(torch.empty(HEADROOM + size, dtype=torch.uint8).numpy().data)

    def __len__(self) -> int:
        return self._size

    def write(self, at: Layout, x: Tensor, row: Ints, expert: Ints, weight: Floats) -> None:
        """Copies a request's parts to their places, elements in order; x from any device. ValueError if they do not fit."""
        if at.end > self._size or x.nbytes != at.rows_bytes:
            raise ValueError(f"{x.nbytes} bytes of rows do not fit into {at} of {self._size}")
        if not x.is_cpu or not x.is_contiguous():
            x = x.to("cpu").contiguous()
        _memmove(self._address + HEADER_BYTES, x.data_ptr(), at.rows_bytes)
        at.pairs.pack_into(self.memory, at.row, *at.pair_parts(row, expert, weight))

    def sections(self, rows: int, hidden: int, pairs: int, dtype: torch.dtype) -> Sections:
        """Views for these sizes. ValueError when they do not fit."""
        key = rows, hidden, pairs, dtype
        found = self._sections.get(key)
        if found is None:
            if len(self._sections) >= KEPT:
                self._sections.clear()
            at = layout(rows, hidden, pairs, dtype.itemsize)
            found = self._sections[key] = Sections(
                self._rows(rows, hidden, dtype),
                np.frombuffer(self.memory, np.int32, pairs, at.row if pairs else 0),
                np.frombuffer(self.memory, np.int32, pairs, at.expert if pairs else 0),
                np.frombuffer(self.memory, np.float32, pairs, at.weight if pairs else 0),
            )
        return found

    def accept(self, key: object, found: T) -> T:
        """Keeps `found` as what `key`, of a header, means here."""
        if len(self.accepted) >= KEPT:
            self.accepted.clear()
        self.accepted[key] = found
        return found

    def _rows(self, rows: int, hidden: int, dtype: torch.dtype) -> Tensor:
        if rows * hidden == 0:  # frombuffer refuses empty views
            return torch.empty(rows, hidden, dtype=dtype)
        return torch.frombuffer(self.memory, dtype=dtype, count=rows * hidden, offset=HEADER_BYTES).view(rows, hidden)

    def seal(self, size: int) -> bytes:
        """The ForwardRequest (or ForwardResponse: same layout) that carries this frame of `size` bytes.

        Protobuf's own classes would copy the frame twice on each side; a message of one `bytes` field is a tag, a length and
        the bytes.
        """
        around = envelope(size)
        around.headed.pack_into(self._room, around.start, around.head)
        message: bytes = around.whole.unpack_from(self._room, around.start)[0]
        return message

    def unseal(self, message: bytes) -> int:
        """Takes in the frame of a serialised ForwardRequest or ForwardResponse; its bytes. BadRequest: none, or too long.

        It is copied, since a message is neither aligned nor writable.
        """
        around = _around(len(message))
        if around is not None and around.size <= self._size and message.startswith(around.head):
            around.whole.pack_into(self._room, around.start, message)
            return around.size
        frame = _payload(message)
        size = len(frame)
        if size > self._size:
            raise BadRequest("frame", f"{size} bytes exceed the limit of {self._size}")
        self.memory[:size] = frame
        return size


class Envelope(NamedTuple):
    """A message with one frame of `size` bytes and nothing else."""

    head: bytes  # the tag of field 1, and the length
    start: int  # where it begins in a room
    size: int
    headed: struct.Struct  # the head
    whole: struct.Struct  # the message as one string of bytes


@lru_cache(KEPT)
def envelope(size: int) -> Envelope:
    """What is around a frame of `size` bytes."""
    length, head = size, bytearray(b"\x0a")
    while length > 0x7F:
        head.append(length & 0x7F | 0x80)
        length >>= 7
    head.append(length)
    whole = struct.Struct(f"{len(head) + size}s")
    return Envelope(bytes(head), HEADROOM - len(head), size, struct.Struct(f"{len(head)}s"), whole)


@lru_cache(KEPT)
def _around(length: int) -> Envelope | None:
    """The envelope of a message of `length` bytes that is one frame and nothing else; None when there can be none."""
    sizes = range(max(0, length - 11), length)
    return next((around for around in map(envelope, sizes) if around.whole.size == length), None)


def _payload(message: bytes) -> memoryview:
    try:  # unusual, but perhaps legal: unknown fields or a long form of the length, say
        return memoryview(expert_pb2.ForwardRequest.FromString(message).frame)
    except DecodeError:
        raise BadRequest("frame", "the message is not a ForwardRequest") from None
