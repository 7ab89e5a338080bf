"""`enter_layer` in one launch, made for up to 64 rows: reading the weight once is all the time there is to spend.

A program multiplies all rows by one head's columns over a share of H. RMSNorm needs the whole row, but only as a factor: the
sum of squares is gathered on the way and applied to the product. Shares meet in scratch; the program that comes last for a head
adds them in their order, which makes the result independent of who was last, and finishes the head. It also sets the head's
counter back to zero, so that a captured graph can replay the launch.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from forefetch.kernels.qkv import HeadNorms

MAX_ROWS = 64
DEPTH = 64  # of H, per step of a program's loop


@dataclass(frozen=True, slots=True)
class Scratch:
    """partial [S, heads, M, D] and squares [S, heads, M] float32; arrived int32 [heads], zero between launches."""

    partial: Tensor
    squares: Tensor
    arrived: Tensor


def plan_scratch(rows: int, heads: int, dim: int, shares: int, device: torch.device | str) -> Scratch:
    """For up to `rows` rows and `heads` = Hq + 2 Hkv heads; `shares` of H: together about two programs per SM."""
    padded = max(16, triton.next_power_of_2(rows))
    return Scratch(
        torch.empty((shares, heads, padded, dim), dtype=torch.float32, device=device),
        torch.empty((shares, heads, padded), dtype=torch.float32, device=device),
        torch.zeros(heads, dtype=torch.int32, device=device),
    )


def enter_layer(
    x: Tensor,
    norm: Tensor,
    eps: float,
    weight: Tensor,
    tables: tuple[Tensor, Tensor],
    norms: HeadNorms | None,
    slots: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    scratch: Scratch,
) -> Tensor:
    """`ref.enter_layer` but for rounding: all up to the stored values is float32 here. ValueError for what does not fit."""
    (rows, hidden), (kv_heads, _, dim) = x.shape, k_cache.shape
    shares, heads, padded, _ = scratch.partial.shape
    if (
        rows > min(padded, MAX_ROWS)
        or weight.shape != (hidden, heads * dim)
        or heads <= 2 * kv_heads
        or scratch.partial.shape[3] != dim
    ):
        raise ValueError(
            f"rows {tuple(x.shape)}, weight {tuple(weight.shape)} and scratch {tuple(scratch.partial.shape)} do not fit"
        )
    if hidden % (shares * DEPTH) or dim & (dim - 1) or v_cache.shape != k_cache.shape or k_cache.stride() != v_cache.stride():
        raise ValueError(
            f"hidden {hidden} is no multiple of {shares} x {DEPTH}, or head dim {dim} no power of two, or caches differ"
        )
    if not all(t.is_contiguous() for t in (x, weight, *tables)):
        raise ValueError("rows, weight and tables must be contiguous")
    q = torch.empty((rows, heads - 2 * kv_heads, dim), dtype=x.dtype, device=x.device)
    factors = (norms.q, norms.k, norms.eps) if norms else (norm, norm, 0.0)
    _enter[(heads, shares)](
        *(x, norm, weight, *tables, *factors, slots, k_cache, v_cache, q, scratch.partial, scratch.squares, scratch.arrived),
        *(eps, rows, k_cache.stride(0), k_cache.stride(1)),
        LIMIT=float(torch.finfo(k_cache.dtype).max),
        KV_HEADS=kv_heads,
        H=hidden,
        D=dim,
        M=padded,
        DEPTH=DEPTH,
        NORM=norms is not None,
        num_warps=4,
        num_stages=4,
    )
    return q


@triton.jit
def _share(x, norm, weight, head, share, rows, H: tl.constexpr, D: tl.constexpr, M: tl.constexpr, DEPTH: tl.constexpr, WIDTH):
    """(rows times one head's columns over a share of H [M, D], their sums of squares [M]), float32."""
    m, d, h = tl.arange(0, M), tl.arange(0, D), tl.arange(0, DEPTH)
    acc, squares = tl.zeros([M, D], tl.float32), tl.zeros([M], tl.float32)
    each = H // tl.num_programs(1)
    for start in tl.range(share * each, (share + 1) * each, DEPTH):
        row = tl.load(x + m[:, None] * H + start + h[None, :], mask=(m < rows)[:, None], other=0.0)
        columns = tl.load(weight + (start + h).to(tl.int64)[:, None] * WIDTH + head * D + d[None, :])
        wide = row.to(tl.float32)
        squares += tl.sum(wide * wide, 1)
        normed = (wide * tl.load(norm + start + h).to(tl.float32)[None, :]).to(columns.dtype)
        acc += tl.dot(normed, columns, input_precision="ieee")
    return acc, squares


@triton.jit
def _turn(y, cos, sin, m, rows, D: tl.constexpr, M: tl.constexpr):
    """Rotation of y [M, D]: halves are pairs, and those of the tables are equal."""
    HALF: tl.constexpr = D // 2
    at, seen = m[:, None] * D + tl.arange(0, HALF)[None, :], (m < rows)[:, None]
    c, s = tl.load(cos + at, mask=seen, other=0.0).to(tl.float32), tl.load(sin + at, mask=seen, other=0.0).to(tl.float32)
    first, second = tl.split(tl.permute(tl.reshape(y, (M, 2, HALF)), (0, 2, 1)))
    turned = tl.join(first * c - second * s, second * c + first * s)
    return tl.reshape(tl.permute(turned, (0, 2, 1)), (M, D))


@triton.jit
def _enter(
    x, norm, weight, cos, sin, q_norm, k_norm, head_eps, slots, k_cache, v_cache, q, partial, squares, arrived,
    eps, rows, cache_head, cache_slot,
    LIMIT: tl.constexpr, KV_HEADS: tl.constexpr, H: tl.constexpr, D: tl.constexpr, M: tl.constexpr, DEPTH: tl.constexpr,
    NORM: tl.constexpr,
):  # fmt: skip
    """Program (head among Q, K and V; share of H)."""
    head, share, heads, shares = tl.program_id(0), tl.program_id(1), tl.num_programs(0), tl.num_programs(1)
    m, d = tl.arange(0, M), tl.arange(0, D)
    acc, own = _share(x, norm, weight, head, share, rows, H, D, M, DEPTH, heads * D)
    at = (share * heads + head) * M + m
    tl.store(partial + at[:, None] * D + d[None, :], acc)
    tl.store(squares + at, own)
    tl.debug_barrier()  # all threads' stores before the one that counts
    if tl.atomic_add(arrived + head, 1, sem="acq_rel") != shares - 1:
        return
    tl.store(arrived + head, 0)
    y, total = tl.zeros([M, D], tl.float32), tl.zeros([M], tl.float32)
    for other in range(shares):
        at = (other * heads + head) * M + m
        y += tl.load(partial + at[:, None] * D + d[None, :], cache_modifier=".cg")
        total += tl.load(squares + at, cache_modifier=".cg")
    y *= tl.rsqrt(total / H + eps)[:, None]
    q_heads = heads - 2 * KV_HEADS
    kept = (m < rows)[:, None]
    if head < q_heads + KV_HEADS:
        if NORM:
            of_q, of_k = tl.load(q_norm + d).to(tl.float32), tl.load(k_norm + d).to(tl.float32)
            chosen = tl.where(head < q_heads, of_q, of_k)
            y *= tl.rsqrt(tl.sum(y * y, 1) / D + head_eps)[:, None] * chosen[None, :]
        y = _turn(y, cos, sin, m, rows, D, M)
    if head < q_heads:
        tl.store(q + (m[:, None] * q_heads + head) * D + d[None, :], y.to(q.dtype.element_ty), mask=kept)
    else:
        clipped = tl.where(y > LIMIT, LIMIT, tl.where(y < -LIMIT, -LIMIT, y)).to(k_cache.dtype.element_ty)
        slot = tl.load(slots + m, mask=m < rows, other=0).to(tl.int64)
        kv_head = (head - q_heads) % KV_HEADS
        place = kv_head.to(tl.int64) * cache_head + slot[:, None] * cache_slot + d[None, :]
        if head < q_heads + KV_HEADS:
            tl.store(k_cache + place, clipped, mask=kept)
        else:
            tl.store(v_cache + place, clipped, mask=kept)
