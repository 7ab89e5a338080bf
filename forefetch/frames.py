"""Memory that holds one frame at a time, its typed views, and the protobuf message around it."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from google.protobuf.message import DecodeError
from torch import Tensor

from forefetch.errors import BadRequest
from forefetch.v1 import expert_pb2

HEADER_BYTES = 96
HEADROOM = 32
"""Bytes before a frame: `seal` puts protobuf's tag and length there, and with them rows begin on a cache line, which halves
the time of a copy."""
_KEPT = 256  # shapes whose views are kept


class Sections(NamedTuple):
    """Views of a frame's sections; a reply has only `x`."""

    x: Tensor  # [N, H]
    row: npt.NDArray[np.int32]  # [P]
    expert: npt.NDArray[np.int32]  # [P]
    weight: npt.NDArray[np.float32]  # [P]
    pairs: tuple[Tensor, Tensor, Tensor]  # the three as tensors


def aligned(offset: int) -> int:
    """Where the next section may begin."""
    return (offset + 31) & ~31


class FrameBuffer:
    """One frame in memory of its own or in shared memory.

    Views are kept by shape, since decode steps repeat their shapes: making them costs more than all the rest of the coding,
    above all with caches that the experts' weights have just swept.
    """

    def __init__(self, room: memoryview) -> None:
        """room: HEADROOM bytes, then the frame; should begin on a cache line."""
        self._room, self.memory = room, room[HEADROOM:]
        self._sections: dict[tuple[int, int, int, torch.dtype], Sections] = {}

    @staticmethod
    def allocate(size: int) -> FrameBuffer:
        """A buffer for frames of up to `size` bytes. Pages are used up only where frames reach."""
        return FrameBuffer(torch.empty(HEADROOM + size, dtype=torch.uint8).numpy().data)

    def __len__(self) -> int:
        return len(self.memory)

    def sections(self, rows: int, hidden: int, pairs: int, dtype: torch.dtype) -> Sections:
        """Views for these sizes, which must fit."""
        key = rows, hidden, pairs, dtype
        found = self._sections.get(key)
        if found is None:
            if len(self._sections) >= _KEPT:
                self._sections.clear()
            found = self._sections[key] = self._view(rows, hidden, pairs, dtype)
        return found

    def _view(self, rows: int, hidden: int, pairs: int, dtype: torch.dtype) -> Sections:
        row = aligned(HEADER_BYTES + rows * hidden * dtype.itemsize)
        expert = aligned(row + 4 * pairs)
        weight = aligned(expert + 4 * pairs)
        x = torch.empty(rows, hidden, dtype=dtype)
        if rows * hidden:  # frombuffer refuses empty views
            x = torch.frombuffer(self.memory, dtype=dtype, count=rows * hidden, offset=HEADER_BYTES).view(rows, hidden)
        every = np.frombuffer(self.memory, np.uint8)
        r, e = (every[begin : begin + 4 * pairs].view(np.int32) for begin in (row, expert))
        w = every[weight : weight + 4 * pairs].view(np.float32)
        return Sections(x, r, e, w, (torch.from_numpy(r), torch.from_numpy(e), torch.from_numpy(w)))

    def seal(self, size: int) -> bytes:
        """The ForwardRequest (or ForwardResponse: same layout) that carries this frame of `size` bytes.

        Protobuf's own classes would copy the frame twice on each side; a message of one `bytes` field is a tag, a length and
        the bytes.
        """
        length, head = size, bytearray(b"\x0a")  # field 1, length-delimited
        while length > 0x7F:
            head.append(length & 0x7F | 0x80)
            length >>= 7
        head.append(length)
        start = HEADROOM - len(head)
        self._room[start:HEADROOM] = head
        return bytes(self._room[start : HEADROOM + size])

    def unseal(self, message: bytes) -> int:
        """Takes in the frame of a serialised ForwardRequest or ForwardResponse; its bytes. BadRequest: none, or too long.

        It is copied, since a message is neither aligned nor writable.
        """
        frame = _payload(message)
        if len(frame) > len(self.memory):
            raise BadRequest("frame", f"{len(frame)} bytes exceed the limit of {len(self.memory)}")
        self.memory[: len(frame)] = frame
        return len(frame)


def _payload(message: bytes) -> memoryview:
    if message[:1] == b"\x0a":
        size = shift = 0
        for at in range(1, min(len(message), 6)):
            size |= (message[at] & 0x7F) << shift
            shift += 7
            if message[at] < 0x80:
                if at + 1 + size == len(message):
                    return memoryview(message)[at + 1 :]
                break
    try:  # unusual, but perhaps legal: unknown fields, say
        return memoryview(expert_pb2.ForwardRequest.FromString(message).frame)
    except DecodeError:
        raise BadRequest("frame", "the message is not a ForwardRequest") from None
