"""`half.py` with heads as columns."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import mma_v2

from forefetch.kernels.attention.gluon.columns import columns, each_twice, turned
from forefetch.kernels.attention.gluon.half import LOWEST, TILE, as_tile
from forefetch.kernels.attention.gluon.layouts import A16, B16, CHUNK, MMA, TWICE_ROWS, by_column, rows_by


@gluon.jit
def tile_scores_columns(query, codes, start, spans, scale):
    """Scores (base 2) [16, W] of the tile in `codes`; `query` [W, 128] in shared memory, scores per unit of it `scale` [W]."""
    W: gl.constexpr = scale.shape[0]
    LAYOUT: gl.constexpr = by_column(TILE, W)
    q = each_twice(query, TWICE_ROWS, rows_by(128)) if W == 4 else query.load(rows_by(128))
    q = gl.convert_layout(gl.permute(q, (1, 0)), B16, assert_trivial=True)
    s = columns(mma_v2(as_tile(codes).load(A16), q, gl.zeros([TILE, 8], gl.float32, MMA)), W)
    seen = start + gl.arange(0, TILE, gl.SliceLayout(1, LAYOUT)) < spans[2]
    scale = gl.convert_layout(scale, gl.SliceLayout(0, LAYOUT), assert_trivial=True)[None, :]
    return gl.where(seen[:, None], s * scale, float("-inf"))


@gluon.jit
def add_tile_columns(state, s, codes):
    """Adds a tile to (maximum [W], sum of weights [8, W], four sums [32, W]), each measured by the maximum as it then is. The
    sum of weights is over its 8 rows."""
    W: gl.constexpr = s.shape[1]
    top, total, sums = state
    higher = gl.maximum(top, gl.convert_layout(gl.max(s, 0), top.type.layout, assert_trivial=True))
    shrink = gl.exp2(top - higher)
    p = gl.exp2(s - gl.convert_layout(higher, gl.SliceLayout(0, s.type.layout), assert_trivial=True)[None, :])
    half = p.to(gl.float16)
    if W == 4:
        half = gl.reshape(gl.join(half, half), (TILE, 8))
    half = turned(gl.convert_layout(half, by_column(TILE, 8), assert_trivial=True))
    operand = gl.convert_layout(gl.permute(half, (1, 0)), B16, assert_trivial=True)
    moved = ()
    for i in gl.static_range(4):
        v = as_tile(codes).slice(i * CHUNK, CHUNK, dim=1).permute((1, 0)).load(A16)
        added = columns(mma_v2(v, operand, gl.zeros([CHUNK, 8], gl.float32, MMA)), W)
        moved = moved + (sums[i] * shrink[None, :] + added,)
    across = gl.convert_layout(shrink, gl.SliceLayout(0, by_column(8, W)), assert_trivial=True)[None, :]
    return higher, total * across + per_row(p), moved


@gluon.jit
def per_row(p):
    """[n, W] -> [8, W]: sums of the rows that a lane has."""
    W: gl.constexpr = p.shape[1]
    sums = gl.sum(gl.reshape(p, (p.shape[0] // 8, 8, W)), 0)
    return gl.convert_layout(sums, by_column(8, W), assert_trivial=True)


@gluon.jit
def no_tokens_columns(W: gl.constexpr):
    """The state before the first tile."""
    nothing = gl.zeros([CHUNK, W], gl.float32, by_column(CHUNK, W))
    top = gl.full([W], LOWEST, gl.float32, gl.SliceLayout(0, by_column(CHUNK, W)))
    return top, gl.zeros([8, W], gl.float32, by_column(8, W)), (nothing, nothing, nothing, nothing)
