"""Flash attention (Dao, 2023) for blocks of prompt rows over sealed pages: a tile of 32 tokens is opened in registers and never
written back. One program per block and up to two query heads, so that a tile serves up to 128 rows. Where that makes too few
programs for a GPU, each page of a block is one of several programs', whose sums `triton.merge` joins."""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from forefetch.kernels.attention.chunks import BLOCK, ChunkPlan
from forefetch.kernels.attention.sealed import Rows, SealedKv
from forefetch.kernels.attention.sealed_triton import _add
from forefetch.kernels.attention.triton import Scratch, merge
from forefetch.kernels.kv_codec.formats import KvFormat
from forefetch.kernels.kv_codec.triton import TOKENS, _get, columns, key_tile, value_tile

PROGRAMS = 128  # that a GPU should have
MOST_SPLITS = 8


def prefill_sealed_chunks(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    kv: SealedKv,
    plan: ChunkPlan,
    format: KvFormat,
    scale: float,
    splits: int | None = None,
) -> Tensor:
    """q [C, Hq, D] of any float type, k, v float16 [Hkv, rows, D] -> [C, Hq, D] in q's type; rows in no
    block come out as anything. Nothing is read on the host. `splits`: programs that share a block's pages, chosen by the number
    of rows if not given. ValueError for shapes and types that do not fit."""
    (_, heads, dim), kv_heads = q.shape, len(kv.pages)
    if heads % kv_heads or dim != format.head_dim or kv.pages.shape[2] != format.blob_bytes or k.shape != v.shape:
        raise ValueError(
            f"queries {tuple(q.shape)}, keys {tuple(k.shape)} and pages {tuple(kv.pages.shape)} do not fit {format}"
        )
    if k.dtype != torch.float16 or k.stride() != v.stride() or any(t.stride(-1) != 1 for t in (q, k, v)):
        raise ValueError("keys and values must be float16 of equal strides, last dimensions contiguous")
    if any(t.dtype != torch.int32 or not t.is_contiguous() for t in (plan.blocks, plan.chunks, plan.tables)):
        raise ValueError("blocks, chunks and tables must be contiguous int32")
    out, group = torch.empty_like(q), heads // kv_heads
    together = 2 if group % 2 == 0 else 1
    splits = splits or plan_splits(len(q), heads // together)
    shares = _scratch(len(q), heads, splits, dim, q.device) if splits > 1 else Scratch(out, out)
    _sealed_chunks[(len(plan.blocks), heads // together, splits)](
        *(q, k, v, kv.pages, kv.tail_k, kv.tail_v, kv.sink_k, kv.sink_v, out, plan.blocks, plan.chunks, plan.tables),
        *(shares.partial, shares.stats),
        *(scale * math.log2(math.e), kv.pages.shape[1], kv.tail_k.shape[1], kv.tail_k.shape[2], plan.tables.shape[1]),
        *(q.stride(0), q.stride(1), out.stride(0), out.stride(1), k.stride(0), k.stride(1), splits),
        *(format, group, together, BLOCK * together, columns(format), TOKENS, splits > 1),
        num_warps=4 * together,
        num_stages=1,
    )
    if splits > 1:
        merge(shares, out)
    return out


def plan_splits(rows: int, programs: int) -> int:
    """Programs that share the pages of a block, of `rows` in blocks with so many programs each."""
    return max(1, min(MOST_SPLITS, PROGRAMS // (-(-rows // BLOCK) * programs)))


def _scratch(rows: int, heads: int, splits: int, dim: int, device: torch.device) -> Scratch:
    partial = torch.empty((rows, heads, splits, dim), dtype=torch.float32, device=device)
    return Scratch(partial, torch.zeros((rows, heads, splits, 2), dtype=torch.float32, device=device))  # for rows in no block


def put_sinks(rows: Rows, plan: ChunkPlan, format: KvFormat) -> None:
    """The first tokens of requests that are among the chunks' rows, to their sinks."""
    if not format.sinks:
        return
    kinds, heads, entries, slots, dim = rows.tails.shape
    tile = triton.next_power_of_2(format.sinks), triton.next_power_of_2(dim)
    _sinks[(len(plan.chunks), kinds * heads)](
        *(rows.tails, rows.sinks, plan.chunks, rows.lanes * slots, entries * slots, rows.sinks.shape[2]),
        *(format.sinks, dim, *tile),
        num_warps=1,
    )


@triton.jit
def _sinks(
    tails, sinks, chunks, rows_at, slots, entries,
    S: tl.constexpr, D: tl.constexpr, SP: tl.constexpr, DP: tl.constexpr,
):  # fmt: skip
    """Program (chunk, K or V of a KV head)."""
    chunk, head = chunks + tl.program_id(0) * 5, tl.program_id(1).to(tl.int64)
    first, start, lane, count = tl.load(chunk), tl.load(chunk + 1), tl.load(chunk + 2), tl.load(chunk + 4)
    position, channel = tl.arange(0, SP)[:, None], tl.arange(0, DP)[None, :]
    mine = (position >= start) & (position < start + count) & (position < S) & (channel < D)
    row = head * slots + rows_at + first + position - start
    value = tl.load(tails + row * D + channel, mask=mine, other=0.0)
    tl.store(sinks + ((head * entries + lane) * S + position) * D + channel, value, mask=mine)


@triton.jit
def _fresh(rows, tail, sinks, token, channel, spans, D: tl.constexpr, SINKS: tl.constexpr):
    """Float16 tokens [N, C]: of the sink block, of the tail, of the rows. `spans`: (position of `rows`' first, of the tail's
    first, end, stride of rows); SINKS: how many of the first are read from their block."""
    mask = (token < spans[2]) & (channel < D)
    if SINKS > 0:
        return tl.load(sinks + token * D + channel, mask=mask & (token < SINKS), other=0.0)
    else:
        own = tl.load(rows + (token - spans[0]) * spans[3] + channel, mask=mask & (token >= spans[0]), other=0.0)
        held = tl.load(tail + (token - spans[1]) * D + channel, mask=mask & (token < spans[0]), other=0.0)
        return tl.where(token >= spans[0], own, held)


@triton.jit(do_not_specialize=["width", "splits"])
def _sealed_chunks(
    q, k, v, pages, tail_k, tail_v, sink_k, sink_v, out, blocks, chunks, tables, partial, stats,
    scale, n_pages, n_tails, tail_tokens, width, q_row, q_head, out_row, out_head, k_head, k_row, splits,
    F: tl.constexpr, G: tl.constexpr, H: tl.constexpr, M: tl.constexpr, C: tl.constexpr, N: tl.constexpr, SPLIT: tl.constexpr,
):  # fmt: skip
    """Program (block, H query heads of one KV head, split); row i of its M is query i / H, head i % H. Sinks are the first
    split's, float16 tokens the last one's."""
    D: tl.constexpr = _get(F, "head_dim")
    T: tl.constexpr = _get(F, "page")
    SINKS: tl.constexpr = _get(F, "sinks")
    entry, first_head, split = blocks + tl.program_id(0) * 4, tl.program_id(1) * H, tl.program_id(2)
    first, count, start, chunk = tl.load(entry), tl.load(entry + 1), tl.load(entry + 2), tl.load(entry + 3)
    if count > 0:
        row0, begin, lane = tl.load(chunks + chunk * 5), tl.load(chunks + chunk * 5 + 1), tl.load(chunks + chunk * 5 + 2)
        loaded, kv_head = tl.load(chunks + chunk * 5 + 3), (first_head // G).to(tl.int64)
        m, n, c = tl.arange(0, M), tl.arange(0, N), tl.arange(0, C)[None, :]
        position, mine = start + m // H, (m < count * H)[:, None] & (c < D)
        at = (first + m // H).to(tl.int64)[:, None], (first_head + m % H)[:, None]
        query = tl.load(q + at[0] * q_row + at[1] * q_head + c, mask=mine, other=0.0).to(tl.float16)
        seen = tl.maximum(tl.maximum(position - _get(F, "recent"), 0) // T, loaded)  # pages that a row reads sealed
        least = tl.maximum(tl.maximum(start - _get(F, "recent"), 0) // T, loaded)
        most = tl.maximum(tl.maximum(start + count - 1 - _get(F, "recent"), 0) // T, loaded)
        state = tl.full([M], -float("inf"), tl.float32), tl.zeros([M], tl.float32), tl.zeros([M, C], tl.float32)
        lane_at = kv_head * n_tails + lane
        rows = kv_head * k_head + row0.to(tl.int64) * k_row
        held = tl.maximum(tl.maximum(begin - _get(F, "recent"), 0) // T, loaded) * T  # where the tail begins
        spans = begin, held, start + count, k_row
        tails, sinks = lane_at * tail_tokens * D, lane_at * (SINKS * D)
        if (most > 0) & (split == 0):
            for low in tl.static_range(0, SINKS, N):
                token = low + n[:, None]
                key = _fresh(k, tail_k, sink_k + sinks, token, c, spans, D, SINKS)
                value = _fresh(v, tail_v, sink_v + sinks, token, c, spans, D, SINKS)
                state = _add(state, query, key, value, (seen > 0)[:, None] & (low + n < SINKS)[None, :], scale)
        for p in range(split * most // splits, (split + 1) * most // splits):
            number = tl.load(tables + chunk * width + p).to(tl.int64) + kv_head * n_pages
            page = pages + number * _get(F, "blob_bytes")
            for low in range(0, T, N):
                visible = (p < seen)[:, None] & (p * T + low + n >= SINKS)[None, :]
                state = _add(state, query, key_tile(page, low, F, C), value_tile(page, low, F, C), visible, scale)
        for low in range(least * T, tl.where(split == splits - 1, start + count, 0), N):
            token = low + n[:, None]
            key = _fresh(k + rows, tail_k + tails, sink_k, token, c, spans, D, 0)
            value = _fresh(v + rows, tail_v + tails, sink_v, token, c, spans, D, 0)
            visible = ((low + n)[None, :] >= (seen * T)[:, None]) & ((low + n)[None, :] <= position[:, None])
            state = _add(state, query, key, value, visible, scale)
        if SPLIT:
            to = ((first + m // H).to(tl.int64) * (tl.num_programs(1) * H) + first_head + m % H) * splits + split
            tl.store(partial + to[:, None] * D + c, state[2], mask=mine)
            tl.store(stats + to * 2, state[0], mask=m < count * H)
            tl.store(stats + to * 2 + 1, state[1], mask=m < count * H)
        else:
            result = state[2] / tl.where(state[1] > 0.0, state[1], 1.0)[:, None]
            tl.store(out + at[0] * out_row + at[1] * out_head + c, result.to(out.dtype.element_ty), mask=mine)
