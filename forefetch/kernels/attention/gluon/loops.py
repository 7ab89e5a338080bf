"""Page after page: the loop over sealed pages of a program, each page's copies under way while the one before is worked on."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy

from forefetch.kernels.attention.gluon.copies import (
    get,
    load_keys,
    load_meta,
    load_values,
    pick,
    pick_thirds,
)
from forefetch.kernels.attention.gluon.layouts import CHUNK, rows_by
from forefetch.kernels.attention.gluon.page import (
    add_values,
    row_max,
    scores,
    soft,
    weights_operand,
)

# A running maximum moves only when a page exceeds it by this much (base 2): sums are float32 and have the range.
HEADROOM = gl.constexpr(60.0)


@gluon.jit
def hide_sinks(parts, SINKS: gl.constexpr):
    """Page 0's first tokens are read as float16 instead."""
    token, hidden = gl.arange(0, CHUNK, gl.SliceLayout(0, rows_by(CHUNK)))[None, :], ()
    for i in gl.static_range(4):
        hidden = hidden + (gl.where(token + i * CHUNK < SINKS, float("-inf"), parts[i]),)
    return hidden


@gluon.jit
def raise_top(top, page_top, total, weighted, sums):
    """Moves the running maximum to the page's, and everything that was measured by it."""
    higher = gl.maximum(top, page_top)
    shrink = gl.exp2(top - higher)
    across = gl.convert_layout(shrink, gl.SliceLayout(1, rows_by(8)), assert_trivial=True)[:, None]
    a = shrink[:, None]
    return higher, total * across, weighted * across, (sums[0] * a, sums[1] * a, sums[2] * a, sums[3] * a)


@gluon.jit
def with_page(total, weighted, page_total, page_weighted, share):
    """Sums [8, 8] with `share` [8] of the page's added."""
    across = gl.convert_layout(share, gl.SliceLayout(1, rows_by(8)), assert_trivial=True)[:, None]
    return total + page_total * across, weighted + page_weighted * across


@gluon.jit
def attend_pages(
    state, query, head, span, pages, k_buffers, v_buffers, levels, one, q, scales, G: gl.constexpr, F: gl.constexpr
):  # fmt: skip
    """The span's pages -> (maximum [8], sum of weights [8, 8], sum of weights times zero [8, 8], sums four [8, 32]).

    `span`: (row of the page table, first page, end); `pages`: (the first one's number, its `load_meta`); `q`: (the row's
    queries, stride of heads); `scales`: (base-2 scale of scores, the same per unit of stored queries [8], that unit [8])."""
    N: gl.constexpr = get(F, "outliers")
    table, first, last = span
    top, total, sums = state
    weighted = gl.zeros([8, 8], gl.float32, rows_by(8))
    page, meta = pages
    picked, third = pick(q[0], q[1], meta, scales[0], G, 0, N), 0
    if get(F, "thirds") > 0:
        third = pick_thirds(q[0], q[1], head, page, meta, scales[2], G, 0, F)
    coming = gl.load(table + first + 1, mask=first + 1 < last, other=0)
    for p in range(first, last):
        following = load_meta(head, coming, F)
        after = gl.load(table + p + 2, mask=p + 2 < last, other=0)
        async_copy.wait_group(1)
        parts = scores(query, k_buffers, picked, third, levels, one, scales[1], N, get(F, "name"))
        load_keys(head, coming, p + 1 < last, k_buffers, 0, F)
        async_copy.commit_group()
        if get(F, "sinks") > 0:
            if p == 0:
                parts = hide_sinks(parts, get(F, "sinks"))
        page_top = row_max(gl.maximum(gl.maximum(parts[0], parts[1]), gl.maximum(parts[2], parts[3])))
        if gl.max(page_top - top, 0) > HEADROOM:
            top, total, weighted, sums = raise_top(top, page_top, total, weighted, sums)
        share = gl.exp2(page_top - top)
        picked = pick(q[0], q[1], following, scales[0], G, 0, N)
        if get(F, "thirds") > 0:
            third = pick_thirds(q[0], q[1], head, coming, following, scales[2], G, 0, F)
        async_copy.wait_group(1)
        weights, page_total, page_weighted = soft(parts, page_top, v_buffers[1].slice(128, 128))
        total, weighted = with_page(total, weighted, page_total, page_weighted, share)
        operand = weights_operand(weights, v_buffers[1].slice(0, 128))
        sums = add_values(sums, operand, v_buffers[0], v_buffers[2], share * meta[0], levels, one, get(F, "name") == "asym3")
        load_values(head, coming, p + 1 < last, v_buffers, 0, F)
        async_copy.commit_group()
        meta, coming = following, after
    async_copy.wait_group(0)
    return top, total, weighted, sums
