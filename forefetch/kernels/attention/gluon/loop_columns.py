"""`loops.attend_pages` with heads as columns, and what its states go through between pages."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy

from forefetch.kernels.attention.gluon.copies import get, load_keys, load_meta, load_values, pick, pick_thirds
from forefetch.kernels.attention.gluon.layouts import CHUNK, by_column
from forefetch.kernels.attention.gluon.loops import HEADROOM
from forefetch.kernels.attention.gluon.page_columns import add_values, column_max, scores, soft


@gluon.jit
def hide_sinks_columns(parts, SINKS: gl.constexpr):
    """Page 0's first tokens are read as float16 instead."""
    LAYOUT: gl.constexpr = by_column(CHUNK, parts[0].shape[1])
    token, hidden = gl.arange(0, CHUNK, gl.SliceLayout(1, LAYOUT))[:, None], ()
    for i in gl.static_range(4):
        hidden = hidden + (gl.where(token + i * CHUNK < SINKS, float("-inf"), parts[i]),)
    return hidden


@gluon.jit
def raise_top_columns(top, page_top, total, weighted, sums):
    """Moves the running maximum [W] to the page's, and everything that was measured by it."""
    higher = gl.maximum(top, page_top)
    shrink = gl.exp2(top - higher)
    across = gl.convert_layout(shrink, gl.SliceLayout(0, by_column(8, sums[0].shape[1])), assert_trivial=True)[None, :]
    a = shrink[None, :]
    return higher, total * across, weighted * across, (sums[0] * a, sums[1] * a, sums[2] * a, sums[3] * a)


@gluon.jit
def with_page_columns(total, weighted, page_total, page_weighted, share):
    """Sums [8, W] with `share` [W] of the page's added."""
    across = gl.convert_layout(share, gl.SliceLayout(0, by_column(8, total.shape[1])), assert_trivial=True)[None, :]
    return total + page_total * across, weighted + page_weighted * across


@gluon.jit
def attend_pages_columns(
    state, query, head, span, pages, k_buffers, v_buffers, levels, one, q, scales, G: gl.constexpr, F: gl.constexpr
):
    """The span's pages -> (maximum [4]; sums of weights, and of weights times zero, over 8 rows of [8, 4]; sums four [32, 4]).

    `scales`: (base-2 scale of scores, the same per unit of the stored queries [4], that unit [8] by row)."""
    N: gl.constexpr = get(F, "outliers")
    table, first, last = span
    top, total, sums = state
    weighted = gl.zeros([8, 4], gl.float32, by_column(8, 4))
    page, meta = pages
    picked, third = pick(q[0], q[1], meta, scales[0], G, 4, N), 0
    if get(F, "thirds") > 0:
        third = pick_thirds(q[0], q[1], head, page, meta, scales[2], G, 4, F)
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
                parts = hide_sinks_columns(parts, get(F, "sinks"))
        page_top = column_max(gl.maximum(gl.maximum(parts[0], parts[1]), gl.maximum(parts[2], parts[3])))
        if gl.max(page_top - top, 0) > HEADROOM:
            top, total, weighted, sums = raise_top_columns(top, page_top, total, weighted, sums)
        share = gl.exp2(page_top - top)
        picked = pick(q[0], q[1], following, scales[0], G, 4, N)
        if get(F, "thirds") > 0:
            third = pick_thirds(q[0], q[1], head, coming, following, scales[2], G, 4, F)
        async_copy.wait_group(1)
        operand, page_total, page_weighted = soft(parts, page_top, v_buffers[1].slice(0, 128), v_buffers[2])
        total, weighted = with_page_columns(total, weighted, page_total, page_weighted, share)
        sums = add_values(sums, operand, v_buffers[0], v_buffers[3], share * meta[0], levels, one, get(F, "name") == "asym3")
        load_values(head, coming, p + 1 < last, v_buffers, 0, F, 4)
        async_copy.commit_group()
        meta, coming = following, after
    async_copy.wait_group(0)
    return top, total, weighted, sums
