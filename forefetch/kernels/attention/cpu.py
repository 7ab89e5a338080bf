"""The fast path in plain PyTorch operations; made for CPUs, correct on every device.

The G query heads of a KV head become the query length of SDPA, so K and V are read once per KV head without a mask or a copy.
Consecutive pages are a view of the pool; scattered ones are gathered. Short rows are padded into one call, because a call
costs more than their arithmetic.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

# Rows up to this length are cheaper padded together than called one by one. Measured on a CPU core, Hkv = G = 4, D = 64,
# 8 rows: 32 positions 136 us instead of 313, 64: 234 instead of 338, 128: 453 instead of 430, 512: 1,889 instead of 982.
PACK_UP_TO = 96
# Queries per SDPA call of a prefill: bounds its mask to this many rows.
QUERY_BLOCK = 128


@dataclass(frozen=True, slots=True)
class DecodePlan:
    """Where each row's K and V lie; depends on the page table and lengths only, so one plan serves all layers of a step.

    `single`: (row, pages, visible positions) of rows that get their own call. `rows` [b], `tokens` [b * L] and `mask`
    [b, 1, 1, L] describe the packed ones: `tokens` index the pool with its pages flattened, padding repeats position 0.
    `order` [B] undoes the order in which results come: the single ones, then the packed ones; None when that is no change.
    """

    single: tuple[tuple[int, slice | Tensor, int], ...]
    rows: Tensor
    tokens: Tensor
    mask: Tensor
    order: Tensor | None


def plan_decode(page_table: Tensor, lengths: list[int], page: int, device: torch.device, dtype: torch.dtype) -> DecodePlan:
    """page_table [B, max_pages] int (on the CPU: no synchronisation), lengths [B] >= 1; `dtype` of the queries."""
    short = [row for row, length in enumerate(lengths) if length <= PACK_UP_TO or device.type != "cpu"]
    packed = short if len(short) > 1 or device.type != "cpu" else []
    alone = sorted(set(range(len(lengths))) - set(packed))
    tables = page_table[alone].tolist() if alone else []
    single = tuple(
        (row, _span(table[: -(-lengths[row] // page)], device), lengths[row]) for row, table in zip(alone, tables, strict=True)
    )
    sizes = _on(torch.tensor([lengths[row] for row in packed], dtype=torch.long), device).unsqueeze(1)  # [b, 1]
    table = _on(page_table[packed].long(), device)
    position = torch.arange(max((lengths[row] for row in packed), default=0), device=device)  # [L]
    seen = position < sizes  # [b, L]
    position = position.where(seen, 0)
    tokens = table.gather(1, position // page) * page + position % page
    mask = torch.zeros_like(seen, dtype=dtype).masked_fill_(~seen, -torch.inf)[:, None, None]
    order = None if not packed or not alone else _on(torch.tensor(alone + packed).argsort(), device)
    return DecodePlan(single, _on(torch.tensor(packed, dtype=torch.long), device), tokens.flatten(), mask, order)


def decode_planned(q: Tensor, k_pool: Tensor, v_pool: Tensor, plan: DecodePlan, scale: float) -> Tensor:
    """q [B, Hq, D], pools [Hkv, pages, R, D] -> [B, Hq, D]."""
    grouped = q.view(len(q), k_pool.shape[0], -1, q.shape[2])  # [B, Hkv, G, D]
    results = []
    if plan.single:
        rows, flat_k, flat_v = grouped.split_with_sizes([1] * len(q)), k_pool.flatten(1, 2)[None], v_pool.flatten(1, 2)[None]
        for row, pages, length in plan.single:
            k, v = (_visible(flat, pages, length, k_pool.shape[2], q.dtype) for flat in (flat_k, flat_v))
            results.append(scaled_dot_product_attention(rows[row], k, v, scale=scale))
    if count := len(plan.rows):
        k, v = (_gather(pool, plan.tokens, count, q.dtype) for pool in (k_pool, v_pool))
        some = grouped if count == len(q) else grouped[plan.rows]
        results.append(scaled_dot_product_attention(some, k, v, attn_mask=plan.mask, scale=scale))
    out = torch.cat(results) if len(results) > 1 else results[0]
    return (out if plan.order is None else out[plan.order]).reshape(q.shape)


def prefill(q: Tensor, k_pool: Tensor, v_pool: Tensor, pages: list[int], start: int, scale: float) -> Tensor:
    """q [C, Hq, D] at positions start..start+C-1 of the request that owns `pages` -> [C, Hq, D]; causal.

    K and V of the chunk itself must already be in the pool. `pages` may go on beyond the last visible position.
    """
    chunk, heads, dim = q.shape
    kv_heads, _, page, _ = k_pool.shape
    visible = start + chunk
    span = _span(pages[: -(-visible // page)], q.device)
    # KV heads as SDPA's batch and the group as its heads: K and V are shared by a stride of 0 instead of a copy.
    shape = (kv_heads, heads // kv_heads, visible, dim)
    k, v = (_read(pool, span, visible, q.dtype).unsqueeze(1).expand(shape) for pool in (k_pool, v_pool))
    queries = q.view(chunk, kv_heads, heads // kv_heads, dim).permute(1, 2, 0, 3)  # [Hkv, G, C, D]
    blocks = []
    for first in range(0, chunk, QUERY_BLOCK):
        last = min(first + QUERY_BLOCK, chunk)
        seen = start + last
        blocks.append(_causal(queries[:, :, first:last], k[:, :, :seen], v[:, :, :seen], scale))
    return torch.cat(blocks, dim=2).permute(2, 0, 1, 3).reshape(chunk, heads, dim)


def _causal(q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
    """The last query sees all of k; each one before it sees one position less."""
    count, seen = q.shape[2], k.shape[2]
    if count == seen:
        return scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale)
    mask = q.new_full((count, seen), -torch.inf).triu_(seen - count + 1)
    return scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=scale)


def _span(pages: list[int], device: torch.device) -> slice | Tensor:
    """Consecutive pages as a slice, others as an index."""
    if pages == list(range(pages[0], pages[0] + len(pages))):
        return slice(pages[0], pages[0] + len(pages))
    return _on(torch.tensor(pages), device)


def _on(values: Tensor, device: torch.device) -> Tensor:
    """On `device`, without waiting for it."""
    pinned = values.pin_memory() if device.type == "cuda" and values.device.type == "cpu" else values
    return pinned.to(device, non_blocking=True)


def _read(pool: Tensor, pages: slice | Tensor, length: int, dtype: torch.dtype) -> Tensor:
    """The first `length` positions of `pages`: [Hkv, length, D], a view when the pages are consecutive."""
    part = pool[:, pages] if isinstance(pages, slice) else pool.index_select(1, pages)
    return part.flatten(1, 2)[:, :length].to(dtype)


def _visible(flat: Tensor, pages: slice | Tensor, length: int, page: int, dtype: torch.dtype) -> Tensor:
    """`_read` for one row of many, of a pool [1, Hkv, pages * R, D] that was flattened once: [1, Hkv, length, D]."""
    if isinstance(pages, slice):
        part = flat.narrow(2, pages.start * page, length)
        return part if part.dtype == dtype else part.to(dtype)
    return _read(flat[0].view(flat.shape[1], -1, page, flat.shape[3]), pages, length, dtype)[None]


def _gather(pool: Tensor, tokens: Tensor, rows: int, dtype: torch.dtype) -> Tensor:
    """Single positions: [rows, Hkv, L, D]."""
    picked = pool.flatten(1, 2).index_select(1, tokens)
    return picked.view(pool.shape[0], rows, -1, pool.shape[3]).transpose(0, 1).to(dtype)
