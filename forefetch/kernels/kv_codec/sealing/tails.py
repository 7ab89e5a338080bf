"""Tails on a GPU: what stays when their first page was sealed."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from forefetch.kernels.kv_codec.formats import KvFormat

TOKENS = 16


def move(tails: Tensor, due: Tensor, format: KvFormat) -> None:
    """tails [L, 2, Hkv, lanes, slots, D], the last three dimensions contiguous in themselves; due int32 [n, 3]: lanes first."""
    layers, kinds, heads, _, slots, dim = tails.shape
    if tails.stride()[3:] != (slots * dim, dim, 1) or format.page % TOKENS:
        raise ValueError(f"tails of strides {tails.stride()} cannot be moved")
    grid = len(due), layers * kinds * heads, format.page // TOKENS
    strides = tails.stride(0), tails.stride(1), tails.stride(2)
    width = triton.next_power_of_2(dim)
    _move[grid](tails, due, kinds, heads, *strides, slots, format.page, format.recent, dim, TOKENS, width, num_warps=2)


@triton.jit
def _move(
    tails, due, kinds, heads, layer, kind, head, slots,
    T: tl.constexpr, RECENT: tl.constexpr, D: tl.constexpr, N: tl.constexpr, C: tl.constexpr,
):  # fmt: skip
    """Program (entry, head of a layer's K or V, N tokens of each page's length): where more than a page stays, one page after
    the other, so that nobody reads what another program has written."""
    which = tl.program_id(1)
    base = tails + (which // (kinds * heads)).to(tl.int64) * layer + (which // heads % kinds).to(tl.int64) * kind
    base += (which % heads).to(tl.int64) * head + tl.load(due + tl.program_id(0) * 3).to(tl.int64) * slots * D
    t, c = tl.program_id(2) * N + tl.arange(0, N)[:, None], tl.arange(0, C)[None, :]
    for start in tl.static_range(0, RECENT, T):
        mine = (start + t < RECENT) & (c < D)
        kept = tl.load(base + (start + T + t) * D + c, mask=mine, other=0.0)
        tl.store(base + (start + t) * D + c, kept, mask=mine)
