"""The end of a program: what its share adds up to."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from forefetch.kernels.attention.gluon.layouts import CHUNK, PAIRS, by_column, rows_by


@gluon.jit
def finish(state, partial, stats, left, G: gl.constexpr, W: gl.constexpr):
    """Writes what is to be merged, at `left` (`kernel.attend_stream`). W: columns that heads are, 0: they are rows."""
    if W == 0:
        _finish_rows(state, partial, stats, left, G)
    else:
        _finish_columns(state, partial, stats, left, G, W)


@gluon.jit
def _finish_rows(state, partial, stats, left, G: gl.constexpr):
    PART: gl.constexpr = rows_by(CHUNK)
    ROW: gl.constexpr = gl.SliceLayout(1, PART)
    top, both, sums = state
    column = gl.arange(0, 4, gl.SliceLayout(0, PAIRS))[None, :]
    total = gl.convert_layout(gl.sum(gl.where(column == 1, both, 0.0), 1), ROW, assert_trivial=True)
    zero = gl.convert_layout(gl.sum(gl.where(column == 0, both, 0.0), 1), ROW, assert_trivial=True)[:, None]
    g = gl.arange(0, 8, ROW)
    at = left[0] + g * left[1]
    channel = gl.arange(0, CHUNK, gl.SliceLayout(0, PART))
    for i in gl.static_range(4):
        out = partial + at[:, None].to(gl.int64) * 128 + (channel + i * CHUNK)[None, :]
        gl.store(out, sums[i] + zero, mask=(g < G)[:, None])
    gl.store(stats + at * 2, top, mask=g < G)
    gl.store(stats + at * 2 + 1, total, mask=g < G)


@gluon.jit
def _finish_columns(state, partial, stats, left, G: gl.constexpr, W: gl.constexpr):
    PART: gl.constexpr = by_column(CHUNK, W)
    COLUMN: gl.constexpr = gl.SliceLayout(0, PART)
    top, total, weighted, sums = state
    total = gl.convert_layout(gl.sum(total, 0), COLUMN, assert_trivial=True)
    zero = gl.convert_layout(gl.sum(weighted, 0), COLUMN, assert_trivial=True)[None, :]
    g = gl.arange(0, W, COLUMN)
    at = left[0] + g * left[1]
    channel = gl.arange(0, CHUNK, gl.SliceLayout(1, PART))
    for i in gl.static_range(4):
        out = partial + at[None, :].to(gl.int64) * 128 + (channel + i * CHUNK)[:, None]
        gl.store(out, sums[i] + zero, mask=(g < G)[None, :])
    gl.store(stats + at * 2, top, mask=g < G)
    gl.store(stats + at * 2 + 1, total, mask=g < G)
