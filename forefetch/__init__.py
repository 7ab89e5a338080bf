"""Serves Mixture-of-Experts language models whose experts do not fit next to their attention layers."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from forefetch.client import Client, SyncClient

__all__ = ["Client", "SyncClient"]


def __getattr__(name: str) -> Any:
    """The client is imported when it is asked for, so that `import forefetch` costs nothing."""
    if name in __all__:
        from forefetch import client

        return getattr(client, name)
    raise AttributeError(name)
