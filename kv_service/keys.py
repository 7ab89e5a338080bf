"""Names of blocks: a SHA-256 chain over everything that a block's bytes depend on. Pure.

What is hashed is a sequence of items, each

    tag (1 byte) | length of the value (8 bytes, little-endian) | value

so that no two different inputs are the same bytes. Text is UTF-8; a number is 4 bytes, little-endian, unsigned.

    root   00 "forefetch.kv.root.1"  01 tenant  02 model digest  03 layers, KV heads, head dim  04 rope
           05 KV format  06 parameters of the format  07 page size
    block  00 "forefetch.kv.block.1"  01 digest of the block before, or of the root (32 bytes)  02 token ids (a number each)

A digest of one kind never equals one of the other: item 00 differs.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Iterable, Sequence
from typing import NamedTuple

DIGEST_BYTES = 32
_ROOT, _BLOCK = b"forefetch.kv.root.1", b"forefetch.kv.block.1"


class Geometry(NamedTuple):
    """What shapes a block besides its page size."""

    layers: int
    kv_heads: int
    head_dim: int


class Key(NamedTuple):
    """A block's name. `parent` is the digest of the block before, the root for the first; `token_ids` are the block's own.

    `position` is the number of tokens before the block. It is no part of the digest and decides about eviction only.
    """

    digest: bytes
    parent: bytes
    token_ids: tuple[int, ...]
    position: int = 0


class Origin(NamedTuple):
    """What a chain's blocks are, for operators: the parameters of `root_key` but for the tenant."""

    model_digest: str
    geometry: Geometry
    rope: str
    kv_format: str
    params: str
    page_size: int


def root_key(
    tenant: bytes, model_digest: str, geometry: Geometry, rope: str, kv_format: str, params: str, page_size: int
) -> bytes:
    """Where the chains of one tenant, model and format begin. `rope`, `kv_format` and `params` are canonical texts of the
    router's: equal where, and only where, equal tokens give equal bytes. Raises ValueError for a number outside 0..2**32-1."""
    texts = (rope, kv_format, params)
    rope_item, format_item, params_item = (text.encode() for text in texts)
    return _digest(
        _ROOT, tenant, model_digest.encode(), _numbers(geometry), rope_item, format_item, params_item, _numbers((page_size,))
    )


def child_key(parent: bytes, token_ids: Sequence[int]) -> bytes:
    """The digest of the block of `token_ids` after `parent` (a block's digest or the root). ValueError: see `root_key`."""
    if len(parent) != DIGEST_BYTES:
        raise ValueError(f"a parent is {DIGEST_BYTES} bytes, not {len(parent)}")
    return _digest(_BLOCK, parent, _numbers(token_ids))


def chain(root: bytes, blocks: Iterable[Sequence[int]]) -> list[Key]:
    """The keys of consecutive blocks from the first on."""
    keys: list[Key] = []
    for token_ids in blocks:
        keys.append(next_key(root, keys[-1] if keys else None, token_ids))
    return keys


def next_key(root: bytes, before: Key | None, token_ids: Sequence[int]) -> Key:
    """The key of the block of `token_ids` after `before`; None: it is the first."""
    parent, position = (before.digest, before.position + len(before.token_ids)) if before else (root, 0)
    return Key(child_key(parent, token_ids), parent, tuple(token_ids), position)


def _digest(*values: bytes) -> bytes:
    items = (struct.pack("<BQ", tag, len(value)) + value for tag, value in enumerate(values))
    return hashlib.sha256(b"".join(items)).digest()


def _numbers(values: Sequence[int]) -> bytes:
    try:
        return struct.pack(f"<{len(values)}I", *values)
    except struct.error:
        raise ValueError("numbers must be within 0 and 2**32-1") from None
