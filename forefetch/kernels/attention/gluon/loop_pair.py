"""`loops.attend_pages` by two pages at a time (`pair.py`): their four parts of codes go round a ring, as in `loop_half.py`."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy

from forefetch.kernels.attention.gluon.codes import LIMIT, STEPS
from forefetch.kernels.attention.gluon.copies import get, load_pair_keys, load_pair_meta, load_pair_values, load_part, pick
from forefetch.kernels.attention.gluon.half import LOWEST
from forefetch.kernels.attention.gluon.layouts import rows_by
from forefetch.kernels.attention.gluon.loops import HEADROOM, hide_sinks, raise_top, with_page
from forefetch.kernels.attention.gluon.page import row_max
from forefetch.kernels.attention.gluon.pair import (
    empty_second,
    hide_second,
    pair_queries,
    pair_soft,
    pair_weights,
    with_products,
)


@gluon.jit
def two_pages(table, at, last):
    """Page numbers at `at` and behind it, 0 beyond the last."""
    return gl.load(table + at, mask=at < last, other=0), gl.load(table + at + 1, mask=at + 1 < last, other=0)


@gluon.jit
def _scores(query, head, pages, have, buffers, slots, picked, table, one, scale, two, F: gl.constexpr):
    """Scores of two pages as four [8, 32]. `pages`: (these two, the next two), `have`: how many of each are there; `slots` of
    the ring: where K's codes of the first page are, and of the second."""
    parts, operand, unit = pair_queries(query, buffers[1], buffers[2], picked, scale, get(F, "outliers"))
    ring, at = buffers[0], slots[0]
    for page in range(two):
        async_copy.wait_group(2)
        parts = with_products(parts, operand, ring.index(at), page, unit, table, one)
        if page == 0:
            load_part(ring.index(slots[0]), head, pages[0][1], have[0] > 1, True, F)
        else:
            load_pair_keys(head, pages[1], have[1], buffers, slots[1], F)
        async_copy.commit_group()
        at = slots[1]
    return parts


@gluon.jit
def _add_values(sums, weights, head, coming, have, buffers, slots, factor, table, one, two, F: gl.constexpr):
    """`sums` with `factor` [8] times both pages' weighted levels; `slots`: where V's codes are."""
    operand, unit = pair_weights(weights, buffers[1].slice(0, 128, dim=1)), factor * (1.0 / (LIMIT * STEPS))
    ring, at = buffers[0], slots[0]
    for page in range(two):
        async_copy.wait_group(2)
        sums = with_products(sums, operand, ring.index(at), page, unit, table, one)
        if page == 0:
            load_part(ring.index(slots[0]), head, coming[1], have > 1, False, F)
        else:
            load_pair_values(head, coming, have, buffers, slots[1], F)
        async_copy.commit_group()
        at = slots[1]
    return sums


@gluon.jit
def attend_pairs(
    state, query, head, span, pages, k_buffers, v_buffers, levels, one, q, scales, G: gl.constexpr, F: gl.constexpr
):
    """The span's pages: see `loops.attend_pages`. `pages`: the first two."""
    N: gl.constexpr = get(F, "outliers")
    table, first, last = span
    top, total, sums = empty_second(state)
    weighted = gl.zeros([8, 8], gl.float32, rows_by(8))
    meta = load_pair_meta(head, pages, last - first, F)
    picked = pick(q[0], q[1], meta, scales[0], G, N)
    coming = two_pages(table, first + 2, last)
    slot, two = first * 0, gl.minimum(last - first + 1, 2)  # a count that the compiler does not know
    async_copy.wait_group(1)  # K of the first two
    for p in range(first, last, 2):
        have = last - p, last - p - 2
        following, after = load_pair_meta(head, coming, have[1], F), two_pages(table, p + 4, last)
        second, third = gl.where(slot == 2, 0, slot + 1), gl.where(slot == 0, 2, slot - 1)
        async_copy.wait_group(2)
        parts = _scores(
            query, head, (pages, coming), have, k_buffers, (slot, second), picked, levels, one, scales[1], two, F
        )  # fmt: skip
        if get(F, "sinks") > 0:
            if p == 0:
                parts = hide_sinks(parts, get(F, "sinks"), 4)
        if p + 1 == last:
            parts = hide_second(parts)
        page_top = row_max(gl.maximum(gl.maximum(parts[0], parts[1]), gl.maximum(parts[2], parts[3])))
        page_top = gl.maximum(page_top, LOWEST)
        if gl.max(page_top - top, 0) > HEADROOM:
            top, total, weighted, sums = raise_top(top, page_top, total, weighted, sums)
        share = gl.exp2(page_top - top)
        picked = pick(q[0], q[1], following, scales[0], G, N)
        async_copy.wait_group(2)
        weights, page_total, page_weighted = pair_soft(parts, page_top, v_buffers[1].slice(128, 128, dim=1))
        total, weighted = with_page(total, weighted, page_total, page_weighted, share)
        sums = _add_values(
            sums, weights, head, coming, have[1], v_buffers, (third, slot), share * meta[0], levels, one, two, F
        )  # fmt: skip
        meta, pages, coming, slot = following, coming, after, second
    async_copy.wait_group(0)
    return top, total, weighted, sums
