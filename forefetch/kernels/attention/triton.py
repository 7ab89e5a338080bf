"""Decode attention over a dense paged cache in plain Triton, made for CUDA graphs.

Nothing about a step is read on the host: the grid follows from shapes and from `scratch`, each row's length is read on
the device, and splits that a short row does not need end at once. So one captured launch serves all lengths.

Flash-decoding (Dao et al., 2023): `_split` programs each reduce a stretch of one row's positions for all G query heads of one
KV head, packed into the M rows of a tensor-core tile; `_merge` joins a head's stretches by their log-sum-exp in float32.

Letters: B rows, Hq / Hkv query / KV heads, G = Hq / Hkv, D head dim, R tokens per page, P width of the page table, S splits.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from forefetch.kernels.pdl import early, released

BLOCK = 64  # positions per tile: 32 KB of K and V at D = 128 in 16 bits, so several programs share an SM's memory
WAVES = 8  # programs per SM that `plan_scratch` aims at; ragged rows need more than one wave to even out
MAX_SPLITS = 128


@dataclass(frozen=True, slots=True)
class Scratch:
    """What splits leave: `partial` [B, Hq, S, D] unnormalised sums, `stats` [B, Hq, S, 2] maximum (base 2), sum of weights."""

    partial: Tensor
    stats: Tensor

    @property
    def splits(self) -> int:
        """S."""
        return self.partial.shape[2]


def plan_scratch(rows: int, heads: int, kv_heads: int, dim: int, max_tokens: int, device: torch.device | str) -> Scratch:
    """Scratch for up to `rows` rows of up to `max_tokens` positions; its S fills the device's SMs."""
    processors = torch.cuda.get_device_properties(device).multi_processor_count if torch.device(device).type == "cuda" else 1
    wanted = triton.cdiv(WAVES * processors, rows * kv_heads)
    splits = max(1, min(wanted, MAX_SPLITS, triton.cdiv(max_tokens, 2 * BLOCK)))
    return Scratch(
        torch.empty((rows, heads, splits, dim), dtype=torch.float32, device=device),
        torch.empty((rows, heads, splits, 2), dtype=torch.float32, device=device),
    )


def decode_paged(
    q: Tensor,
    k_pool: Tensor,
    v_pool: Tensor,
    page_table: Tensor,
    lengths: Tensor,
    scale: float,
    out: Tensor,
    scratch: Scratch,
) -> Tensor:
    """q [B, Hq, D] over pools [Hkv, n_pages, R, D], page_table int32 [B, P], lengths int32 [B] -> `out` [B, Hq, D].

    All are on the device. `lengths` counts visible positions and must not exceed P * R; a row of length 0 comes out as zeros.
    Neither positions beyond a row's length nor page-table entries beyond its last page are read. `out` may be any float type.
    """
    _check(q, k_pool, v_pool, page_table, lengths, out, scratch)
    rows, heads, dim = q.shape
    kv_heads, _, page, _ = k_pool.shape
    group, padded = heads // kv_heads, max(16, triton.next_power_of_2(dim))
    _split[(scratch.splits, kv_heads, rows)](
        *(q, k_pool, v_pool, page_table, lengths, scratch.partial, scratch.stats, scale * math.log2(math.e)),
        *(q.stride(0), q.stride(1), *k_pool.stride()[:3], *v_pool.stride()[:3], page_table.stride(0)),
        *(group, max(16, triton.next_power_of_2(group)), dim, padded, page, BLOCK),
        num_warps=4,
        num_stages=3,
    )
    merge(scratch, out)
    return out


def merge(scratch: Scratch, out: Tensor, soon: bool = False) -> None:
    """Joins the splits of `scratch` into out [B, Hq, D], which may have fewer rows than it. `soon`: launched while the splits
    still run (`kernels/pdl.py`)."""
    rows, heads, dim = out.shape
    padded, tile = triton.next_power_of_2(dim), triton.next_power_of_2(scratch.splits)
    channels = padded if tile <= 16 else max(16, min(padded, 2048 // tile))  # all splits of these are one program's tile
    _merge[(rows, heads, triton.cdiv(dim, channels))](
        *(scratch.partial, scratch.stats, out, out.stride(0), out.stride(1), scratch.splits, dim, tile, channels),
        num_warps=1 if tile <= 8 else 4,
        **(early(out) if soon else {"PDL": False}),
    )


def _check(
    q: Tensor, k_pool: Tensor, v_pool: Tensor, page_table: Tensor, lengths: Tensor, out: Tensor, scratch: Scratch
) -> None:
    """Shapes and strides that the kernels rely on."""
    rows, heads, dim = q.shape
    if k_pool.shape != v_pool.shape or k_pool.shape[3] != dim or heads % k_pool.shape[0]:
        raise ValueError(f"queries {tuple(q.shape)} do not fit pools {tuple(k_pool.shape)} and {tuple(v_pool.shape)}")
    if out.shape != q.shape or page_table.shape[0] != rows or lengths.shape != (rows,):
        raise ValueError(
            f"{rows} rows, but out {tuple(out.shape)}, table {tuple(page_table.shape)}, lengths {tuple(lengths.shape)}"
        )
    if page_table.dtype != torch.int32 or lengths.dtype != torch.int32:
        raise ValueError("page table and lengths must be int32")
    if any(t.stride(-1) != 1 for t in (q, k_pool, v_pool, page_table, out)):
        raise ValueError("the last dimension must be contiguous")
    if scratch.partial.shape[0] < rows or scratch.partial.shape[1::2] != (heads, dim):
        raise ValueError(f"scratch {tuple(scratch.partial.shape)} is too small for {rows} rows of {heads} heads of {dim}")


@triton.jit
def _split(
    q, k_pool, v_pool, page_table, lengths, partial, stats, scale,
    q_row, q_head, k_head, k_page, k_token, v_head, v_page, v_token, table_row,
    G: tl.constexpr, M: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, R: tl.constexpr, N: tl.constexpr,
):  # fmt: skip
    """Program (split, KV head, row) -> that stretch's unnormalised sums, maximum (base 2) and sum of weights of G heads."""
    split, kv_head, row = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    splits, heads = tl.num_programs(0), tl.num_programs(1) * G
    k_pool += kv_head.to(tl.int64) * k_head
    v_pool += kv_head.to(tl.int64) * v_head
    g, d, n = tl.arange(0, M), tl.arange(0, DP), tl.arange(0, N)
    length = tl.load(lengths + row)
    stretch = tl.cdiv(tl.cdiv(length, N), splits) * N
    first, last = split * stretch, tl.minimum((split + 1) * stretch, length)
    mine = (g < G)[:, None] & (d < D)[None, :]
    query = tl.load(q + row.to(tl.int64) * q_row + (kv_head * G + g)[:, None] * q_head + d[None, :], mask=mine, other=0.0)
    top = tl.full([M], -float("inf"), tl.float32)
    total = tl.zeros([M], tl.float32)
    acc = tl.zeros([M, DP], tl.float32)
    for start in tl.range(first, last, N):
        position = start + n
        seen = position < last
        page = tl.load(page_table + row * table_row + position // R, mask=seen, other=0).to(tl.int64)
        there = seen[:, None] & (d < D)[None, :]
        keys = k_pool + (page * k_page + position % R * k_token)[:, None] + d[None, :]
        key = tl.load(keys, mask=there, other=0.0).to(query.dtype)
        score = tl.dot(query, key.T, input_precision="ieee") * scale
        score = tl.where(seen[None, :], score, -float("inf"))
        new = tl.maximum(top, tl.max(score, 1))
        shrink = tl.exp2(top - new)
        weight = tl.exp2(score - new[:, None])
        values = v_pool + (page * v_page + position % R * v_token)[:, None] + d[None, :]
        value = tl.load(values, mask=there, other=0.0).to(query.dtype)
        total = total * shrink + tl.sum(weight, 1)
        acc = acc * shrink[:, None] + tl.dot(weight.to(query.dtype), value, input_precision="ieee")
        top = new
    at = (row * heads + kv_head * G + g) * splits + split
    tl.store(partial + at[:, None].to(tl.int64) * D + d[None, :], acc, mask=mine & (first < last))
    tl.store(stats + at * 2, top, mask=g < G)
    tl.store(stats + at * 2 + 1, total, mask=g < G)


@triton.jit
def _merge(
    partial, stats, out, out_row, out_head, splits, D: tl.constexpr, S: tl.constexpr, C: tl.constexpr, PDL: tl.constexpr
):  # fmt: skip
    """Program (row, head, block of C channels): joins the splits. Empty ones left a sum of 0 and are not read."""
    row, head, block = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    heads = tl.num_programs(1)
    released(PDL)
    s, d = tl.arange(0, S), block * C + tl.arange(0, C)
    at = (row * heads + head) * splits + s
    top = tl.load(stats + at * 2, mask=s < splits, other=-float("inf"))
    total = tl.load(stats + at * 2 + 1, mask=s < splits, other=0.0)
    used = total != 0.0
    best = tl.max(tl.where(used, top, -float("inf")), 0)
    best = tl.where(best > -float("inf"), best, 0.0)
    weight = tl.where(used, tl.exp2(top - best), 0.0)
    sums = tl.load(partial + at[:, None].to(tl.int64) * D + d[None, :], mask=used[:, None] & (d < D)[None, :], other=0.0)
    norm = tl.sum(total * weight, 0)
    result = tl.sum(sums * weight[:, None], 0) / tl.where(norm > 0.0, norm, 1.0)
    tl.store(out + row.to(tl.int64) * out_row + head * out_head + d, result.to(out.dtype.element_ty), mask=d < D)
