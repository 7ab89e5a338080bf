"""`loop_columns.attend_pages_columns` for `fp4`: the four quarters of a page's codes go round a ring of three, one copied
where another was read."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy

from forefetch.kernels.attention.gluon.copies import get, load_keys, load_meta, load_quarter, load_values, pick
from forefetch.kernels.attention.gluon.layouts import CHANNELS, CHUNK, FLAT, QUERY, by_column
from forefetch.kernels.attention.gluon.loop_columns import hide_sinks_columns, raise_top_columns, with_page_columns
from forefetch.kernels.attention.gluon.loops import HEADROOM
from forefetch.kernels.attention.gluon.page_columns import column_max, zero_columns
from forefetch.kernels.attention.gluon.page_half import UP, add_half_values, half_scores, soft_half


@gluon.jit
def _scores(query, head, pages, more, buffers, slots, picked, factor, scale, tables, one, F: gl.constexpr):
    """Scores of a page as four [32, 8]. `pages`: (this, the next); `more`: whether there is a next one; `slots` of the ring:
    where the first half of K's codes is, and the second."""
    N: gl.constexpr = get(F, "outliers")
    ring, scales = buffers[0], buffers[1]._reinterpret(gl.int8, [4, 128], FLAT)
    base, unit = zero_columns(query.load(QUERY), buffers[2].load(CHANNELS), 8) * scale[None, :], scale * factor
    nothing = gl.zeros([CHUNK, 8], gl.float32, by_column(CHUNK, 8))
    parts, at = (nothing, nothing, nothing, nothing), slots[0]
    for half in gl.static_range(2):
        async_copy.wait_group(2)
        some = half_scores(query.load(QUERY), ring.index(at), scales, half, base, picked, buffers[3], unit, tables, one, N)
        parts = parts[2], parts[3], some[0], some[1]
        if half == 0:
            load_quarter(ring.index(slots[0]), head, pages[0], pages[0] >= 0, 3, F)
        else:
            load_keys(head, pages[1], more, buffers, slots[1], F)
        async_copy.commit_group()
        at = slots[1]
    return parts


@gluon.jit
def _add_values(sums, weights, head, coming, more, buffers, slots, unit, tables, one, F: gl.constexpr):
    """`sums` with the page's values; `slots`: where the halves of V's codes are."""
    ring, scales = buffers[0], buffers[1]._reinterpret(gl.int8, [4, 128], FLAT)
    at = slots[0]
    for half in gl.static_range(2):
        async_copy.wait_group(2)
        some = add_half_values(sums, weights, ring.index(at), scales, half, unit, tables, one)
        sums = sums[2], sums[3], some[0], some[1]
        if half == 0:
            load_quarter(ring.index(slots[0]), head, coming, more, 1, F)
        else:
            load_values(head, coming, more, buffers, slots[1], F, 8)
        async_copy.commit_group()
        at = slots[1]
    return sums


@gluon.jit
def attend_half_pages(
    state, query, head, span, pages, k_buffers, v_buffers, tables, one, q, scales, G: gl.constexpr, F: gl.constexpr
):
    """The span's pages: see `loop_columns.attend_pages_columns`, with 8 columns."""
    N: gl.constexpr = get(F, "outliers")
    table, first, last = span
    top, total, sums = state
    weighted = gl.zeros([8, 8], gl.float32, by_column(8, 8))
    page, meta = pages
    picked = pick(q[0], q[1], meta, scales[0], G, 8, N)
    coming = gl.load(table + first + 1, mask=first + 1 < last, other=0)
    slot = first * 0
    async_copy.wait_group(1)  # both halves of the first page's K
    for p in range(first, last):
        following, more = load_meta(head, coming, F), p + 1 < last
        after = gl.load(table + p + 2, mask=p + 2 < last, other=0)
        second, third = gl.where(slot == 2, 0, slot + 1), gl.where(slot == 0, 2, slot - 1)
        async_copy.wait_group(2)
        parts = _scores(
            query, head, (page, coming), more, k_buffers, (slot, second), picked, meta[1], scales[1], tables, one, F
        )  # fmt: skip
        if get(F, "sinks") > 0:
            if p == 0:
                parts = hide_sinks_columns(parts, get(F, "sinks"))
        page_top = column_max(gl.maximum(gl.maximum(parts[0], parts[1]), gl.maximum(parts[2], parts[3])))
        if gl.max(page_top - top, 0) > HEADROOM:
            top, total, weighted, sums = raise_top_columns(top, page_top, total, weighted, sums)
        page_top -= UP
        share = gl.exp2(page_top - top)
        picked = pick(q[0], q[1], following, scales[0], G, 8, N)
        async_copy.wait_group(2)
        weights, page_total, page_weighted = soft_half(parts, page_top, v_buffers[2])
        total, weighted = with_page_columns(total, weighted, page_total, page_weighted, share * 0.125)  # there are 8 equal rows
        unit = share * meta[0]
        sums = _add_values(sums, weights, head, coming, more, v_buffers, (third, slot), unit, tables, one, F)
        meta, page, coming, slot = following, coming, after, second
    async_copy.wait_group(0)
    return top, total, weighted, sums
