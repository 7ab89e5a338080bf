"""The kernel: one warp per (split, row and KV head), first over its share of sinks and tail, then page by page."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy

from forefetch.kernels.attention.gluon.copies import (
    buffers,
    fetch_keys,
    fetch_values,
    get,
    load_keys,
    load_meta,
    load_values,
    pick,
    pick_thirds,
)
from forefetch.kernels.attention.gluon.decode import load_table
from forefetch.kernels.attention.gluon.half import TILE, add_tile, no_tokens, tile_scores, to_pages
from forefetch.kernels.attention.gluon.layouts import CHUNK, FLAT, QUERY, SWIZZLED, rows_by
from forefetch.kernels.attention.gluon.page import add_values, row_max, scores, soft, weights_operand
from forefetch.kernels.attention.gluon.page_half import UP, add_half_values, half_scores

# A running maximum moves only when a page exceeds it by this much (base 2): sums are float32 and have the range.
HEADROOM = gl.constexpr(60.0)


@gluon.jit
def hide_sinks(parts, SINKS: gl.constexpr):
    """Page 0's first tokens are read as float16 instead."""
    PART: gl.constexpr = rows_by(CHUNK)
    token = gl.arange(0, CHUNK, gl.SliceLayout(0, PART))[None, :]
    hidden = ()
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


@gluon.jit(do_not_specialize=["one", "n_pages", "n_tails", "table_row"])
def split_sealed(
    q, words, halves, raw, page_table, sealed, lengths, tails, tail_k, tail_v, sink_k, sink_v, partial, stats,
    scale, levels, one, n_pages, n_tails, table_row, q_row, q_head,
    HK: gl.constexpr, G: gl.constexpr, TAIL: gl.constexpr, F: gl.constexpr,
):  # fmt: skip
    """Program (split, row * HK + KV head) -> partial and stats [row, head, split] of G heads, as `triton._merge` wants them.

    `words`, `halves`, `raw`: the pages as int32, float16 and bytes. `levels` int32 [2, 32]: four levels, a byte
    each, of the codes without and with a third bit, 32 times (`load_table`).
    """
    SINKS: gl.constexpr = get(F, "sinks")
    BLOB: gl.constexpr = get(F, "blob_bytes")
    split, splits = gl.program_id(0), gl.num_programs(0)
    kv_head, row = gl.program_id(1) % HK, gl.program_id(1) // HK
    pages = gl.load(sealed + row)
    span = page_table + row * table_row, split * pages // splits, (split + 1) * pages // splits
    base = kv_head.to(gl.int64) * n_pages
    head = words + base * (BLOB // 4), halves + base * (BLOB // 2), raw + base * BLOB
    length, tail = gl.load(lengths + row), gl.load(tails + row)
    page = gl.load(span[0] + span[1], mask=span[1] < span[2], other=0)
    entry = (kv_head * n_tails + tail).to(gl.int64)
    keys = sink_k + entry * (SINKS * 128), tail_k + entry * (TAIL * 128)
    values = sink_v + entry * (SINKS * 128), tail_v + entry * (TAIL * 128)
    sinks = gl.minimum(length, SINKS)
    skipped = gl.where(pages == 0, sinks, 0)
    spans = sinks, skipped, sinks + length - pages * 128 - skipped
    k_buffers, v_buffers = buffers(F)
    q_at = q + row.to(gl.int64) * q_row + kv_head * G * q_head
    query, unit, row_scale = load_query(q_at, q_head, scale, G, UP if get(F, "name") == "fp4" else 0)
    tables = load_table(levels), load_table(levels + 32)
    state = attend_half(
        query, keys, values, spans, split * TILE, splits * TILE, head, page, span[1] < span[2], k_buffers, v_buffers,
        row_scale, F,
    )  # fmt: skip
    state = attend_pages(
        state, query, head, span, page, k_buffers, v_buffers, tables, one, (q_at, q_head),
        (scale, row_scale, unit), G, F,
    )  # fmt: skip
    finish(state, partial, stats, (row * HK + kv_head) * G, split, splits, G)


@gluon.jit
def load_query(q_at, q_head, scale, G: gl.constexpr, HIGH: gl.constexpr):
    """(Q of G heads as float16 [8, 128] in shared memory, what it was multiplied by [8], scores per unit of it [8]); heads
    repeat beyond G.

    A power of two brings each head below 2^HIGH, so that a product with any scale of K stays within float16.
    """
    head = gl.arange(0, 8, gl.SliceLayout(1, QUERY)) % G
    query = gl.load(q_at + head[:, None] * q_head + gl.arange(0, 128, gl.SliceLayout(0, QUERY))[None, :]).to(gl.float32)
    exponent = gl.maximum(gl.max(gl.abs(query), 1).to(gl.int32, bitcast=True) >> 23, HIGH)
    unit = ((253 + HIGH - exponent) << 23).to(gl.float32, bitcast=True)
    query = (query * unit[:, None]).to(gl.float16)
    back = ((exponent + 1 - HIGH) << 23).to(gl.float32, bitcast=True) * scale
    ROW: gl.constexpr = gl.SliceLayout(1, rows_by(CHUNK))
    return (
        gl.allocate_shared_memory(gl.float16, [8, 128], SWIZZLED, query),
        gl.convert_layout(unit, ROW),
        gl.convert_layout(back, ROW),
    )


@gluon.jit
def attend_half(
    query, keys, values, spans, first, stride, head, page, any_page, k_buffers, v_buffers, scale, F: gl.constexpr
):  # fmt: skip
    """Tiles of float16 tokens at first, first + stride, ... Leaves the first page's copies under way."""
    fetch_keys(keys, spans, first, head, page, any_page, k_buffers, F)
    fetch_values(values, spans, first, head, page, any_page, v_buffers, F)
    state = no_tokens()
    for start in range(first, spans[2], stride):
        async_copy.wait_group(1)
        s = tile_scores(query, k_buffers[0], start, spans, scale)
        fetch_keys(keys, spans, start + stride, head, page, any_page, k_buffers, F)
        async_copy.wait_group(1)
        state = add_tile(state, s, v_buffers[0])
        fetch_values(values, spans, start + stride, head, page, any_page, v_buffers, F)
    return to_pages(state)


@gluon.jit
def page_scores(query, buffers, picked, third, meta, levels, one, scale, F: gl.constexpr):
    """`scores` of the format."""
    N: gl.constexpr = get(F, "outliers")
    if get(F, "name") == "fp4":
        bytes_of = buffers[1]._reinterpret(gl.int8, [512], FLAT)
        return half_scores(query, (buffers[0], bytes_of, buffers[2], buffers[3]), picked, meta[1], scale, N)
    else:
        return scores(query, buffers, picked, third, levels, one, scale, N, get(F, "name"))


@gluon.jit
def page_values(sums, weights, buffers, factor, levels, one, F: gl.constexpr):
    """`add_values` of the format."""
    if get(F, "name") == "fp4":
        return add_half_values(sums, weights, buffers[0], buffers[1]._reinterpret(gl.int8, [512], FLAT), factor)
    else:
        operand = weights_operand(weights, buffers[1].slice(0, 128))
        return add_values(sums, operand, buffers[0], buffers[2], factor, levels, one, get(F, "name") == "asym3")


@gluon.jit
def attend_pages(
    state, query, head, span, page, k_buffers, v_buffers, levels, one, q, scales, G: gl.constexpr, F: gl.constexpr
):  # fmt: skip
    """The span's pages -> (maximum [8], sum of weights [8, 8], sum of weights times zero [8, 8], sums four [8, 32]).

    `span`: (row of the page table, first page, end); `q`: (the row's queries, stride of heads); `scales`: (base-2 scale of
    scores, the same per unit of the stored queries [8], that unit [8])."""
    N: gl.constexpr = get(F, "outliers")
    table, first, last = span
    top, total, sums = state
    weighted = gl.zeros([8, 8], gl.float32, rows_by(8))
    if get(F, "name") == "fp4":  # noqa: SIM108 - both sides of an expression would be compiled
        v_zero = v_buffers[2]
    else:
        v_zero = v_buffers[1].slice(128, 128)
    meta = load_meta(head, page, F)
    picked, third = pick(q[0], q[1], meta, scales[0], G, N), 0
    if get(F, "thirds") > 0:
        third = pick_thirds(q[0], q[1], head, page, meta, scales[2], G, F)
    coming = gl.load(table + first + 1, mask=first + 1 < last, other=0)
    for p in range(first, last):
        following = load_meta(head, coming, F)
        after = gl.load(table + p + 2, mask=p + 2 < last, other=0)
        async_copy.wait_group(1)
        parts = page_scores(query, k_buffers, picked, third, meta, levels, one, scales[1], F)
        load_keys(head, coming, p + 1 < last, k_buffers, F)
        async_copy.commit_group()
        if get(F, "sinks") > 0:
            if p == 0:
                parts = hide_sinks(parts, get(F, "sinks"))
        page_top = row_max(gl.maximum(gl.maximum(parts[0], parts[1]), gl.maximum(parts[2], parts[3])))
        if gl.max(page_top - top, 0) > HEADROOM:
            top, total, weighted, sums = raise_top(top, page_top, total, weighted, sums)
        if get(F, "name") == "fp4":
            page_top -= UP
        share = gl.exp2(page_top - top)
        picked = pick(q[0], q[1], following, scales[0], G, N)
        if get(F, "thirds") > 0:
            third = pick_thirds(q[0], q[1], head, coming, following, scales[2], G, F)
        async_copy.wait_group(1)
        weights, page_total, page_weighted = soft(parts, page_top, v_zero)
        across = gl.convert_layout(share, gl.SliceLayout(1, rows_by(8)), assert_trivial=True)[:, None]
        total, weighted = total + page_total * across, weighted + page_weighted * across
        sums = page_values(sums, weights, v_buffers, share * meta[0], levels, one, F)
        load_values(head, coming, p + 1 < last, v_buffers, F)
        async_copy.commit_group()
        meta, coming = following, after
    async_copy.wait_group(0)
    return top, total, weighted, sums


@gluon.jit
def finish(state, partial, stats, first_head, split, splits, G: gl.constexpr):
    """Writes what `triton._merge` joins."""
    PART: gl.constexpr = rows_by(CHUNK)
    top, total, weighted, sums = state
    zero = gl.convert_layout(row_max(weighted), gl.SliceLayout(1, PART), assert_trivial=True)[:, None]
    g = gl.arange(0, 8, gl.SliceLayout(1, PART))
    at = (first_head + g) * splits + split
    channel = gl.arange(0, CHUNK, gl.SliceLayout(0, PART))
    for i in gl.static_range(4):
        out = partial + at[:, None].to(gl.int64) * 128 + (channel + i * CHUNK)[None, :]
        gl.store(out, sums[i] + zero, mask=(g < G)[:, None])
    gl.store(stats + at * 2, top, mask=g < G)
    gl.store(stats + at * 2 + 1, gl.convert_layout(row_max(total), gl.SliceLayout(1, PART), assert_trivial=True), mask=g < G)
