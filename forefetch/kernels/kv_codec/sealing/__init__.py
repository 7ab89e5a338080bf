"""Sealing on a GPU: the same bytes as `ref.seal`, from where the values lie to where the pages are, nothing read on the host.

Fits and codes of a page are shared out among many programs: a page takes two launches, three with third bits, four for fp4.
Every step is the reference's: what it sums in float64 is summed in float64 here, which leaves no trace of the order after
rounding to float16, and products are not fused with sums.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import triton
from torch import Tensor

from forefetch.kernels.kv_codec.fit import ALTERNATIONS
from forefetch.kernels.kv_codec.formats import KvFormat
from forefetch.kernels.kv_codec.sealing.entries import CHUNKS, EACH, TAILS
from forefetch.kernels.kv_codec.sealing.fit import RULES
from forefetch.kernels.kv_codec.sealing.grids import CHANNELS, KEYS, TOKENS, _choose, _fit_pages, _pack_bits
from forefetch.kernels.kv_codec.sealing.pack import bit_order

PAGES = 2048
"""Pages of one layer and head that are sealed at a time: what lies between the launches takes 40 KB of each at most."""

FIT_WARPS, CHOOSE_WARPS = 4, 4


@dataclass(frozen=True, slots=True)
class Job:
    """k, v [A, B, slots, D] of equal strides, the last two dimensions contiguous; pages uint8 [A, B, P, blob_bytes] contiguous.

    `table`, `kind`: see `entries`; `entries`: how many pages of each [A, B] there are at most."""

    k: Tensor
    v: Tensor
    pages: Tensor
    format: KvFormat
    kind: int
    entries: int
    table: Tensor
    tables: Tensor
    slots: int = 0
    rows_at: int = 0
    skip: int = 0
    weight: Tensor | None = None

    def check(self) -> None:
        """ValueError for what the kernels do not read."""
        format, (outer, inner, _, dim) = self.format, self.k.shape
        fits = self.v.shape == self.k.shape and dim == format.head_dim and self.k.stride() == self.v.stride()
        fits = fits and self.pages.shape[:2] == (outer, inner) and self.pages.shape[3] == format.blob_bytes
        if not fits or self.k.stride()[2:] != (dim, 1) or not self.pages.is_contiguous():
            raise ValueError(f"cannot seal {tuple(self.k.shape)} and {tuple(self.v.shape)} as {format}")

    def run(self) -> None:
        """Launches everything."""
        self.check()
        units = self.entries * self.k.shape[0] * self.k.shape[1]
        if not units:
            return
        if self.format.name == "fp4":
            from forefetch.kernels.kv_codec.sealing.fp4 import seal_fp4

            seal_fp4(self, units)
        else:
            self._grids(units)

    @property
    def where(self) -> tuple[Any, ...]:
        """What every kernel needs to find its page."""
        heads = self.k.shape[1]
        return (
            *(self.table, self.tables, len(self.table), self.tables.shape[-1], self.slots, self.rows_at, self.skip),
            self.entries,
            *(heads, self.k.stride(0), self.k.stride(1), self.pages.stride(1)),
        )

    @property
    def options(self) -> dict[str, Any]:
        """Constants of all kernels."""
        chunks = max(8, triton.next_power_of_2(len(self.table))) if self.kind == CHUNKS else 1
        return {"F": self.format, "KIND": self.kind, "MP": chunks}

    def _grids(self, units: int) -> None:
        format, device = self.format, self.k.device
        page, dim = format.page, format.head_dim
        floats = torch.empty((units, 4 * dim + 2 * page), dtype=torch.float32, device=device)
        errors = torch.empty((units, 2 * dim), dtype=torch.float64, device=device)
        thirds = format.name in ("asym3", "mixed")
        bits = torch.empty((units, 2, page * dim) if thirds else 1, dtype=torch.uint8, device=device)
        tile = {"R": triton.next_power_of_2(page), "C": triton.next_power_of_2(dim)}
        mixed = format.name == "mixed"
        grids = {"G": RULES["coarse" if mixed else format.name], "FINE": RULES["fine"] if mixed else None}
        rule = {**self.options, **grids, **tile, "enable_fp_fusion": False}
        cost = errors if self.weight is None else self.weight.float().contiguous()
        how = {"ROUNDS": ALTERNATIONS, "WEIGHTED": self.weight is not None}
        shares = dim // CHANNELS + page // TOKENS
        _fit_pages[(units, shares)](
            self.k, self.v, self.pages, cost, floats, errors, bits, *self.where, **how, **rule, num_warps=FIT_WARPS
        )
        _choose[(units, page // KEYS)](self.k, self.pages, floats, errors, bits, *self.where, **rule, num_warps=CHOOSE_WARPS)
        for part, section in enumerate(("k_thirds", "v_thirds")):
            if section in format.sections:
                self._pack(units, bits, part, section)

    def _pack(self, units: int, bits: Tensor, part: int, section: str) -> None:
        order, size = bit_order(self.format, section, bits.device), self.format.sections[section].size
        where, constants = self.where, {"KEYS": part == 0, "SIZE": size, "N": 256}
        _pack_bits[(units, triton.cdiv(size, 256))](
            *(self.pages, bits, order, *where[:8], where[-1], part), **constants, **self.options, num_warps=4
        )


def seal(k: Tensor, v: Tensor, format: KvFormat, *, skip: int = 0, weight: Tensor | None = None) -> Tensor:
    """`ref.seal`: k, v [n, T, D] -> blobs uint8 [n, blob_bytes]."""
    shape = (len(k), format.page, format.head_dim)
    if k.shape != shape or v.shape != shape:
        raise ValueError(f"cannot seal {tuple(k.shape)} and {tuple(v.shape)} as {format}")
    blobs = torch.empty((len(k), format.blob_bytes), dtype=torch.uint8, device=k.device)
    keys, values = (part.contiguous().view(1, 1, -1, format.head_dim) for part in (k, v))
    none = torch.empty(0, dtype=torch.int32, device=k.device)
    for at in range(0, len(k), PAGES):
        span, some = slice(at * format.page, (at + PAGES) * format.page), blobs[at : at + PAGES]
        own = None if weight is None else weight[at : at + PAGES]
        job = Job(
            keys[:, :, span], values[:, :, span], some[None, None], format, EACH, len(some), none, none, skip=skip, weight=own
        )
        job.run()
    return blobs


def seal_tails(tails: Tensor, pages: Tensor, due: Tensor, format: KvFormat) -> None:
    """Tails float16 [L, 2, Hkv, lanes, slots, D] that begin with a full page, into pages [L, Hkv, P, blob_bytes].

    `due` int32 [n, 3] on the device: lane, page number, tokens to skip."""
    flat = tails.flatten(3, 4)
    most = max(1, PAGES // (pages.shape[0] * pages.shape[1]))
    for some in due.split(most):
        Job(flat[:, 0], flat[:, 1], pages, format, TAILS, len(some), some, some, slots=tails.shape[4]).run()


def seal_chunks(
    tails: Tensor, pages: Tensor, chunks: Tensor, tables: Tensor, lanes: int, entries: int, format: KvFormat
) -> None:
    """The pages that chunks of prompts fill, of one layer: tails float16 [2, Hkv, lanes, slots, D], pages [Hkv, P, blob_bytes].

    `chunks` int32 [M, 5], `tables` [M, P]: `sealed_chunks.SealedChunkPlan`. A step's rows lie behind `lanes` lanes. `entries`:
    pages that the chunks can fill at most."""
    flat = tails.flatten(2, 3)
    slots = tails.shape[3]
    k, v, rows_at = flat[None, 0], flat[None, 1], lanes * slots
    Job(k, v, pages[None], format, CHUNKS, entries, chunks, tables, slots=slots, rows_at=rows_at).run()
