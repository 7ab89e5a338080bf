"""Attention over sealed pages, a float16 tail and float16 sinks: where everything lies, and the plain reference.

Token i of a row of the batch with `sealed` sealed pages of T tokens is read from

    i < sinks             sink_k, sink_v [.., tail, i]                   never from page 0's codes
    i < sealed * T        page `page_table[row, i / T]`, its token i % T
    else                  tail_k, tail_v [.., tail, i - sealed * T]

where `tail` is the row's entry, so a row holds `lengths - sealed * T` tokens in its tail. A row without sealed pages reads its
first tokens from the sink block too. Nothing else is read: page table entries beyond `sealed`, tail and sink slots beyond the
length may hold anything, NaN included.

Letters: B rows, Hq / Hkv query / KV heads, T page tokens, D head dim, S sinks.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from forefetch.kernels.kv_codec.formats import KvFormat
from forefetch.kernels.kv_codec.ref import open_pages


@dataclass(frozen=True, slots=True)
class SealedKv:
    """K and V of one layer. All contiguous."""

    pages: Tensor  # uint8 [Hkv, n_pages, blob_bytes]
    tail_k: Tensor  # float16 [Hkv, n_tails, tail_tokens, D]
    tail_v: Tensor
    sink_k: Tensor  # float16 [Hkv, n_tails, S, D]
    sink_v: Tensor


@dataclass(frozen=True, slots=True)
class SealedPlan:
    """Which row reads what; the same for all layers of a step. int32, on the pages' device."""

    page_table: Tensor  # [B, max_pages]
    sealed: Tensor  # [B]: sealed pages of the row
    lengths: Tensor  # [B]: visible tokens, >= 1
    tail: Tensor  # [B]: the row's entry among tails and sinks


@dataclass(frozen=True, slots=True)
class Rows:
    """A layer's tails and sinks of K and V, float16 [2, Hkv, entries, .., D]; entries from `lanes` on are a step's rows."""

    tails: Tensor
    sinks: Tensor
    lanes: int

    @property
    def own(self) -> Tensor:
        """The step's rows [2, Hkv, rows, D]."""
        return self.tails[:, :, self.lanes :].flatten(2, 3)


def decode_sealed_ref(q: Tensor, kv: SealedKv, plan: SealedPlan, format: KvFormat, scale: float) -> Tensor:
    """q [B, Hq, D] -> [B, Hq, D] in q's type; computed in float32, or in float64 for float64 queries."""
    dtype = torch.promote_types(q.dtype, torch.float32)
    rows = []
    for row, query in enumerate(q):
        k, v = gather_row(kv, plan, row, format, dtype)  # [Hkv, L, D]
        grouped = query.to(dtype).view(len(k), -1, query.shape[1])  # [Hkv, G, D]
        weights = (grouped @ k.transpose(1, 2) * scale).softmax(-1)
        rows.append((weights @ v).flatten(0, 1))
    return torch.stack(rows).to(q.dtype)


def gather_row(kv: SealedKv, plan: SealedPlan, row: int, format: KvFormat, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """K and V [Hkv, L, D] that a row sees."""
    sealed, length, tail = (int(part[row]) for part in (plan.sealed, plan.lengths, plan.tail))
    heads = len(kv.pages)
    pages = kv.pages[:, plan.page_table[row, :sealed].long()].flatten(0, 1)  # [Hkv * sealed, blob]
    opened = (part.view(heads, sealed * format.page, format.head_dim) for part in open_pages(pages, format, dtype))
    results = []
    for body, tails, sinks in zip(opened, (kv.tail_k, kv.tail_v), (kv.sink_k, kv.sink_v), strict=True):
        count = min(format.sinks, length)
        whole = torch.cat((body, tails[:, tail, : length - sealed * format.page].to(dtype)), 1)
        results.append(torch.cat((sinks[:, tail, :count].to(dtype), whole[:, count:]), 1))
    return results[0], results[1]
