"""Sealing K and V into pages of a few bits per element, and opening them: formats, byte layout, reference."""

from __future__ import annotations

from torch import Tensor

from forefetch.kernels.kv_codec import ref
from forefetch.kernels.kv_codec.formats import NAMES, KvFormat
from forefetch.kernels.kv_codec.ref import open_pages

__all__ = ["NAMES", "KvFormat", "open_pages", "seal"]


def seal(k: Tensor, v: Tensor, format: KvFormat, *, skip: int = 0, weight: Tensor | None = None) -> Tensor:
    """`ref.seal`, and the same bytes wherever it runs: k, v [n, T, D] -> blobs uint8 [n, blob_bytes]."""
    if k.is_cuda:
        from forefetch.kernels.kv_codec import triton_seal

        if triton_seal.supports(format):
            return triton_seal.seal(k, v, format, skip=skip, weight=weight)
    return ref.seal(k, v, format, skip=skip, weight=weight)
