"""Joins the parts of every stream where all work was cut as one line (`cut`)."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from forefetch.kernels.attention.gluon.cut import (
    all_units,
    share_with,
    shares_of,
    some_units,
    stream_units,
    units_before,
)
from forefetch.kernels.attention.gluon.half import LOWEST
from forefetch.kernels.attention.gluon.launch import await_others, let_others_start


@gluon.constexpr_function
def _layout(parts, channels, warps):
    """[parts, channels]: 16 bytes a lane."""
    across = min(32, channels // 4)
    return gl.BlockedLayout([1, 4], [32 // across, across], [warps, 1], [1, 0])


@gluon.constexpr_function
def _rows(warps):
    """[64] rows, all of them in each warp."""
    lanes = [[2], [4], [8], [16], [32]]
    return gl.DistributedLinearLayout([[1]], lanes, [[0]] * (warps.bit_length() - 1), [], [64])


@gluon.jit(do_not_specialize=["programs", "rows"])
def merge_parts(
    partial, stats, out, sealed, lengths, programs, rows, out_row, out_head,
    HK: gl.constexpr, G: gl.constexpr, F: gl.constexpr, COSTS: gl.constexpr,
    S: gl.constexpr, C: gl.constexpr, WARPS: gl.constexpr,
):  # fmt: skip
    """Program (row * HK + KV head, head of its G, block of C channels): out[row, head] of its parts, S at a time.

    Which parts a stream's are is found before the kernel that leaves them has ended: lengths are older than that. The
    next kernel is brought up when it has ended: beside it some processors would get more of the next's programs than others.
    """
    LAYOUT: gl.constexpr = _layout(S, C, WARPS)
    SIDE: gl.constexpr = gl.SliceLayout(1, LAYOUT)
    stream, g = gl.program_id(0), gl.program_id(1)
    row = stream // HK
    first, last = parts_of(stream, row, sealed, lengths, programs, rows, HK, F, COSTS, _rows(WARPS))
    await_others()
    let_others_start()
    d = gl.program_id(2) * C + gl.arange(0, C, gl.SliceLayout(0, LAYOUT))
    best, norm, acc = LOWEST + 0.0 * row, 0.0 * row, gl.zeros([C], gl.float32, gl.SliceLayout(0, LAYOUT))
    for at in range(first, last + 1, S):
        part = at + gl.arange(0, S, SIDE)
        here, head = part <= last, part * G + g
        top = gl.load(stats + head * 2, mask=here, other=LOWEST)
        weight = gl.load(stats + head * 2 + 1, mask=here, other=0.0)
        sums = gl.load(partial + head[:, None].to(gl.int64) * 128 + d[None, :], mask=here[:, None], other=0.0)
        higher = gl.maximum(best, gl.max(top, 0))
        scale, shrink = gl.exp2(top - higher), gl.exp2(best - higher)
        norm = norm * shrink + gl.sum(weight * scale, 0)
        acc = acc * shrink + gl.sum(sums * scale[:, None], 0)
        best = higher
    result = acc / gl.where(norm > 0.0, norm, 1.0)
    at = out + row.to(gl.int64) * out_row + (stream % HK * G + g) * out_head + d
    gl.store(at, result.to(out.dtype.element_ty))


@gluon.jit
def parts_of(
    stream, row, sealed, lengths, programs, rows,
    HK: gl.constexpr, F: gl.constexpr, COSTS: gl.constexpr, LAYOUT: gl.constexpr,
):  # fmt: skip
    """A stream's first part and its last one."""
    _, units = stream_units(gl.load(sealed + row), gl.load(lengths + row), F, COSTS)
    units_of = some_units(sealed, lengths, rows, 0, F, COSTS, LAYOUT)
    total = all_units(units_of, sealed, lengths, rows, F, COSTS) * HK
    begin = units_before(units_of, sealed, lengths, row, F, COSTS) * HK + stream % HK * units
    shares = shares_of(total, programs, COSTS)
    return stream + share_with(begin, total, shares), stream + share_with(begin + units - 1, total, shares)
