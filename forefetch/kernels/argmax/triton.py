"""Two launches: a program per row and share of the vocabulary, then one per row over what those found.

A value and its index are one 64-bit key that orders as the value does and, among equals, puts the lower index first, so the
order in which shares are joined does not matter. A NaN has the largest key.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from forefetch.kernels.pdl import early, released

SHARE, BLOCK = 8192, 2048
NAN = tl.constexpr(0x7FFFFFFF)
INFINITY = tl.constexpr(0x7F800000)
INDEX = tl.constexpr(0x7FFFFFFF)


def argmax(logits: Tensor, into: tuple[Tensor, Tensor] | None = None) -> Tensor:
    """See the package. ValueError for rows that are not contiguous."""
    rows, width = logits.shape
    if logits.stride(1) != 1:
        raise ValueError(f"rows of {width} values with strides {logits.stride()} are not contiguous")
    shares = triton.cdiv(width, SHARE)
    keys = torch.empty((rows, shares), dtype=torch.int64, device=logits.device)
    ids = torch.empty(rows, dtype=torch.int64, device=logits.device) if into is None else into[1][:rows]
    pdl = early(logits)
    _partial[(rows, shares)](logits, keys, logits.stride(0), width, shares, SHARE=SHARE, BLOCK=BLOCK, **pdl, num_warps=4)
    form = {"SHARES": triton.next_power_of_2(shares), "TWICE": into is not None, **pdl}
    _final[(rows,)](keys, ids, ids if into is None else into[0], shares, **form, num_warps=1)
    return ids


@triton.jit
def _partial(logits, keys, stride, width, shares, SHARE: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr):
    released(PDL)
    row, share = tl.program_id(0).to(tl.int64), tl.program_id(1)
    best = tl.full([BLOCK], -0x8000000000000000, tl.int64)
    for start in tl.static_range(0, SHARE, BLOCK):
        at = share * SHARE + start + tl.arange(0, BLOCK)
        value = tl.load(logits + row * stride + at, mask=at < width, other=-float("inf")).to(tl.float32)
        value = tl.where(value == 0, 0.0, value)  # -0 equals 0
        bits = value.to(tl.int32, bitcast=True)
        order = tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)
        order = tl.where((bits & 0x7FFFFFFF) > INFINITY, NAN, order)
        best = tl.maximum(best, (order.to(tl.int64) << 32) | (INDEX - at.to(tl.int64)))
    tl.store(keys + row * shares + share, tl.max(best, 0))


@triton.jit
def _final(keys, ids, valid, shares, SHARES: tl.constexpr, TWICE: tl.constexpr, PDL: tl.constexpr):
    released(PDL)
    row, at = tl.program_id(0), tl.arange(0, SHARES)
    key = tl.max(tl.load(keys + row * shares + at, mask=at < shares, other=-0x8000000000000000), 0)
    order = key >> 32
    finite = (order < INFINITY) & (order > (-INFINITY - 1))
    tl.store(ids + row, tl.where(finite, INDEX - (key & INDEX), -1))
    if TWICE:
        tl.store(valid + row, tl.where(finite, INDEX - (key & INDEX), 0))
