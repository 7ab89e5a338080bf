"""K and V of running requests: one pool of pages per layer, in device memory, allocated once.

A page is `page_size` tokens of one layer and KV head, contiguous as [page, D]; pools are [Hkv, n_pages, page, D], so that
consecutive pages of a request form one [tokens, D] matrix per head. A block is one page index over all layers and heads:
the unit that is handed to the KV service.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from forefetch.errors import Mismatch
from forefetch.kernels import attention
from forefetch.kernels.qkv import HeadNorms, enter
from forefetch.lending import Lent
from forefetch.spec import ModelSpec
from kv_service.client import Pool
from router_service.batch import StepBatch

_log = logging.getLogger(__name__)
Place = Callable[[int], memoryview | None]
"""Gives memory for so many bytes, if it has any."""


def no_place(size: int) -> None:
    """Has none."""


def room(size: int, place: Place) -> tuple[npt.NDArray[np.uint8], memoryview]:
    """Memory for a block, from `place` if it has any: to write to, and to hand on."""
    into = place(size)
    data = np.empty(size, np.uint8) if into is None else np.frombuffer(into, np.uint8)
    return data, data.data if into is None else into


def _lent(shape: tuple[int, ...], dtype: torch.dtype) -> Lent | None:
    try:
        return Lent(math.prod(shape) * dtype.itemsize)
    except Mismatch as error:
        _log.info("blocks are copied for the KV service: %s", error)
        return None


def _pools(
    shape: tuple[int, ...], dtype: torch.dtype, device: torch.device, lent: Lent | None
) -> tuple[torch.Tensor, Pool | None]:
    """Zeros [layers, K V, Hkv, pages, page, D], and where others find them, if they do."""
    if lent is None:
        return torch.zeros(shape, dtype=dtype, device=device), None
    part = math.prod(shape[4:]) * dtype.itemsize
    pool = Pool(lent.name, math.prod(shape[:3]), shape[3] * part, part, shape[3])
    return torch.frombuffer(lent.memory, dtype=dtype).view(shape), pool


class KvCache:
    """`pages` pages of `page_size` tokens in `dtype` on `device`."""

    def __init__(
        self, spec: ModelSpec, *, pages: int, page_size: int, dtype: torch.dtype, device: torch.device, lend: bool = False
    ) -> None:
        """`lend`: other processes of this user may read the pages, on a CPU."""
        self.page_size = page_size
        self.dtype = dtype
        shape = (spec.kv_heads, pages, page_size, spec.head_dim)
        # One tensor, so that one call copies a block.
        self._lent = _lent((spec.layers, 2, *shape), dtype) if lend and device.type == "cpu" else None
        self.pools, self.pool = _pools((spec.layers, 2, *shape), dtype, device, self._lent)
        self.k, self.v = list(self.pools[:, 0].unbind()), list(self.pools[:, 1].unbind())
        self.block_bytes = self.most_block_bytes = self.page_bytes(spec, page_size, dtype)
        self._limit = torch.finfo(dtype).max
        # Blocks that come in are copied beside the running step, not between its kernels.
        self._incoming = torch.Stream(device) if device.type == "cuda" else None

    @staticmethod
    def page_bytes(spec: ModelSpec, page_size: int, dtype: torch.dtype) -> int:
        """Bytes of one block: a page of every layer and head, K and V."""
        return spec.kv_bytes_per_token(dtype.itemsize) * page_size

    def write(self, layer: int, slots: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
        """Stores k, v [T, Hkv, D] at `slots` [T] (page * page_size + offset). Values beyond the dtype's range saturate."""
        for pool, rows in ((self.k[layer], k), (self.v[layer], v)):
            pool.flatten(1, 2).index_copy_(1, slots, self._narrowed(rows).transpose(0, 1))

    def step(self, batch: StepBatch, dtype: torch.dtype, scale: float) -> DenseStep:
        """The attention of a step's rows."""
        plan: attention.DecodePlan | attention.PagedPlan | None = batch.paged if batch.decodes else None
        if batch.decodes and batch.paged is None:
            plan = attention.plan_decode(batch.page_table, batch.lengths, self.page_size, batch.token_ids.device, dtype)
        return DenseStep(self, batch, plan, scale)

    def _narrowed(self, rows: torch.Tensor) -> torch.Tensor:
        return rows if rows.dtype == self.dtype else rows.clamp(-self._limit, self._limit).to(self.dtype)

    def prepare(self, batch: StepBatch) -> None:
        """Nothing has to be."""

    def recordable(self, batch: StepBatch) -> bool:
        """Any step is."""
        return True

    def commit(self, batch: StepBatch) -> None:
        """Nothing is left to do: every row lies where it stays."""

    def heed(self, void: torch.Tensor) -> None:
        """A commit changes nothing here."""

    def read_block(self, page: int, place: Place = no_place) -> memoryview:
        """The bytes of a sealed block: for each layer K then V, each [Hkv, page, D]. May be called from any thread."""
        block = self.pools[:, :, :, page].view(torch.uint8)
        if self._incoming is not None:
            block = block.contiguous().cpu()
        data, told = room(self.block_bytes, place)
        # By numpy: without the GIL, and without PyTorch's other threads, whose cores a step needs.
        np.copyto(data.reshape(block.shape), block.numpy())
        return told

    def write_block(self, page: int, data: bytes | memoryview) -> None:
        """The inverse of `read_block`: fills a page that nobody reads yet. Returns when the bytes are there; any thread.

        Raises ValueError when `data` is not `block_bytes` long."""
        if len(data) != self.block_bytes:
            raise ValueError(f"a block has {self.block_bytes} bytes, not {len(data)}")
        block = torch.frombuffer(bytearray(data), dtype=self.dtype).view(len(self.k), 2, *self.k[0][:, page].shape)
        with torch.inference_mode(), self._incoming or nullcontext():
            for layer, (k, v) in enumerate(block):
                self.k[layer][:, page].copy_(k)
                self.v[layer][:, page].copy_(v)
        if self._incoming is not None:
            self._incoming.synchronize()

    def tail_start(self, computed: int, loaded: int) -> int:
        """Where the tokens begin that no block holds, of a request with so many positions computed and pages loaded."""
        return computed // self.page_size * self.page_size

    def read_tail(self, pages: Sequence[int], lane: int, start: int, end: int) -> torch.Tensor:
        """K and V of a request's committed positions start .. end, for each layer K then V, each [Hkv, end - start, D]: a copy,
        flat, uint8, on the device. `lane`: see Request."""
        slots = self._slots(pages, start, end)
        parts = [pool[layer].flatten(1, 2)[:, slots] for layer in range(len(self.k)) for pool in (self.k, self.v)]
        return torch.stack(parts).view(-1).view(torch.uint8) if parts else torch.empty(0, dtype=torch.uint8)

    def write_tail(self, pages: Sequence[int], lane: int, start: int, end: int, data: bytes) -> None:
        """The inverse of `read_tail`, between two steps. ValueError: not the bytes of so many positions."""
        if len(data) * self.page_size != (end - start) * self.block_bytes:
            raise ValueError(f"{end - start} positions do not take {len(data)} bytes")
        if not data:
            return
        slots = self._slots(pages, start, end)
        shape = (len(self.k), 2, len(self.k[0]), end - start, self.k[0].shape[-1])
        rows = torch.frombuffer(bytearray(data), dtype=self.dtype).view(shape).to(slots.device)
        for layer, (k, v) in enumerate(rows):
            self.k[layer].flatten(1, 2)[:, slots] = k
            self.v[layer].flatten(1, 2)[:, slots] = v

    def _slots(self, pages: Sequence[int], start: int, end: int) -> torch.Tensor:
        size = self.page_size
        slots = [pages[position // size] * size + position % size for position in range(start, end)]
        return torch.tensor(slots, dtype=torch.int64, device=self.k[0].device if self.k else "cpu")


@dataclass(frozen=True, slots=True)
class DenseStep:
    """What the layers of one step share."""

    cache: KvCache
    batch: StepBatch
    plan: attention.DecodePlan | attention.PagedPlan | None  # None without decoding rows
    scale: float

    def decode(
        self, layer: int, qkv: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, norms: HeadNorms | None
    ) -> torch.Tensor:
        """The QKV product's rows [T, (Hq + 2 Hkv) D] of a step in a fixed layout -> [T, Hq, D], without the host."""
        assert isinstance(self.plan, attention.PagedPlan)
        keys, values = self.cache.k[layer], self.cache.v[layer]
        q = enter(qkv, cos, sin, norms, self.batch.slots, keys.flatten(1, 2), values.flatten(1, 2))
        if self.batch.chunked is None:
            return attention.decode_paged(q, keys, values, self.plan, self.scale)
        decoding, prompt = q.split_with_sizes(self.batch.layout)
        seen = attention.decode_paged(decoding, keys, values, self.plan, self.scale)
        return torch.cat((seen, attention.prefill_chunks(prompt, keys, values, self.batch.chunked, self.scale)))

    def __call__(self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        """q [T, Hq, D], k, v [T, Hkv, D] -> [T, Hq, D]. All rows are written first, so that a chunk sees itself."""
        self.cache.write(layer, self.batch.slots, k, v)
        keys, values, n = self.cache.k[layer], self.cache.v[layer], self.batch.decodes
        if self.plan is not None and n == len(q):
            return attention.decode_planned(q, keys, values, self.plan, self.scale)
        out = torch.zeros_like(q)
        if self.plan is not None:
            out[:n] = attention.decode_planned(q[:n], keys, values, self.plan, self.scale)
        for rows in self.batch.prefills:
            span = slice(rows.first, rows.first + rows.count)
            out[span] = attention.prefill(q[span], keys, values, rows.pages, rows.start, self.scale)
        return out
