"""The end of a program: what its share adds up to."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from forefetch.kernels.attention.gluon.layouts import CHUNK, rows_by
from forefetch.kernels.attention.gluon.page import row_max
from forefetch.kernels.attention.gluon.pair import fold_rows, own_column


@gluon.jit
def summed(state, PAIR: gl.constexpr):
    """The state after the last page -> (maximum [8], sum of weights [8], four sums [8, 32])."""
    ROW: gl.constexpr = gl.SliceLayout(1, rows_by(CHUNK))
    top, total, weighted, sums = state
    total = gl.convert_layout(row_max(total), ROW, assert_trivial=True)
    if PAIR:
        return fold_rows(top, total, gl.convert_layout(own_column(weighted), ROW, assert_trivial=True), sums)
    else:
        zero = gl.convert_layout(row_max(weighted), ROW, assert_trivial=True)[:, None]
        return top, total, (sums[0] + zero, sums[1] + zero, sums[2] + zero, sums[3] + zero)


@gluon.jit
def finish(result, partial, stats, first_head, split, splits, G: gl.constexpr):
    """Writes what `triton._merge` joins."""
    PART: gl.constexpr = rows_by(CHUNK)
    top, total, sums = result
    g = gl.arange(0, 8, gl.SliceLayout(1, PART))
    at = (first_head + g) * splits + split
    channel = gl.arange(0, CHUNK, gl.SliceLayout(0, PART))
    for i in gl.static_range(4):
        out = partial + at[:, None].to(gl.int64) * 128 + (channel + i * CHUNK)[None, :]
        gl.store(out, sums[i], mask=(g < G)[:, None])
    gl.store(stats + at * 2, top, mask=g < G)
    gl.store(stats + at * 2 + 1, total, mask=g < G)
