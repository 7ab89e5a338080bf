"""A step's attention over sealed pages: as the trunk is written, and as a recorded step has it, without the host.

Rows are written first: those that decode to their tails, those of prompts behind all tails, where they stay until `commit`;
then chunks become sinks and pages as far as their own queries see them so; then everybody reads.
Letters: R rows of a step; the others as everywhere.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from forefetch.kernels.attention import ChunkPlan, decode_sealed, enter_chunks, prefill_sealed
from forefetch.kernels.attention.sealed import SealedPlan
from forefetch.kernels.kv_codec.formats import SATURATION
from forefetch.kernels.qkv import HeadNorms, enter
from router_service.batch import StepBatch
from router_service.cache import DenseStep

if TYPE_CHECKING:
    from router_service.sealed import SealedCache


@dataclass(frozen=True, slots=True)
class SealedStep:
    """What the layers of one step share. `places`: where decode rows, and in fixed layouts prompt rows behind them, go in the
    flattened tails; `early`: which decode rows are sinks."""

    cache: SealedCache
    batch: StepBatch
    plan: SealedPlan
    places: Tensor  # [decodes or R] int64
    positions: Tensor  # [decodes]
    early: Tensor | None  # [decodes] bool; None: none
    chunks: ChunkPlan | None  # None: no prompt rows
    filled: int  # pages that they fill at most
    exact: DenseStep | None
    scale: float

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """q [R, Hq, D], k, v [R, Hkv, D] -> [R, Hq, D]. All rows are written first, so that a chunk sees itself."""
        cache, place = self.cache, self.cache.place.get(layer)
        if place is None:
            assert self.exact is not None
            return self.exact(cache.exempt[layer], q, k, v)
        new = torch.stack((k, v)).clamp_(-SATURATION, SATURATION).half().transpose(1, 2)  # [2, Hkv, R, D]
        out, n, end = torch.zeros_like(q), self.batch.decodes, self.batch.tokens
        if n:
            self._write(place, new[:, :, :n])
            out[:n] = decode_sealed(q[:n], cache.layer(place), self.plan, cache.format, self.scale)
        if self.chunks is not None:
            cache.rows[place][:, :, : end - n] = new[:, :, n:end]
            out[n:end] = self._chunked(place, q[n:end], self.chunks)
        return out

    def decode(self, layer: int, qkv: Tensor, cos: Tensor, sin: Tensor, norms: HeadNorms | None) -> Tensor:
        """The QKV product's rows [R, (Hq + 2 Hkv) D] of a step in a fixed layout that is `recordable` -> [R, Hq, D]."""
        cache, place = self.cache, self.cache.place.get(layer)
        if place is None:
            assert self.exact is not None
            return self.exact.decode(cache.exempt[layer], qkv, cos, sin, norms)
        kv, decodes = cache.layer(place), self.batch.decodes
        q = enter(qkv, cos, sin, norms, self.places, kv.tail_k.flatten(1, 2), kv.tail_v.flatten(1, 2), limit=SATURATION)
        if self.chunks is None:
            return decode_sealed(q, kv, self.plan, cache.format, self.scale)
        seen = decode_sealed(q[:decodes], kv, self.plan, cache.format, self.scale)
        return torch.cat((seen, self._chunked(place, q[decodes:], self.chunks)))

    def _write(self, place: int, new: Tensor) -> None:
        """Decode rows [2, Hkv, n, D] into their tails, and the first tokens of a sequence into its sinks."""
        cache = self.cache
        cache.layer_rows(place).tails.flatten(2, 3).index_copy_(2, self.places[: self.batch.decodes], new)
        if self.early is not None and cache.format.sinks:
            lanes = self.plan.tail[self.early].long()
            cache.sinks[place][:, :, lanes, self.positions[self.early].long()] = new[:, :, self.early]

    def _chunked(self, place: int, q: Tensor, chunks: ChunkPlan) -> Tensor:
        """The chunks' rows, which are in place: pages sealed, queries answered."""
        cache, kv, rows = self.cache, self.cache.layer(place), self.cache.layer_rows(place)
        enter_chunks(kv, rows, chunks, cache.format, self.filled)
        return prefill_sealed(q, rows, kv, chunks, cache.format, self.scale)
