"""Messages of Put and Get to bytes and back, without copying the blocks in them. Pure.

The wire format is that of kv.proto, and any protobuf library may be at the other end. But a library's message objects copy a
block two or three times on its way, under the GIL that a router's engine needs. So what is beside `data` goes through the
library, and `data` itself is joined into the message once, or looked at where it came.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from google.protobuf.message import DecodeError

from forefetch.v1 import kv_pb2 as pb
from kv_service.keys import Key, Origin

Buffer = bytes | memoryview
MAX_PARTS = 4_096
"""Most parts in a message: an empty one is two bytes on the wire and some hundred in memory."""
VARINT, FIXED64, DELIMITED, FIXED32 = 0, 1, 2, 5
_PARTS = pb.PutRequest.PARTS_FIELD_NUMBER << 3 | DELIMITED  # the same in GetResponse
_DATA = pb.BlockPart.DATA_FIELD_NUMBER << 3 | DELIMITED
_MOST_VARINT = 10
KEPT = 16
"""A part's data stays in its message if it is all but 1/16 of it: what is held is then what is counted."""


def wire_key(key: Key) -> pb.BlockKey:
    """A block's name in a message."""
    return pb.BlockKey(digest=key.digest, parent=key.parent, token_ids=key.token_ids, position=key.position)


def wire_origin(origin: Origin) -> pb.BlockOrigin:
    """What blocks are, in a message."""
    layers, kv_heads, head_dim = origin.geometry
    return pb.BlockOrigin(
        model_digest=origin.model_digest,
        kv_format=origin.kv_format,
        params=origin.params,
        rope=origin.rope,
        layers=layers,
        kv_heads=kv_heads,
        head_dim=head_dim,
        page_size=origin.page_size,
    )


class Part(NamedTuple):
    """A BlockPart: `head` is all of it but `data`."""

    head: pb.BlockPart
    data: Buffer


@dataclass(slots=True)
class Message:
    """A PutRequest, or a GetResponse, which has no origin."""

    parts: Sequence[Part] = field(default_factory=list)
    origin: pb.BlockOrigin | None = None

    def encode(self) -> bytes:
        """As it goes over the wire."""
        pieces: list[Buffer] = [pb.PutRequest(origin=self.origin).SerializeToString()] if self.origin else []
        for head, data in self.parts:
            rest = head.SerializeToString()
            if data:
                rest += _varint(_DATA) + _varint(len(data))
            pieces += _varint(_PARTS) + _varint(len(rest) + len(data)), rest, data
        return b"".join(pieces)

    @classmethod
    def decode(cls, wire: bytes) -> Message:
        """The inverse. Raises DecodeError."""
        parts: list[Part] = []
        rest = []
        for tag, begin, value, end in _fields(wire, 0, len(wire)):
            if tag == _PARTS and len(parts) == MAX_PARTS:
                raise DecodeError(f"more than {MAX_PARTS} parts")
            elif tag == _PARTS:
                parts.append(_part(wire, value, end))
            else:
                rest.append(wire[begin:end])
        other = pb.PutRequest.FromString(b"".join(rest)) if rest else None
        return cls(parts, other.origin if other is not None and other.HasField("origin") else None)


def _part(wire: bytes, begin: int, end: int) -> Part:
    head, data = [], memoryview(b"")
    for tag, first, value, last in _fields(wire, begin, end):
        if tag == _DATA:
            data = memoryview(wire)[value:last]
        else:
            head.append(wire[first:last])
    kept = KEPT * (len(wire) - len(data)) <= len(wire)
    return Part(pb.BlockPart.FromString(b"".join(head)), data if kept else bytes(data))


def _fields(wire: bytes, at: int, end: int) -> Iterator[tuple[int, int, int, int]]:
    """Each field's tag, where it begins, where its value begins, and where it ends."""
    while at < end:
        begin = at
        tag, at = _read_varint(wire, at, end)
        kind, value = tag & 7, at
        if kind == DELIMITED:
            size, value = _read_varint(wire, at, end)
            at = value + size
        elif kind == VARINT:
            _, at = _read_varint(wire, at, end)
        elif kind in (FIXED64, FIXED32):
            at += 8 if kind == FIXED64 else 4
        else:
            raise DecodeError(f"a field of wire type {kind}")
        if at > end:
            raise DecodeError("a field ends behind its message")
        yield tag, begin, value, at


def _read_varint(wire: bytes, at: int, end: int) -> tuple[int, int]:
    """A varint, and where it ends."""
    number = 0
    for index in range(at, min(end, at + _MOST_VARINT)):
        number |= (wire[index] & 0x7F) << 7 * (index - at)
        if wire[index] < 0x80:
            return number, index + 1
    raise DecodeError("a varint does not end")


def _varint(number: int) -> bytes:
    out = bytearray()
    while number > 0x7F:
        out.append(number & 0x7F | 0x80)
        number >>= 7
    out.append(number)
    return bytes(out)
