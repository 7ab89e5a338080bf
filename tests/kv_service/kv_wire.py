"""Messages as the client would never send them."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import grpc
import pytest
import xxhash

from forefetch import rpc
from forefetch.errors import ForefetchError
from forefetch.v1 import kv_pb2 as pb
from kv_service.client import Key

if TYPE_CHECKING:
    pass

MIB = 1 << 20


def wire(key: Key) -> pb.BlockKey:
    return pb.BlockKey(digest=key.digest, parent=key.parent, token_ids=key.token_ids)


def put_of(**fields: Any) -> pb.PutRequest:
    """A message of one part."""
    return pb.PutRequest(parts=[pb.BlockPart(**fields)])


def whole(key: Key, data: bytes, **changes: Any) -> pb.PutRequest:
    """A block in one part."""
    fields = {"key": wire(key), "size": len(data), "data": data, "last": True, "checksum": xxhash.xxh3_128_digest(data)}
    return put_of(**{**fields, **changes})


def refusal(call: Callable[[], Any]) -> ForefetchError:
    with pytest.raises(grpc.RpcError) as caught:
        call()
    return rpc.error_of(caught.value)
