"""The end of a program: what its share adds up to, and the join of all shares where few programs work on a row."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from forefetch.kernels.attention.gluon.layouts import CHUNK, joined_by, rows_by
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


@gluon.jit
def is_last(arrived, splits):
    """Whether all other programs of this row and KV head have left their shares; the last one sets the count back to 0."""
    gl.thread_barrier()
    last = gl.atomic_add(arrived, 1, sem="acq_rel", scope="gpu") == splits - 1
    gl.thread_barrier()
    if last:
        gl.store(arrived, 0)
    return last


@gluon.jit
def join(partial, stats, out, first_head, splits, out_head, G: gl.constexpr, S: gl.constexpr):
    """`triton._merge` for the G heads that `out` points to, of at most S splits; what others wrote is not in the L1 cache."""
    H: gl.constexpr = min(4, 16 // S)  # heads at a time: 64 registers
    L: gl.constexpr = joined_by(H, S)
    s = gl.arange(0, S, gl.SliceLayout(0, gl.SliceLayout(2, L)))
    d = gl.arange(0, 128, gl.SliceLayout(0, gl.SliceLayout(1, L)))
    for first in range(0, G, H):
        g = first + gl.arange(0, H, gl.SliceLayout(1, gl.SliceLayout(2, L)))
        at = (first_head + g)[:, None] * splits + s[None, :]
        there = (g < G)[:, None] & (s < splits)[None, :]
        top = gl.load(stats + at * 2, mask=there, other=float("-inf"), cache_modifier=".cg")
        total = gl.load(stats + at * 2 + 1, mask=there, other=0.0, cache_modifier=".cg")
        channel = gl.expand_dims(gl.expand_dims(gl.arange(0, 128, gl.SliceLayout(0, gl.SliceLayout(1, L))), 0), 1)
        sums = gl.load(
            partial + gl.expand_dims(at.to(gl.int64) * 128, 2) + channel,
            mask=gl.expand_dims(there, 2),
            other=0.0,
            cache_modifier=".cg",
        )
        used = total != 0.0
        best = gl.max(gl.where(used, top, float("-inf")), 1)
        best = gl.where(best > float("-inf"), best, 0.0)
        weight = gl.where(used, gl.exp2(top - best[:, None]), 0.0)
        norm = gl.sum(total * weight, 1)
        mixed = gl.sum(gl.where(gl.expand_dims(used, 2), sums, 0.0) * gl.expand_dims(weight, 2), 1)
        norm = gl.convert_layout(gl.where(norm > 0.0, norm, 1.0), gl.SliceLayout(1, gl.SliceLayout(1, L)), assert_trivial=True)
        head = first + gl.arange(0, H, gl.SliceLayout(1, gl.SliceLayout(1, L)))
        value = (mixed / norm[:, None]).to(out.dtype.element_ty)
        gl.store(out + head[:, None] * out_head + d[None, :], value, mask=(head < G)[:, None])
