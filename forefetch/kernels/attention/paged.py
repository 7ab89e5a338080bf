"""Decode attention whose page table and lengths stay on the device, so that a captured graph can replay it.

On a GPU the Triton kernel; elsewhere plain operations over every page of the table, masked, which is what tests run.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class PagedPlan:
    """table [B, P] int32, lengths [B] int32: visible positions of each row; a row of 0 is idle and comes out as zeros."""

    table: Tensor
    lengths: Tensor


def decode_paged(q: Tensor, k_pool: Tensor, v_pool: Tensor, plan: PagedPlan, scale: float) -> Tensor:
    """q [B, Hq, D], pools [Hkv, pages, R, D] -> [B, Hq, D]. Nothing is read on the host."""
    if not q.is_cuda:
        return _masked(q, k_pool, v_pool, plan, scale)
    from forefetch.kernels.attention import triton

    (rows, heads, dim), (kv_heads, _, page, _) = q.shape, k_pool.shape
    scratch = triton.plan_scratch(rows, heads, kv_heads, dim, plan.table.shape[1] * page, q.device)
    return triton.decode_paged(q, k_pool, v_pool, plan.table, plan.lengths, scale, torch.empty_like(q), scratch)


def _masked(q: Tensor, k_pool: Tensor, v_pool: Tensor, plan: PagedPlan, scale: float) -> Tensor:
    table, rows = plan.table.long(), len(q)
    k, v = (pool[:, table].flatten(2, 3).to(q.dtype) for pool in (k_pool, v_pool))  # [Hkv, B, P * R, D]
    unseen = torch.arange(k.shape[2], device=q.device) >= plan.lengths[:, None]  # [B, P * R]
    v = v.masked_fill(unseen[None, :, :, None], 0.0)  # unwritten memory may hold NaN, which no weight of 0 removes
    grouped = q.view(rows, k.shape[0], -1, q.shape[2]).transpose(0, 1)  # [Hkv, B, G, D]
    scores = (grouped @ k.transpose(2, 3) * scale).float().masked_fill(unseen[None, :, None], -torch.inf)
    weights = scores.softmax(-1).nan_to_num(0.0).to(q.dtype)  # all -inf: an idle row
    return (weights @ v).transpose(0, 1).reshape(q.shape)
