"""Messages beside protobuf's own library, which is at the other end in the tests of client and server."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING

import pytest
from google.protobuf.message import DecodeError
from hypothesis import given
from hypothesis import strategies as st

from forefetch.v1 import kv_pb2 as pb
from kv_service.block_messages import Message
from kv_service.keys import next_key
from kv_service.parts import put_messages

if TYPE_CHECKING:
    from hypothesis.strategies import SearchStrategy

KEYS = st.builds(
    pb.BlockKey,
    digest=st.binary(max_size=40),
    parent=st.binary(max_size=40),
    token_ids=st.lists(st.integers(0, 2**32 - 1), max_size=5),
    position=st.integers(0, 2**32 - 1),
)
PARTS: SearchStrategy[pb.BlockPart] = st.builds(
    pb.BlockPart,
    key=st.none() | KEYS,
    size=st.integers(0, 2**64 - 1),
    index=st.integers(0, 2**32 - 1),
    data=st.binary(max_size=300),
    last=st.booleans(),
    checksum=st.binary(max_size=16),
)
ORIGINS = st.none() | st.builds(pb.BlockOrigin, model_digest=st.text(max_size=9), layers=st.integers(0, 9))
PUTS = st.builds(pb.PutRequest, parts=st.lists(PARTS, max_size=4), origin=ORIGINS)


def as_library(message: Message) -> pb.PutRequest:
    """What the message says, as one of the library's."""
    whole = pb.PutRequest(origin=message.origin)
    for head, data in message.parts:
        assert not head.data
        whole.parts.add(data=bytes(data)).MergeFrom(head)
    return whole


@given(PUTS)
def test_what_the_library_writes_is_read(put: pb.PutRequest) -> None:
    assert as_library(Message.decode(put.SerializeToString())) == put


@given(PUTS)
def test_what_is_written_the_library_reads(put: pb.PutRequest) -> None:
    assert pb.PutRequest.FromString(Message.decode(put.SerializeToString()).encode()) == put


@given(PUTS, st.data())
def test_bytes_that_are_no_message_are_refused_as_the_library_does(put: pb.PutRequest, data: st.DataObject) -> None:
    wire = bytearray(put.SerializeToString())
    for _ in range(data.draw(st.integers(1, 3))):
        if wire:
            wire[data.draw(st.integers(0, len(wire) - 1))] = data.draw(st.integers(0, 255))
    wire = wire[: data.draw(st.integers(0, len(wire)))]
    try:
        expected = pb.PutRequest.FromString(bytes(wire))
    except DecodeError:
        with pytest.raises(DecodeError):
            Message.decode(bytes(wire))
        return
    with contextlib.suppress(DecodeError):  # groups, which nobody sends
        _same(as_library(Message.decode(bytes(wire))), expected)


def _same(found: pb.PutRequest, expected: pb.PutRequest) -> None:
    expected.DiscardUnknownFields()  # type: ignore[attr-defined]
    found.DiscardUnknownFields()  # type: ignore[attr-defined]
    assert found == expected


@pytest.mark.parametrize("wire", [b"\x0a", b"\x0a\x05ab", b"\x0a\x02\x22\x05", b"\x0b", b"\xff" * 11, b"\x09abc"])
def test_a_message_cut_short_is_refused(wire: bytes) -> None:
    with pytest.raises(DecodeError):
        Message.decode(wire)


def test_a_large_block_is_not_copied_and_a_small_one_does_not_keep_its_message() -> None:
    large = Message.decode(pb.PutRequest(parts=[pb.BlockPart(data=bytes(1 << 16), last=True)]).SerializeToString())
    assert isinstance(large.parts[0].data, memoryview)
    assert len(large.parts[0].data.obj) < 17 / 16 * (1 << 16)  # type: ignore[arg-type]
    small = Message.decode(pb.PutRequest(parts=[pb.BlockPart(data=bytes(1 << 16))] * 2).SerializeToString())
    assert all(isinstance(part.data, bytes) for part in small.parts)


def test_parts_are_bounded_before_they_take_memory() -> None:
    assert len(Message.decode(b"\x0a\0" * 4096).parts) == 4096
    with pytest.raises(DecodeError, match="4096 parts"):
        Message.decode(b"\x0a\0" * 4097)
    tiny = [(next_key(bytes(32), None, [token]), b"1") for token in range(5000)]
    assert [len(message.parts) for message in put_messages(tiny, None)] == [4096, 904]
