"""The tokens that are not sealed, sinks and tail in float16: 16 at a time, by float16 tensor cores, in the pages' own buffers.

A tile's K fills the buffer of a page's K codes to the byte (4 KB), and its V that of the V codes. So tiles and pages form one
pipeline: a buffer is refilled with what comes next as soon as it has been used, and the last tile fetches the first page.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy, mma_v2

from forefetch.kernels.attention.gluon.codes import stack, unstack
from forefetch.kernels.attention.gluon.layouts import A16, B16, CHUNK, COPY_TILE, MMA, PAIRS, SWIZZLED, rows_by

TILE = gl.constexpr(16)
LOWEST = gl.constexpr(-1e30)  # stands for -inf where differences of two are taken


@gluon.jit
def as_tile(codes):
    """The first 1,024 words of a buffer as float16 [16, 128]."""
    return codes.slice(0, 1024)._reinterpret(gl.float16, [TILE, 128], SWIZZLED)


@gluon.jit
def load_tile(tokens, spans, start, codes):
    """Starts copying tokens [start, start + 16): sinks first, then the tail. Those beyond the last become zeros, unread.

    `tokens`: pointers (sinks, tail) to [.., 128] of the row. `spans`: (sinks read, tail slots skipped, tokens in all).
    """
    row, channel = gl.arange(0, TILE, gl.SliceLayout(1, COPY_TILE)), gl.arange(0, 128, gl.SliceLayout(0, COPY_TILE))
    tail = tokens[1] + (spans[1] - spans[0]) * 128
    if (start + TILE <= spans[0]) | ((start >= spans[0]) & (start + TILE <= spans[2])):  # one address for all of it
        first = gl.where(start < spans[0], tokens[0], tail) + start * 128
        async_copy.async_copy_global_to_shared(as_tile(codes), first + row[:, None] * 128 + channel[None, :])
    else:
        token = start + row
        at = gl.where(token < spans[0], tokens[0], tail) + token * 128
        seen = (token < spans[2])[:, None]
        async_copy.async_copy_global_to_shared(as_tile(codes), at[:, None] + channel[None, :], mask=seen)


@gluon.jit
def tile_scores(query, codes, start, spans, scale):
    """Scores (base 2) [8, 16] of the tile in `codes`; `query` [8, 128] in shared memory, scores per unit
    of it `scale` [8]."""
    PART: gl.constexpr = rows_by(TILE)
    q = query.load(rows_by(128))
    s, _ = unstack(mma_v2(stack(q, q, A16), as_tile(codes).permute((1, 0)).load(B16), gl.zeros([16, TILE], gl.float32, MMA)))
    seen = start + gl.arange(0, TILE, gl.SliceLayout(0, PART)) < spans[2]
    scale = gl.convert_layout(scale, gl.SliceLayout(1, PART), assert_trivial=True)[:, None]
    return gl.where(seen[None, :], gl.convert_layout(s, PART, assert_trivial=True) * scale, float("-inf"))


@gluon.jit
def add_tile(state, s, codes):
    """Adds a tile to (maximum [8], sum of weights [8], four sums [8, 32]), each measured by the maximum as it then is."""
    PART: gl.constexpr = rows_by(CHUNK)
    top, total, sums = state
    higher = gl.maximum(top, gl.max(s, 1))
    p, shrink = gl.exp2(s - higher[:, None]), gl.exp2(top - higher)
    half = p.to(gl.float16)
    operand = stack(half, half, A16)
    across = gl.convert_layout(shrink, gl.SliceLayout(1, PART), assert_trivial=True)[:, None]
    moved = ()
    for i in gl.static_range(4):
        v = as_tile(codes).slice(i * CHUNK, CHUNK, dim=1).load(B16)
        added, _ = unstack(mma_v2(operand, v, gl.zeros([16, CHUNK], gl.float32, MMA)))
        moved = moved + (sums[i] * across + gl.convert_layout(added, PART, assert_trivial=True),)
    return higher, total * shrink + gl.sum(p, 1), moved


@gluon.jit
def no_tokens():
    """The state before the first tile."""
    ROW: gl.constexpr = gl.SliceLayout(1, rows_by(TILE))
    nothing = gl.zeros([8, CHUNK], gl.float32, rows_by(CHUNK))
    return gl.full([8], LOWEST, gl.float32, ROW), gl.zeros([8], gl.float32, ROW), (nothing, nothing, nothing, nothing)


@gluon.jit
def to_pages(state):
    """The state as the page loop keeps it: maximum [8], nothing and the sum of weights in even and odd columns of [8, 4], four
    sums [8, 32]."""
    top, total, sums = state
    total = gl.expand_dims(gl.convert_layout(total, gl.SliceLayout(1, PAIRS), assert_trivial=True), 1)
    odd = gl.arange(0, 4, gl.SliceLayout(0, PAIRS))[None, :] % 2 == 1
    both = gl.where(odd, total, 0.0)
    return gl.convert_layout(top, gl.SliceLayout(1, rows_by(CHUNK)), assert_trivial=True), both, sums
