"""Protobuf messages as plain Python values, for `--json`. Unlike protobuf's own JSON, 64-bit integers stay numbers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from google.protobuf.message import Message


def plain(value: Any) -> Any:
    """Dictionaries with the proto's field names, lists and scalars, bytes as hexadecimal. Unset optional and message
    fields are None."""
    if isinstance(value, Message):
        return {field.name: _field(value, field) for field in value.DESCRIPTOR.fields}
    if isinstance(value, Mapping):
        return {key: plain(item) for key, item in value.items()}
    if isinstance(value, bytes):
        return value.hex()
    return value if isinstance(value, str | int | float) else [plain(item) for item in value]


def _field(message: Message, field: Any) -> Any:
    if field.has_presence and not message.HasField(field.name):
        return None
    return plain(getattr(message, field.name))
