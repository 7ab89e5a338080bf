from __future__ import annotations

import numpy as np
import pytest
import torch

from forefetch.errors import BadRequest
from forefetch.frames import HEADER_BYTES, FrameBuffer, layout
from forefetch.v1 import expert_pb2


@pytest.mark.parametrize("size", [0, 1, 127, 128, 16383, 16384, 300_000])
def test_sealed_frames_are_what_protobuf_makes_of_them(size: int) -> None:
    payload = (bytes(range(251)) * (size // 251 + 1))[:size]
    frame = FrameBuffer.allocate(size)
    frame.memory[:] = payload
    message = frame.seal(size)
    assert expert_pb2.ForwardRequest.FromString(message).frame == payload
    assert expert_pb2.ForwardResponse.FromString(message).frame == payload
    assert not size or message == expert_pb2.ForwardRequest(frame=payload).SerializeToString()
    back = FrameBuffer.allocate(size + 10)
    assert back.unseal(message) == size
    assert back.memory[:size] == payload


def test_unusual_messages_are_read_and_broken_ones_refused() -> None:
    frame = FrameBuffer.allocate(10)
    unknown = expert_pb2.OpenShmRequest(nonce=b"field 2").SerializeToString()
    message = expert_pb2.ForwardRequest(frame=b"abc").SerializeToString()
    for legal in (message, message + unknown, b"\x0a\x83\x80\x00abc"):
        frame.memory[:] = bytes(10)
        assert frame.unseal(legal) == 3
        assert frame.memory[:3] == b"abc"
    assert frame.unseal(b"") == 0
    for broken in (b"\x0a", b"\x0a\x04abc", b"\x0a\xff\xff\xff\xff\xff\xff", b"\xff\xff", message[:-1]):
        with pytest.raises(BadRequest, match="frame"):
            frame.unseal(broken)
    with pytest.raises(BadRequest, match="11 bytes exceed the limit of 10"):
        frame.unseal(expert_pb2.ForwardRequest(frame=bytes(11)).SerializeToString())


def test_tensors_are_written_in_order_from_anywhere_and_only_where_they_fit() -> None:
    frame = FrameBuffer.allocate(500)
    matrix = torch.arange(12, dtype=torch.float32).view(3, 4)
    row, expert, weight = np.arange(10, dtype=np.int32)[::2], np.arange(5, 10, dtype=np.int32), np.ones(5, np.float32)
    for x in (matrix, matrix.t(), matrix[:, 1::2], matrix[:0], matrix.bfloat16()):
        at = layout(*x.shape, 5, x.dtype.itemsize)
        frame.write(at, x, row, expert, weight)
        rows = bytes(x.contiguous().view(torch.uint8).flatten().tolist())
        assert frame.memory[HEADER_BYTES : HEADER_BYTES + x.nbytes] == rows
        for array, offset in ((row, at.row), (expert, at.expert), (weight, at.weight)):
            assert frame.memory[offset : offset + array.nbytes] == array.tobytes()
    at = layout(3, 4, 5, 4)
    for wrong in (
        (matrix[:2], row, expert, weight),
        (matrix, row[:4], expert, weight),
        (matrix, row, expert, weight.astype(np.float64)),
    ):
        with pytest.raises(ValueError, match="do not fit"):
            frame.write(at, *wrong)
    with pytest.raises(ValueError, match="do not fit"):
        FrameBuffer.allocate(at.end - 1).write(at, matrix, row, expert, weight)


def test_views_that_do_not_fit_are_refused() -> None:
    with pytest.raises(ValueError, match="buffer"):
        FrameBuffer.allocate(200).sections(3, 10, 0, torch.float32)
