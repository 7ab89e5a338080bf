"""Attention of a request's queries over its own KV pages: `decode` (one query per request) and `prefill` (a chunk of one).

Pools are per layer: K and V [Hkv, pages, R, D] with R tokens per page; position p of a request lies in its page p // R at
offset p % R. Query head h reads KV head h // (Hq / Hkv). Nothing beyond a request's visible positions is ever read, so
pages may hold anything there, NaN included. A pool stored in another float type than the queries is converted as it is read.

Letters: B requests, C queries of a chunk, Hq / Hkv query / KV heads, G = Hq / Hkv, D head dim, L visible positions.
"""

from __future__ import annotations

from torch import Tensor

from forefetch.kernels.attention import cpu
from forefetch.kernels.attention.chunks import ChunkPlan, fill_blocks, prefill_chunks
from forefetch.kernels.attention.cpu import DecodePlan, plan_decode, prefill
from forefetch.kernels.attention.paged import PagedPlan, decode_paged
from forefetch.kernels.attention.sealed import Rows, SealedKv, SealedPlan
from forefetch.kernels.attention.sealed_chunks import enter_chunks, plan_chunks, prefill_sealed
from forefetch.kernels.attention.sealed_cpu import decode_sealed_cpu
from forefetch.kernels.kv_codec.formats import KvFormat

__all__ = [
    "ChunkPlan",
    "DecodePlan",
    "PagedPlan",
    "Rows",
    "decode",
    "decode_paged",
    "decode_planned",
    "decode_sealed",
    "enter_chunks",
    "fill_blocks",
    "plan_chunks",
    "plan_decode",
    "prefill",
    "prefill_chunks",
    "prefill_sealed",
]


def decode(q: Tensor, k_pool: Tensor, v_pool: Tensor, page_table: Tensor, lengths: list[int], scale: float) -> Tensor:
    """q [B, Hq, D], page_table [B, max_pages] int, lengths: visible positions of each row (>= 1) -> [B, Hq, D].

    Entries of `page_table` beyond a row's last visible page are not read. A caller with many layers plans once per step
    (`plan_decode`) and calls `decode_planned`.
    """
    return decode_planned(q, k_pool, v_pool, plan_decode(page_table, lengths, k_pool.shape[2], q.device, q.dtype), scale)


def decode_planned(q: Tensor, k_pool: Tensor, v_pool: Tensor, plan: DecodePlan | PagedPlan, scale: float) -> Tensor:
    """`decode` with a plan made once per step on the host, or with one that is read on the device."""
    if isinstance(plan, PagedPlan):
        return decode_paged(q, k_pool, v_pool, plan, scale)
    return cpu.decode_planned(q, k_pool, v_pool, plan, scale)


def decode_sealed(q: Tensor, kv: SealedKv, plan: SealedPlan, format: KvFormat, scale: float) -> Tensor:
    """`sealed.decode_sealed_ref` as fast as the device can: q [B, Hq, D] -> [B, Hq, D].

    On a GPU nothing of the plan is read on the host, so that a captured graph can replay it; there a row of length 0 is idle
    and comes out as zeros.
    """
    if not q.is_cuda:
        return decode_sealed_cpu(q, kv, plan, format, scale)
    from forefetch.kernels.attention import gluon, sealed_triton

    if gluon.supports(format, q.shape[1] // len(kv.pages), q.device):
        return gluon.decode_sealed(q, kv, plan, format, scale)
    return sealed_triton.decode_sealed(q, kv, plan, format, scale)
