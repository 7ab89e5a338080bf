from __future__ import annotations

import dataclasses
import struct
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from forefetch import wire
from forefetch.errors import BadRequest, ForefetchError, LinkDown, Mismatch, Overloaded, UnsupportedModel
from forefetch.frames import HEADER_BYTES, HEADROOM, FrameBuffer
from forefetch.v1 import tensor_pb2
from forefetch.wire import LayerCall

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
TRACES = [b"", bytes(range(25))]


def a_call(rows: int = 3, hidden: int = 5, pairs: int = 4, dtype: torch.dtype = torch.float32, trace: bytes = b"") -> LayerCall:
    row = np.arange(pairs, dtype=np.int32) % max(rows, 1)
    expert = np.arange(pairs, dtype=np.int32) + 7
    x = torch.randn(rows, hidden).to(dtype)
    return LayerCall(2**40, 3, x, row, expert, np.random.rand(pairs).astype(np.float32), trace)


def encoded(call: LayerCall) -> FrameBuffer:
    size = wire.request_bytes(*call.x.shape, len(call.pair_row), call.x.dtype)
    frame = FrameBuffer(memoryview(bytearray(b"\xff" * (HEADROOM + size))))
    assert wire.encode_request(frame, call) == size
    return frame


def decoded(frame: FrameBuffer, call: LayerCall, size: int | None = None) -> LayerCall:
    rows, hidden = call.x.shape
    return wire.decode_request(frame, len(frame) if size is None else size, wire.Shape(hidden, call.x.dtype, rows))


def test_constants_are_the_protos() -> None:
    assert wire.HEADER.size == HEADER_BYTES == 96
    for dtype, code in wire.DTYPES.items():
        name = "DATA_TYPE_" + str(dtype).removeprefix("torch.").upper()
        assert tensor_pb2.DataType.Value(name) == code


@settings(max_examples=60)
@given(
    st.integers(0, 9), st.integers(1, 33), st.integers(0, 20), st.sampled_from(DTYPES), st.sampled_from([b"", bytes(range(25))])
)
def test_request_round_trip(rows: int, hidden: int, pairs: int, dtype: torch.dtype, trace: bytes) -> None:
    call = a_call(rows, hidden, pairs if rows else 0, dtype, trace)
    back = decoded(encoded(call), call)
    assert (back.step, back.layer, back.trace) == (call.step, call.layer, trace)
    assert torch.equal(back.x, call.x)
    for name in ("pair_row", "pair_expert", "pair_weight"):
        assert np.array_equal(getattr(back, name), getattr(call, name)), name
        assert getattr(back, name).dtype == getattr(call, name).dtype


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rows", [0, 1, 3])
def test_reply_round_trip(dtype: torch.dtype, rows: int) -> None:
    call = a_call(rows, 5, 0, dtype)
    frame = FrameBuffer.allocate(wire.reply_bytes(rows, 5, dtype))
    wire.reply_rows(frame, call).copy_(call.x * 2)
    verified = wire.Verified(4, 5, 6, 7, 2**40, 2**41, 2**42, 8)
    reply = wire.decode_reply(frame, wire.encode_reply(frame, call, 1, 2, 3, verified), call)
    assert torch.equal(reply.rows, call.x * 2)
    assert (reply.queue_ns, reply.copy_wait_ns, reply.compute_ns) == (1, 2, 3)
    assert reply.verified == verified


def test_rows_that_are_not_contiguous_are_sent_in_order() -> None:
    call = a_call(6, 4)
    call.x = torch.randn(4, 6).t()
    assert torch.equal(decoded(encoded(call), call).x, call.x)


def test_a_decoded_call_aliases_the_buffer() -> None:
    call = a_call(2, 4, 2)
    frame = encoded(call)
    back = decoded(frame, call)
    frame.memory[HEADER_BYTES:] = bytes(len(frame) - HEADER_BYTES)
    assert not back.x.any()
    assert back.pair_expert.tolist() == [0, 0]


def test_one_buffer_carries_frames_of_many_shapes() -> None:
    frame, reply = FrameBuffer.allocate(20_000), FrameBuffer.allocate(20_000)
    for _ in range(2):
        for rows in range(1, 41):
            for pairs in range(10):
                call = a_call(rows, 3, pairs)
                back = wire.decode_request(frame, wire.encode_request(frame, call), wire.Shape(3, torch.float32, 40))
                assert torch.equal(back.x, call.x)
                assert np.array_equal(back.pair_weight, call.pair_weight)
                wire.reply_rows(reply, call).copy_(back.x)
                assert torch.equal(wire.decode_reply(reply, wire.encode_reply(reply, back, 0, 0, 0), call).rows, call.x)


def poke(buf: memoryview, offset: int, form: str, value: int) -> None:
    struct.pack_into(form, buf, offset, value)


@pytest.mark.parametrize(
    ("spoil", "error", "names"),
    [
        (lambda b: poke(b, 0, "<I", 0), BadRequest, "magic"),
        (lambda b: poke(b, 4, "<H", wire.REPLY), BadRequest, "kind"),
        (lambda b: poke(b, 6, "<H", 0), BadRequest, "dtype"),
        (lambda b: poke(b, 6, "<H", 5), BadRequest, "dtype"),
        (lambda b: poke(b, 6, "<H", 3), Mismatch, "dtype"),
        (lambda b: poke(b, 24, "<I", 6), Mismatch, "hidden"),
        (lambda b: poke(b, 20, "<I", 2**32 - 1), BadRequest, "rows"),
        (lambda b: poke(b, 20, "<I", 1), BadRequest, "body"),
        (lambda b: poke(b, 28, "<I", 2**32 - 1), BadRequest, "body"),
        (lambda b: poke(b, 60, "<I", 0), BadRequest, "body"),
    ],
)
def test_malformed_requests_name_the_field(
    spoil: Callable[[memoryview], None], error: type[ForefetchError], names: str
) -> None:
    call = a_call()
    frame = encoded(call)
    spoil(frame.memory)
    with pytest.raises(error, match=names):
        decoded(frame, call)


@pytest.mark.parametrize("size", [0, 1, 95, 96, 200])
def test_truncated_requests_are_refused(size: int) -> None:
    call = a_call()
    with pytest.raises(BadRequest, match=r"frame|body"):
        decoded(encoded(call), call, size)


@settings(max_examples=200)
@given(st.binary(max_size=300), st.booleans())
def test_garbage_never_raises_anything_else(data: bytes, good_magic: bool) -> None:
    frame = FrameBuffer.allocate(len(data))
    frame.memory[:] = data
    if good_magic and len(data) >= 8:
        struct.pack_into("<IHH", frame.memory, 0, wire.MAGIC, wire.REQUEST, 1)
    try:
        wire.decode_request(frame, len(data), wire.Shape(5, torch.float32, 3))
    except (BadRequest, Mismatch):
        return
    raise AssertionError("garbage was taken for a frame")


def test_a_call_too_large_for_the_link_is_refused() -> None:
    call = a_call()
    with pytest.raises(BadRequest, match="rows"):
        wire.encode_request(FrameBuffer.allocate(200), call)
    with pytest.raises(BadRequest, match="rows"):
        wire.reply_rows(FrameBuffer.allocate(100), call)


@pytest.mark.parametrize("wrong", [np.zeros(4, np.int64), np.zeros(3, np.int32)])
def test_pairs_of_another_size_never_reach_the_wire(wrong: Any) -> None:
    call = dataclasses.replace(a_call(), pair_expert=wrong)
    with pytest.raises(ValueError, match="do not fit"):
        wire.encode_request(FrameBuffer.allocate(1000), call)


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (BadRequest("rows", "too many"), BadRequest),
        (Mismatch("other model"), Mismatch),
        (UnsupportedModel("rope"), Mismatch),
        (LinkDown(4, "draining"), LinkDown),
        (Overloaded("full", 1.0), ForefetchError),
        (ForefetchError("internal error"), ForefetchError),
        (Mismatch("é" * 5000), Mismatch),
    ],
)
def test_error_frames(error: ForefetchError, kind: type[ForefetchError]) -> None:
    call = a_call()
    frame = FrameBuffer.allocate(wire.reply_bytes(0, 1, torch.float32))
    size = wire.encode_error(frame, call.step, call.layer, error)
    with pytest.raises(kind) as caught:
        wire.decode_reply(frame, size, call)
    assert str(caught.value)[:500] == str(error)[:500]
    assert wire.peek(frame, size) == (call.step, call.layer)
    assert wire.peek(frame, 95) == (0, 0)


def test_an_answer_to_another_call_is_refused() -> None:
    call = a_call()
    frame = FrameBuffer.allocate(wire.reply_bytes(3, 5, torch.float32))
    size = wire.encode_reply(frame, dataclasses.replace(call, layer=4), 0, 0, 0)
    with pytest.raises(Mismatch, match="layer 4"):
        wire.decode_reply(frame, size, call)


def test_a_truncated_reply_is_refused() -> None:
    call = a_call()
    frame = FrameBuffer.allocate(wire.reply_bytes(3, 5, torch.float32))
    size = wire.encode_reply(frame, call, 0, 0, 0)
    with pytest.raises(BadRequest, match="body"):
        wire.decode_reply(frame, size - 1, call)
    with pytest.raises(BadRequest, match="frame"):
        wire.decode_reply(frame, 50, call)


@pytest.mark.parametrize("trace", TRACES)
@pytest.mark.parametrize("pairs", [0, 4, 8])
def test_a_message_is_the_frame_sealed(pairs: int, trace: bytes) -> None:
    for dtype in DTYPES:
        call = a_call(pairs=pairs, dtype=dtype, trace=trace)
        size = wire.request_bytes(*call.form.sizes, dtype)
        frame = FrameBuffer.allocate(size)  # what is between sections is zero in a message
        frame.memory[:] = bytes(size)
        assert wire.request_message(size, call) == frame.seal(wire.encode_request(frame, call))
        with pytest.raises(BadRequest, match="rows"):
            wire.request_message(size - 1, call)


def test_a_message_is_of_the_rows_as_they_are_now() -> None:
    """Their memory is looked at by address, and views of it are kept."""
    call = a_call()
    for x in (call.x.fill_(1.0), call.x.fill_(2.0), torch.randn(5, 3).t()):
        call.x = x
        frame = FrameBuffer.allocate(500)
        size = frame.unseal(wire.request_message(500, call))
        assert torch.equal(decoded(frame, call, size).x, x)
    call.x = torch.zeros(2, 5)
    with pytest.raises(ValueError, match="rows"):
        wire.request_message(500, call)


def test_a_shape_once_read_is_still_checked_where_anything_differs() -> None:
    """Decoders remember headers that were right; one that differs in any field but step and layer is looked at again."""
    call = a_call()
    frame = encoded(call)
    assert decoded(frame, call).layer == 3
    for offset in (0, 4, 6, 20, 24, 28, 60):
        kept = bytes(frame.memory[:HEADER_BYTES])
        poke(frame.memory, offset, "<H", 9)
        for _ in range(2):
            with pytest.raises((BadRequest, Mismatch)):
                decoded(frame, call)
        frame.memory[:HEADER_BYTES] = kept
    with pytest.raises(BadRequest, match="body"):
        decoded(frame, call, len(frame) - 1)
    with pytest.raises(Mismatch, match="hidden"):
        wire.decode_request(frame, len(frame), wire.Shape(6, torch.float32, 3))
    poke(frame.memory, 16, "<I", 5)
    assert decoded(frame, call).layer == 5


def test_a_reply_of_a_known_shape_to_another_step_is_refused() -> None:
    call = a_call()
    frame = FrameBuffer.allocate(wire.reply_bytes(3, 5, torch.float32))
    wire.decode_reply(frame, wire.encode_reply(frame, call, 0, 0, 0), call)
    for other in (
        dataclasses.replace(call, step=7),
        dataclasses.replace(call, layer=7),
        a_call(4),
        a_call(dtype=torch.float16),
    ):
        with pytest.raises(Mismatch, match="asked was"):
            wire.decode_reply(frame, wire.encode_reply(frame, call, 0, 0, 0), other)
