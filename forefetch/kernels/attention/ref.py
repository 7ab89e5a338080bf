"""The truth: gather, float32 softmax, one request at a time. Same arguments as the public functions."""

from __future__ import annotations

import torch
from torch import Tensor


def decode(q: Tensor, k_pool: Tensor, v_pool: Tensor, page_table: Tensor, lengths: list[int], scale: float) -> Tensor:
    """q [B, Hq, D], page_table [B, max_pages], lengths [B] -> [B, Hq, D]."""
    size = k_pool.shape[2]
    rows = [
        prefill(q[b : b + 1], k_pool, v_pool, page_table[b, : -(-length // size)].tolist(), length - 1, scale)
        for b, length in enumerate(lengths)
    ]
    return torch.cat(rows)


def prefill(q: Tensor, k_pool: Tensor, v_pool: Tensor, pages: list[int], start: int, scale: float) -> Tensor:
    """q [C, Hq, D] at positions start..start+C-1 of the request that owns `pages` -> [C, Hq, D]; causal."""
    chunk, heads, _ = q.shape
    group = heads // k_pool.shape[0]
    dtype = torch.promote_types(q.dtype, torch.float32)
    visible = start + chunk
    k, v = (pool[:, pages].flatten(1, 2)[:, :visible].to(dtype).repeat_interleave(group, 0) for pool in (k_pool, v_pool))
    scores = torch.einsum("chd,hld->hcl", q.to(dtype), k) * scale
    last = torch.arange(start, visible, device=q.device)
    future = torch.arange(visible, device=q.device) > last[:, None]  # [C, L]
    return torch.einsum("hcl,hld->chd", scores.masked_fill(future, -torch.inf).softmax(-1), v).to(q.dtype)
