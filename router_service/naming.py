"""Names of this router's blocks: the canonical root of its chains for each tenant."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

from forefetch.spec import ModelSpec
from kv_service.client import Geometry, Key, Origin, next_key, root_key

NO_TOKEN = 2**32 - 1
TENANTS = 1024
"""Roots that are remembered."""


@dataclass(frozen=True)
class Naming:
    """Everything that a block's bytes depend on besides its tokens. `params`: parameters of the KV format, the compute type,
    whatever else changes bytes; equal where, and only where, equal tokens give equal bytes."""

    digest: str
    geometry: Geometry
    rope: str
    kv_format: str
    params: str
    page_size: int

    @classmethod
    def of(cls, spec: ModelSpec, digest: str, kv_format: str, params: str, page_size: int) -> Naming:
        """Of the checkpoint with this digest."""
        rope = f"{spec.rope.kind} theta={spec.rope.theta!r} {sorted(spec.rope.params.items())!r}"
        return cls(digest, Geometry(spec.layers, spec.kv_heads, spec.head_dim), rope, kv_format, params, page_size)

    @property
    def origin(self) -> Origin:
        """The same, as KV services show it to operators."""
        return Origin(self.digest, self.geometry, self.rope, self.kv_format, self.params, self.page_size)

    def extend(self, keys: list[Key], tenant: str, tokens: Sequence[int], blocks: int) -> list[Key]:
        """Appends to `keys`, the first keys of `tokens`, until there are `blocks`."""
        size, root = self.page_size, _root(self, tenant)
        for block in range(len(keys), blocks):
            keys.append(next_key(root, keys[-1] if keys else None, tokens[block * size : (block + 1) * size]))
        return keys


def rows_key(key: Key) -> Key:
    """The name of the float16 rows behind a block: its child by tokens that no vocabulary has."""
    return next_key(b"", key, (NO_TOKEN,) * len(key.token_ids))


@lru_cache(TENANTS)
def _root(naming: Naming, tenant: str) -> bytes:
    return root_key(
        tenant.encode(),
        naming.digest,
        naming.geometry,
        naming.rope,
        naming.kv_format,
        naming.params,
        naming.page_size,
    )
