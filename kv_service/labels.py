"""Names for operators: which tenant a tag stands for, and what a block is. Pure; nothing is decided by them."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping

import xxhash

from kv_service.store_order import Entry

TAG_BYTES = 16
MAX_ORIGINS = 1024
"""Most descriptions of blocks remembered."""


def tag_of(tenant: str) -> bytes:
    """What a tenant's names begin with."""
    return hashlib.sha256(b"forefetch.kv.tenant.1\0" + tenant.encode()).digest()[:TAG_BYTES]


class Labels:
    """`tenants`: names by tag. `origins`: serialised descriptions by their digests."""

    def __init__(self, tenants: Mapping[bytes, str] | None = None, origins: Mapping[bytes, bytes] | None = None) -> None:
        self._tenants, self._origins = dict(tenants or {}), dict(origins or {})
        self._tags: dict[str, bytes] = {}

    def tag(self, tenant: str) -> bytes:
        """The tenant's tag; its name is remembered."""
        tag = self._tags.get(tenant)
        if tag is None:
            tag = self._tags[tenant] = tag_of(tenant)
            self._tenants[tag] = tenant
        return tag

    def origin(self, text: bytes) -> bytes:
        """The digest of a description, which is remembered; b"" for none, or when there are too many."""
        origin = xxhash.xxh3_64_digest(text) if text else b""
        if not text or (origin not in self._origins and len(self._origins) >= MAX_ORIGINS):
            return b""
        self._origins[origin] = text
        return origin

    def of(self, entry: Entry) -> tuple[str, bytes]:
        """(tenant, description) of a block."""
        return self._tenants.get(entry.tag, entry.tag.hex()), self._origins.get(entry.origin, b"")

    def behind(self, entries: Iterable[Entry]) -> tuple[list[tuple[bytes, str]], list[tuple[bytes, bytes]]]:
        """Tags with their tenants, and digests with their descriptions, of some blocks."""
        tenants: dict[bytes, str] = {}
        origins: dict[bytes, bytes] = {}
        for entry in entries:
            if entry.tag in self._tenants:
                tenants[entry.tag] = self._tenants[entry.tag]
            if entry.origin in self._origins:
                origins[entry.origin] = self._origins[entry.origin]
        return list(tenants.items()), list(origins.items())
