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
from forefetch.kernels.attention.gluon.half import LOWEST
from forefetch.kernels.attention.gluon.layouts import CHUNK, PAIRS, rows_by
from forefetch.kernels.attention.gluon.page import (
    add_values,
    add_weights,
    row_max,
    scores,
    to_limit,
    weigh,
    weights_operand,
)

# A running maximum moves only when a page exceeds it by this much (base 2): sums are float32 and have the range.
HEADROOM = gl.constexpr(60.0)
# Here weights are float16 before they are summed: what they are measured by moves when one exceeds 2^14,
# here as the bits of a float32.
LARGEST = gl.constexpr(0x46800000)


@gluon.jit
def hide_sinks(parts, SINKS: gl.constexpr):
    """Page 0's first tokens are read as float16 instead."""
    token, hidden = gl.arange(0, CHUNK, gl.SliceLayout(0, rows_by(CHUNK)))[None, :], ()
    for i in gl.static_range(4):
        hidden = hidden + (gl.where(token + i * CHUNK < SINKS, float("-inf"), parts[i]),)
    return hidden


@gluon.jit
def measure_anew(parts, top, both, sums, first):
    """Moves the reference [8] to the page's maximum where that is higher, or anywhere if `first`, and what was measured by it.

    Returns (scores, reference, sums of weights, sums)."""
    page_top = row_max(gl.maximum(gl.maximum(parts[0], parts[1]), gl.maximum(parts[2], parts[3])))
    up = gl.where(first, page_top, gl.maximum(page_top, 0.0))
    shrink = gl.exp2(gl.minimum(-up, 0.0))  # the first page's reference may come down: there are no sums yet
    across = gl.convert_layout(shrink, gl.SliceLayout(1, PAIRS), assert_trivial=True)[:, None]
    u, a = up[:, None], shrink[:, None]
    parts = parts[0] - u, parts[1] - u, parts[2] - u, parts[3] - u
    return parts, top + up, both * across, (sums[0] * a, sums[1] * a, sums[2] * a, sums[3] * a)


@gluon.jit
def attend_pages(
    state, query, head, span, pages, k_buffers, v_buffers, levels, one, q, scales, G: gl.constexpr, F: gl.constexpr
):  # fmt: skip
    """The span's pages -> (reference [8], sums of weights times zero and of weights in even and odd columns of [8, 4], sums
    four [8, 32]).

    `span`: (row of the page table, first page, end); `pages`: (the first one's number, its `load_meta`); `q`: (the row's
    queries, stride of heads); `scales`: (base-2 scale of scores, the same per unit of stored queries [8], that unit [8])."""
    N: gl.constexpr = get(F, "outliers")
    table, first, last = span
    top, both, sums = state
    fresh = gl.max(top, 0) <= LOWEST
    top = gl.where(fresh, 0.0, top)
    page, meta = pages
    picked, third = pick(q[0], q[1], meta, scales[0], G, 0, N), 0
    if get(F, "thirds") > 0:
        third = pick_thirds(q[0], q[1], head, page, meta, scales[2], G, 0, F)
    coming = gl.load(table + first + 1, mask=first + 1 < last, other=0)
    for p in range(first, last):
        following = load_meta(head, coming, F)
        after = gl.load(table + p + 2, mask=p + 2 < last, other=0)
        async_copy.wait_group(1)
        parts = scores(query, k_buffers, picked, third, levels, one, scales[1], top, N, get(F, "name"))
        load_keys(head, coming, p + 1 < last, k_buffers, 0, F)
        async_copy.commit_group()
        if get(F, "sinks") > 0:
            if p == 0:
                parts = hide_sinks(parts, get(F, "sinks"))
        weights, largest, most = weigh(parts)
        if (most > LARGEST) | fresh:
            parts, top, both, sums = measure_anew(parts, top, both, sums, fresh)
            weights, largest, _ = weigh(parts)
            fresh = first < 0  # no more
        picked = pick(q[0], q[1], following, scales[0], G, 0, N)
        if get(F, "thirds") > 0:
            third = pick_thirds(q[0], q[1], head, coming, following, scales[2], G, 0, F)
        async_copy.wait_group(1)
        both = add_weights(both, weights, v_buffers[2])
        factor, back = to_limit(largest)
        operand = weights_operand(weights, v_buffers[1], factor)
        sums = add_values(sums, operand, v_buffers[0], v_buffers[3], back * meta[0], levels, one, get(F, "name") == "asym3")
        load_values(head, coming, p + 1 < last, v_buffers, 0, F, 0)
        async_copy.commit_group()
        meta, coming = following, after
    async_copy.wait_group(0)
    return gl.where(fresh, LOWEST, top), both, sums
