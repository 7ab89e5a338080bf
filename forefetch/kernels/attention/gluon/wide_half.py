"""`half.py` by four warps: a program's share of the float16 tokens, up to 64 at a time, 16 to a warp."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy, mma_v2

from forefetch.kernels.attention.gluon.half import LOWEST
from forefetch.kernels.attention.gluon.layouts import SWIZZLED
from forefetch.kernels.attention.gluon.wide_layouts import A16, B16, BY, BY_TILE, COPY_TILE, MMA, TOTAL
from forefetch.kernels.attention.gluon.wide_page import largest, over_total, per_lane

TILE = gl.constexpr(64)
ROUND = gl.constexpr(8)


@gluon.jit
def tile_span(tokens, split, shares, apart):
    """A program's share of the float16 tokens: (first, end). All have one, or those apart."""
    count, mine = shares, split
    if apart > 0:
        count, mine = apart, split - shares
    each = (tokens + count * ROUND - 1) // (count * ROUND) * ROUND
    first = gl.where(mine < 0, tokens, gl.minimum(mine * each, tokens))
    return first, gl.minimum(first + each, tokens)


@gluon.jit
def fetch_tile(pointers, spans, start, end, tile):
    """Starts copying tokens [start, start + 64) into `tile` [64, 128]; those from `end` on become zeros, unread. `pointers`,
    `spans`: as `half.load_tile`."""
    token = start + gl.arange(0, TILE, gl.SliceLayout(1, COPY_TILE))
    channel = gl.arange(0, 128, gl.SliceLayout(0, COPY_TILE))
    at = gl.where(token < spans[0], pointers[0] + token * 128, pointers[1] + (token - spans[0] + spans[1]) * 128)
    async_copy.async_copy_global_to_shared(tile, at[:, None] + channel[None, :], mask=(token < end)[:, None])


@gluon.jit
def add_tiles(query, back, tokens, span, maxima):
    """(maximum [8], sums of weights by lane [4, 8, 8], sums [128, 8]) of a program's tokens. `query` [8, 128] in registers,
    `back` [8] scores per unit of it; `tokens`: `half_tokens`."""
    top = gl.full([8], LOWEST, gl.float32, gl.SliceLayout(0, BY))
    total, sums = gl.zeros([4, 8, 8], gl.float32, TOTAL), gl.zeros([128, 8], gl.float32, BY)
    if span[0] < span[1]:
        asked = gl.allocate_shared_memory(gl.float16, [8, 128], SWIZZLED, query)
        keys = gl.allocate_shared_memory(gl.float16, [TILE, 128], SWIZZLED)
        values = gl.allocate_shared_memory(gl.float16, [TILE, 128], SWIZZLED)
        weights = gl.allocate_shared_memory(gl.float16, [8, TILE], SWIZZLED)
        for start in range(span[0], span[1], TILE):
            fetch_tile(tokens[0], tokens[2], start, span[1], keys)
            fetch_tile(tokens[1], tokens[2], start, span[1], values)
            async_copy.commit_group()
            async_copy.wait_group(0)
            s = mma_v2(keys.load(A16), asked.permute((1, 0)).load(B16), gl.zeros([TILE, 8], gl.float32, MMA))
            s = gl.convert_layout(s, BY_TILE, assert_trivial=True) * gl.convert_layout(
                back, gl.SliceLayout(0, BY_TILE), assert_trivial=True
            )[None, :]
            seen = start + gl.arange(0, TILE, gl.SliceLayout(1, BY_TILE)) < span[1]
            s = gl.where(seen[:, None], s, float("-inf"))
            higher = gl.maximum(top, largest(s, maxima))
            shrink = gl.exp2(top - higher)
            p = gl.exp2(s - gl.convert_layout(higher, gl.SliceLayout(0, BY_TILE), assert_trivial=True)[None, :])
            weights.store(gl.permute(p.to(gl.float16), (1, 0)))
            total = total * over_total(shrink) + per_lane(p)
            operand = weights.permute((1, 0)).load(B16)
            added = mma_v2(values.permute((1, 0)).load(A16), operand, gl.zeros([128, 8], gl.float32, MMA))
            sums = sums * shrink[None, :] + gl.convert_layout(added, BY, assert_trivial=True)
            top = higher
    return top, total, sums
