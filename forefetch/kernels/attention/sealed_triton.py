"""Decode attention over sealed pages in plain Triton: every format and shape, any GPU, the interpreter.

As in `triton.py`, programs reduce stretches of a row and `merge` joins them, and nothing is read on the host. A tile of 32
tokens is opened into registers, in float16 as tensor cores want it, and never written back. `attention/gluon` is faster.
"""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from forefetch.kernels.attention.sealed import SealedKv, SealedPlan
from forefetch.kernels.attention.triton import Scratch, merge, plan_scratch
from forefetch.kernels.kv_codec.formats import KvFormat
from forefetch.kernels.kv_codec.triton import TOKENS, _get, columns, key_tile, value_tile


def decode_sealed(
    q: Tensor,
    kv: SealedKv,
    plan: SealedPlan,
    format: KvFormat,
    scale: float,
    out: Tensor | None = None,
    scratch: Scratch | None = None,
) -> Tensor:
    """q [B, Hq, D] of any float type -> [B, Hq, D] in q's type; a row of length 0 comes out as zeros.

    Queries are taken as float16. `out` and `scratch` (of `triton.plan_scratch`) are made when not given.
    """
    rows, heads, dim = q.shape
    kv_heads, n_pages, blob = kv.pages.shape
    if heads % kv_heads or dim != format.head_dim or blob != format.blob_bytes or q.stride(2) != 1:
        raise ValueError(f"queries {tuple(q.shape)} and pages {tuple(kv.pages.shape)} do not fit {format}")
    out = torch.empty_like(q) if out is None else out
    longest = plan.page_table.shape[1] * format.page + format.tail_tokens
    scratch = plan_scratch(rows, heads, kv_heads, dim, longest, q.device) if scratch is None else scratch
    group = heads // kv_heads
    _split[(scratch.splits, kv_heads, rows)](
        *(q, kv.pages, plan.page_table, plan.sealed, plan.lengths, plan.tail),
        *(kv.tail_k, kv.tail_v, kv.sink_k, kv.sink_v, scratch.partial, scratch.stats, scale * math.log2(math.e)),
        *(n_pages, kv.tail_k.shape[1], kv.tail_k.shape[2], plan.page_table.stride(0), q.stride(0), q.stride(1)),
        *(format, group, max(16, triton.next_power_of_2(group)), columns(format), TOKENS),
        num_warps=4,
        num_stages=1,  # bytes picked one by one are no tiles to copy ahead
    )
    merge(scratch, out)
    return out


@triton.jit
def _add(state, query, key, value, seen, scale):
    """Adds a tile to (maximum [M] base 2, sum of weights [M], sums [M, C])."""
    top, total, acc = state
    score = tl.where(seen, tl.dot(query, key.to(tl.float16).T) * scale, -float("inf"))
    new = tl.maximum(top, tl.max(score, 1))
    base = tl.where(new > -float("inf"), new, 0.0)  # a tile of which nothing is seen
    shrink, weight = tl.exp2(top - base), tl.exp2(score - base[:, None])
    acc = acc * shrink[:, None] + tl.dot(weight.to(tl.float16), value.to(tl.float16))
    return new, total * shrink + tl.sum(weight, 1), acc


@triton.jit
def _half(sinks, tail, token, channel, spans, D: tl.constexpr):
    """Float16 tokens [N, C] of a row: sinks first, then the tail. `spans`: sinks read, tail slots skipped, tokens in all."""
    from_sink = token < spans[0]
    mask = (token < spans[2]) & (channel < D)
    first = tl.load(sinks + token * D + channel, mask=mask & from_sink, other=0.0)
    rest = tl.load(tail + (token - spans[0] + spans[1]) * D + channel, mask=mask & (token >= spans[0]), other=0.0)
    return tl.where(from_sink, first, rest)


@triton.jit
def _split(
    q, pages, page_table, sealed, lengths, tails, tail_k, tail_v, sink_k, sink_v, partial, stats, scale,
    n_pages, n_tails, tail_tokens, table_row, q_row, q_head,
    F: tl.constexpr, G: tl.constexpr, M: tl.constexpr, C: tl.constexpr, N: tl.constexpr,
):  # fmt: skip
    """Program (split, KV head, row) -> what `triton._merge` joins."""
    split, splits, kv_head, row = tl.program_id(0), tl.num_programs(0), tl.program_id(1), tl.program_id(2)
    D: tl.constexpr = _get(F, "head_dim")
    T: tl.constexpr = _get(F, "page")
    SINKS: tl.constexpr = _get(F, "sinks")
    g, c, n = tl.arange(0, M), tl.arange(0, C)[None, :], tl.arange(0, N)
    mine = (g < G)[:, None] & (c < D)
    count, length = tl.load(sealed + row), tl.load(lengths + row)
    query = tl.load(q + row.to(tl.int64) * q_row + (kv_head * G + g)[:, None] * q_head + c, mask=mine, other=0.0).to(tl.float16)
    state = tl.full([M], -float("inf"), tl.float32), tl.zeros([M], tl.float32), tl.zeros([M, C], tl.float32)
    entry = (kv_head * n_tails + tl.load(tails + row)).to(tl.int64)
    sinks = tl.minimum(length, SINKS)
    skipped = tl.where(count == 0, sinks, 0)
    spans = sinks, skipped, sinks + length - count * T - skipped
    for start in range(split * N, spans[2], splits * N):
        token = start + n[:, None]
        key = _half(sink_k + entry * (SINKS * D), tail_k + entry * tail_tokens * D, token, c, spans, D)
        value = _half(sink_v + entry * (SINKS * D), tail_v + entry * tail_tokens * D, token, c, spans, D)
        state = _add(state, query, key, value, (start + n)[None, :] < spans[2], scale)
    for p in range(split * count // splits, (split + 1) * count // splits):
        number = tl.load(page_table + row * table_row + p).to(tl.int64) + kv_head.to(tl.int64) * n_pages
        page = pages + number * _get(F, "blob_bytes")
        for start in range(0, T, N):
            seen = (p * T + start + n)[None, :] >= SINKS
            state = _add(state, query, key_tile(page, start, F, C), value_tile(page, start, F, C), seen, scale)
    at = (row * tl.num_programs(1) * G + kv_head * G + g) * splits + split
    tl.store(partial + at[:, None].to(tl.int64) * D + c, state[2], mask=mine)
    tl.store(stats + at * 2, state[0], mask=g < G)
    tl.store(stats + at * 2 + 1, state[1], mask=g < G)
