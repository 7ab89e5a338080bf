"""Flash attention (Dao, 2023) over pages for blocks of prompt rows: one program per block and query head."""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl
from torch import Tensor


def prefill_chunks(
    q: Tensor, k_pool: Tensor, v_pool: Tensor, blocks: Tensor, tables: Tensor, scale: float, *, most_rows: int
) -> Tensor:
    """See `chunks`, whose plan has `blocks` of at most `most_rows` rows and `tables`. ValueError for shapes and types that do
    not fit."""
    (_, heads, dim), (kv_heads, _, page, _) = q.shape, k_pool.shape
    if k_pool.shape != v_pool.shape or k_pool.shape[3] != dim or heads % kv_heads or k_pool.stride() != v_pool.stride():
        raise ValueError(f"queries {tuple(q.shape)} do not fit pools {tuple(k_pool.shape)} and {tuple(v_pool.shape)}")
    if any(t.dtype != torch.int32 or not t.is_contiguous() for t in (blocks, tables)):
        raise ValueError("blocks and tables must be contiguous int32")
    if any(t.stride(-1) != 1 for t in (q, k_pool, v_pool)):
        raise ValueError("the last dimension must be contiguous")
    out = torch.empty_like(q)
    small = q.dtype.itemsize > 2  # float32 tiles of the same shape would not fit shared memory
    _chunks[(len(blocks), heads)](
        *(q, k_pool, v_pool, out, blocks, tables, scale * math.log2(math.e)),
        *(q.stride(0), q.stride(1), out.stride(0), out.stride(1), *k_pool.stride()[:3], tables.shape[1]),
        *(heads // kv_heads, dim, max(16, triton.next_power_of_2(dim)), page, most_rows, 32 if small else 64),
        num_warps=4,
        num_stages=2,
    )
    return out


@triton.jit
def _chunks(
    q, k_pool, v_pool, out, blocks, tables, scale,
    q_row, q_head, out_row, out_head, head_stride, page_stride, token_stride, width,
    G: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, R: tl.constexpr, M: tl.constexpr, N: tl.constexpr,
):  # fmt: skip
    """Program (block, query head)."""
    entry, head = blocks + tl.program_id(0) * 4, tl.program_id(1)
    first, count, start = tl.load(entry), tl.load(entry + 1), tl.load(entry + 2)
    table = tables + tl.load(entry + 3) * width
    if count > 0:
        m, n, d = tl.arange(0, M), tl.arange(0, N), tl.arange(0, DP)
        mine = (m < count)[:, None] & (d < D)[None, :]
        rows = (first + m).to(tl.int64)[:, None]
        query = tl.load(q + rows * q_row + head * q_head + d[None, :], mask=mine, other=0.0)
        base = (head // G).to(tl.int64) * head_stride
        top = tl.full([M], -float("inf"), tl.float32)
        total = tl.zeros([M], tl.float32)
        acc = tl.zeros([M, DP], tl.float32)
        for begin in tl.range(0, start + count, N):
            position = begin + n
            seen = position < start + count
            page = tl.load(table + position // R, mask=seen, other=0).to(tl.int64)
            at = base + (page * page_stride + position % R * token_stride)[:, None] + d[None, :]
            there = seen[:, None] & (d < D)[None, :]
            key = tl.load(k_pool + at, mask=there, other=0.0).to(query.dtype)
            score = tl.dot(query, key.T, input_precision="ieee") * scale
            score = tl.where(position[None, :] <= (start + m)[:, None], score, -float("inf"))
            new = tl.maximum(top, tl.max(score, 1))
            shrink = tl.exp2(top - new)
            weight = tl.exp2(score - new[:, None])
            value = tl.load(v_pool + at, mask=there, other=0.0).to(query.dtype)
            total = total * shrink + tl.sum(weight, 1)
            acc = acc * shrink[:, None] + tl.dot(weight.to(query.dtype), value, input_precision="ieee")
            top = new
        result = acc / total[:, None]
        tl.store(out + rows * out_row + head * out_head + d[None, :], result.to(out.dtype.element_ty), mask=mine)
