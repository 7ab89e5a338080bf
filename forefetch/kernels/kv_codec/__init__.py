"""Sealing K and V into pages of a few bits per element, and opening them: formats, byte layout, reference."""

from __future__ import annotations

from forefetch.kernels.kv_codec.formats import NAMES, KvFormat
from forefetch.kernels.kv_codec.ref import open_pages, seal

__all__ = ["NAMES", "KvFormat", "open_pages", "seal"]
