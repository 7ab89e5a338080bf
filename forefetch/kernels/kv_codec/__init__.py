"""Sealing K and V into pages of a few bits per element, and opening them: formats, byte layout, reference."""

from __future__ import annotations

from torch import Tensor

from forefetch.kernels.kv_codec import ref
from forefetch.kernels.kv_codec.formats import NAMES, KvFormat
from forefetch.kernels.kv_codec.ref import open_pages

__all__ = ["NAMES", "KvFormat", "move_tails", "open_pages", "seal", "seal_tails"]


def seal(k: Tensor, v: Tensor, format: KvFormat, *, skip: int = 0, weight: Tensor | None = None) -> Tensor:
    """`ref.seal`, and the same bytes wherever it runs: k, v [n, T, D] -> blobs uint8 [n, blob_bytes]."""
    if k.is_cuda:
        from forefetch.kernels.kv_codec import sealing

        return sealing.seal(k, v, format, skip=skip, weight=weight)
    return ref.seal(k, v, format, skip=skip, weight=weight)


def seal_tails(tails: Tensor, pages: Tensor, due: Tensor, format: KvFormat) -> None:
    """Tails float16 [L, 2, Hkv, lanes, slots, D] that begin with a full page, into pages uint8 [L, Hkv, P, blob_bytes].

    `due` int32 [n, 3], on their device: lane, page number, first tokens to leave out."""
    if tails.is_cuda:
        from forefetch.kernels.kv_codec import sealing

        sealing.seal_tails(tails, pages, due, format)
        return
    for skip in sorted(set(due[:, 2].tolist())):
        lanes, numbers, _ = due[due[:, 2] == skip].long().unbind(1)
        k, v = (tails[:, kind][:, :, lanes, : format.page].flatten(0, 2) for kind in (0, 1))
        pages[:, :, numbers] = ref.seal(k, v, format, skip=skip).view(*pages.shape[:2], len(lanes), -1)


def move_tails(tails: Tensor, due: Tensor, format: KvFormat) -> None:
    """The first page of these tails was sealed: the `recent` tokens behind it move to the front."""
    if not format.recent:
        return
    if tails.is_cuda:
        from forefetch.kernels.kv_codec.sealing.tails import move

        move(tails, due, format)
        return
    lanes = due[:, 0].long()
    tails[..., lanes, : format.recent, :] = tails[..., lanes, format.page : format.tail_tokens, :]
