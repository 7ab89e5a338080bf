from __future__ import annotations

import struct
from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from forefetch import wire
from forefetch.errors import BadRequest, ForefetchError, LinkDown, Mismatch, Overloaded, UnsupportedModel
from forefetch.v1 import tensor_pb2
from forefetch.wire import LayerCall

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
TRACES = [b"", bytes(range(25))]


def a_call(rows: int = 3, hidden: int = 5, pairs: int = 4, dtype: torch.dtype = torch.float32, trace: bytes = b"") -> LayerCall:
    row = torch.arange(pairs, dtype=torch.int32) % max(rows, 1)
    expert = torch.arange(pairs, dtype=torch.int32) + 7
    x = torch.randn(rows, hidden).to(dtype)
    return LayerCall(2**40, 3, x, row, expert, torch.rand(pairs), trace)


def encoded(call: LayerCall) -> memoryview:
    size = wire.request_bytes(*call.x.shape, call.pair_row.numel(), call.x.dtype)
    buf = memoryview(bytearray(b"\xff" * size))
    assert wire.encode_request(buf, call) == size
    return buf


def test_constants_are_the_protos() -> None:
    assert wire.HEADER_BYTES == 96
    for dtype, code in wire.DTYPES.items():
        name = "DATA_TYPE_" + str(dtype).removeprefix("torch.").upper()
        assert tensor_pb2.DataType.Value(name) == code


@settings(max_examples=60, deadline=None)
@given(
    st.integers(0, 9), st.integers(1, 33), st.integers(0, 20), st.sampled_from(DTYPES), st.sampled_from([b"", bytes(range(25))])
)
def test_request_round_trip(rows: int, hidden: int, pairs: int, dtype: torch.dtype, trace: bytes) -> None:
    call = a_call(rows, hidden, pairs if rows else 0, dtype, trace)
    back = wire.decode_request(encoded(call), wire.Shape(hidden, dtype, rows))
    assert (back.step, back.layer, back.trace) == (call.step, call.layer, trace)
    for name in ("x", "pair_row", "pair_expert", "pair_weight"):
        assert torch.equal(getattr(back, name), getattr(call, name)), name
        assert getattr(back, name).dtype == getattr(call, name).dtype


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rows", [0, 1, 3])
def test_reply_round_trip_with_and_without_a_copy(dtype: torch.dtype, rows: int) -> None:
    call = a_call(rows, 5, 0, dtype)
    for in_place in (True, False):
        buf = memoryview(bytearray(wire.reply_bytes(rows, 5, dtype)))
        out = wire.reply_rows(buf, rows, 5, dtype) if in_place else torch.empty(rows, 5, dtype=dtype)
        out.copy_(call.x * 2)
        size = wire.encode_reply(buf, call.step, call.layer, out, 1, 2, 3)
        reply = wire.decode_reply(buf[:size], call)
        assert torch.equal(reply.rows, call.x * 2)
        assert (reply.queue_ns, reply.copy_wait_ns, reply.compute_ns) == (1, 2, 3)


def test_rows_alias_the_buffer_and_pairs_do_not() -> None:
    buf = encoded(a_call(2, 4, 2))
    call = wire.decode_request(buf)
    buf[wire.HEADER_BYTES :] = b"\x00" * (len(buf) - wire.HEADER_BYTES)
    assert not call.x.any()
    assert call.pair_expert.tolist() == [7, 8]


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
        (lambda b: poke(b, 160, "<i", 3), BadRequest, "pair_row"),
        (lambda b: poke(b, 160, "<i", -1), BadRequest, "pair_row"),
        (lambda b: poke(b, 224, "<I", 0x7F800000), BadRequest, "pair_weight"),
        (lambda b: poke(b, 228, "<I", 0x7FC00000), BadRequest, "pair_weight"),
    ],
)
def test_malformed_requests_name_the_field(
    spoil: Callable[[memoryview], None], error: type[ForefetchError], names: str
) -> None:
    buf = encoded(a_call())  # 3 x 5 float32 end at 156, pairs begin at 160, 192, 224
    spoil(buf)
    with pytest.raises(error, match=names):
        wire.decode_request(buf, wire.Shape(5, torch.float32, 3))


@pytest.mark.parametrize("size", [0, 1, 95, 96, 200])
def test_truncated_requests_are_refused(size: int) -> None:
    with pytest.raises(BadRequest, match=r"frame|body"):
        wire.decode_request(encoded(a_call())[:size])


@settings(max_examples=200, deadline=None)
@given(st.binary(max_size=300), st.booleans())
def test_garbage_never_raises_anything_else(data: bytes, good_magic: bool) -> None:
    frame = bytearray(data)
    if good_magic and len(frame) >= 8:
        struct.pack_into("<IHH", frame, 0, wire.MAGIC, wire.REQUEST, 1)
    try:
        wire.decode_request(memoryview(frame), wire.Shape(5, torch.float32, 3))
    except (BadRequest, Mismatch):
        return
    raise AssertionError("garbage was taken for a frame")


def test_a_call_too_large_for_the_link_is_refused() -> None:
    call = a_call()
    with pytest.raises(BadRequest, match="rows"):
        wire.encode_request(memoryview(bytearray(200)), call)
    with pytest.raises(BadRequest, match="rows"):
        wire.reply_rows(memoryview(bytearray(100)), 3, 5, torch.float32)


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
    buf = memoryview(bytearray(wire.reply_bytes(0, 1, torch.float32)))
    size = wire.encode_error(buf, call.step, call.layer, error)
    with pytest.raises(kind) as caught:
        wire.decode_reply(buf[:size], call)
    assert str(caught.value)[:500] == str(error)[:500]
    assert wire.peek(buf) == (call.step, call.layer)


def test_an_answer_to_another_call_is_refused() -> None:
    call = a_call()
    buf = memoryview(bytearray(wire.reply_bytes(3, 5, torch.float32)))
    wire.encode_reply(buf, call.step, call.layer + 1, call.x, 0, 0, 0)
    with pytest.raises(Mismatch, match="layer 4"):
        wire.decode_reply(buf, call)


def test_a_truncated_reply_is_refused() -> None:
    call = a_call()
    buf = memoryview(bytearray(wire.reply_bytes(3, 5, torch.float32)))
    size = wire.encode_reply(buf, call.step, call.layer, call.x, 0, 0, 0)
    with pytest.raises(BadRequest, match="body"):
        wire.decode_reply(buf[: size - 1], call)
