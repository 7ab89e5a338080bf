"""One program per row and head.

Norm and rotation are done in float32 and rounded once; the definition rounds the normed head and both products of the rotation
on its way, so that the two differ by a few units in the last place of a 16-bit type.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl
from torch import Tensor

from forefetch.kernels.pdl import awaited, early, let_go

if TYPE_CHECKING:
    from forefetch.kernels.qkv import HeadNorms


def enter(
    qkv: Tensor,
    cos: Tensor,
    sin: Tensor,
    norms: HeadNorms | None,
    slots: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    limit: float | None = None,
) -> Tensor:
    """See the package. ValueError for shapes and strides that the kernel does not read."""
    (kv_heads, _, dim), (rows, width) = k_cache.shape, qkv.shape[-2:]
    heads = width // dim - 2 * kv_heads
    if width % dim or heads < 1 or heads % kv_heads or v_cache.shape != k_cache.shape or dim % 2:
        raise ValueError(f"rows of {width} do not fit caches {tuple(k_cache.shape)} and {tuple(v_cache.shape)}")
    if not (qkv.is_contiguous() and cos.is_contiguous() and sin.is_contiguous()) or k_cache.stride() != v_cache.stride():
        raise ValueError("qkv, cos and sin must be contiguous, and both caches of one layout")
    q = torch.empty((rows, heads, dim), dtype=cos.dtype, device=qkv.device)
    weights = (norms.q, norms.k, norms.eps) if norms else (qkv, qkv, 0.0)
    _enter[(rows, heads + 2 * kv_heads)](
        *(qkv, cos, sin, *weights, slots, k_cache, v_cache, q, k_cache.stride(0), k_cache.stride(1)),
        LIMIT=float(limit or torch.finfo(k_cache.dtype).max),
        HEADS=heads,
        KV_HEADS=kv_heads,
        HALF=dim // 2,
        BLOCK=triton.next_power_of_2(dim // 2),
        NORM=norms is not None,
        SHARES=len(qkv) if qkv.ndim == 3 else 1,
        **early(qkv),
        num_warps=1,
    )
    return q


@triton.jit
def _halves(x, by, inside, at, share, eps, HALF: tl.constexpr, NORM: tl.constexpr, SHARES: tl.constexpr):
    """Both halves of the head at x, its shares added up, normed by a weight's halves if asked, in float32."""
    first = tl.load(x + at, mask=inside, other=0.0).to(tl.float32)
    second = tl.load(x + HALF + at, mask=inside, other=0.0).to(tl.float32)
    for other in tl.static_range(1, SHARES):
        first += tl.load(x + other * share + at, mask=inside, other=0.0)
        second += tl.load(x + other * share + HALF + at, mask=inside, other=0.0)
    if NORM:
        scale = tl.rsqrt((tl.sum(first * first) + tl.sum(second * second)) / (2 * HALF) + eps)
        first *= scale * by[0].to(tl.float32)
        second *= scale * by[1].to(tl.float32)
    return first, second


@triton.jit
def _put(to, value, inside, LIMIT: tl.constexpr):
    """Stores float32 values in the type of `to`; those beyond it saturate, NaN stays."""
    clipped = tl.where(value > LIMIT, LIMIT, tl.where(value < -LIMIT, -LIMIT, value))
    tl.store(to, clipped.to(to.dtype.element_ty), mask=inside)


@triton.jit
def _enter(
    qkv, cos, sin, q_weight, k_weight, eps, slots, k_cache, v_cache, q, cache_head, cache_slot,
    LIMIT: tl.constexpr, HEADS: tl.constexpr, KV_HEADS: tl.constexpr, HALF: tl.constexpr, BLOCK: tl.constexpr,
    NORM: tl.constexpr, SHARES: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Program (row, head): query heads first, then those of K, then those of V."""
    row, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    at, dim = tl.arange(0, BLOCK), 2 * HALF
    inside = at < HALF
    by = (at, at)
    if NORM:  # constant, so before the wait
        weight = q_weight if head < HEADS else k_weight
        by = (tl.load(weight + at, mask=inside, other=0.0), tl.load(weight + HALF + at, mask=inside, other=0.0))
    awaited(PDL)
    # Both halves of the tables are equal: the first serves both.
    c = tl.load(cos + row * dim + at, mask=inside, other=0.0).to(tl.float32)
    s = tl.load(sin + row * dim + at, mask=inside, other=0.0).to(tl.float32)
    x = qkv + (row * (HEADS + 2 * KV_HEADS) + head) * dim
    share = tl.num_programs(0).to(tl.int64) * (HEADS + 2 * KV_HEADS) * dim
    if head < HEADS:
        first, second = _halves(x, by, inside, at, share, eps, HALF, NORM, SHARES)
        out = q + (row * HEADS + head) * dim + at  # not `to`: a name has one type in all branches, and caches may be of another
        tl.store(out, (first * c - second * s).to(q.dtype.element_ty), mask=inside)
        tl.store(out + HALF, (second * c + first * s).to(q.dtype.element_ty), mask=inside)
    else:
        slot = tl.load(slots + row).to(tl.int64) * cache_slot + at
        if head < HEADS + KV_HEADS:
            first, second = _halves(x, by, inside, at, share, eps, HALF, NORM, SHARES)
            to = k_cache + (head - HEADS).to(tl.int64) * cache_head + slot
            _put(to, first * c - second * s, inside, LIMIT)
            _put(to + HALF, second * c + first * s, inside, LIMIT)
        else:
            first, second = _halves(x, by, inside, at, share, eps, HALF, False, SHARES)
            to = v_cache + (head - HEADS - KV_HEADS).to(tl.int64) * cache_head + slot
            _put(to, first, inside, LIMIT)
            _put(to + HALF, second, inside, LIMIT)
    let_go(PDL)  # attention is such a kernel (benchmarks/LOG.md)
