"""The kernel: one warp per (split, row and KV head), first over its share of sinks and tail, then page by page."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy

from forefetch.kernels.attention.gluon.half import TILE, add_tile, load_tile, no_tokens, tile_scores, to_pages
from forefetch.kernels.attention.gluon.layouts import (
    CHUNK,
    COPY_HALVES,
    COPY_TOKENS,
    COPY_WORDS,
    FLAT,
    QUERY,
    SWIZZLED,
    rows_by,
)
from forefetch.kernels.attention.gluon.page import add_values, row_max, scores, weights

# Places within a blob, in units of its section's type (kv_codec/formats.py: e2m0 and asym2 at D = T = 128).
V_CODES = gl.constexpr(4096 // 4)
K_SCALE = gl.constexpr(8192 // 2)
V_SCALE = gl.constexpr(8704 // 2)
OUTLIERS = gl.constexpr(9216 // 2)
# A running maximum moves only when a page exceeds it by this much (base 2): sums are float32 and have the range.
HEADROOM = gl.constexpr(60.0)


@gluon.jit
def load_keys(head, page, wanted, buffers, BLOB: gl.constexpr, N: gl.constexpr):
    """Starts copying what `scores` reads of a page: codes, scale and zero, outliers."""
    words, halves = head[0] + page.to(gl.int64) * (BLOB // 4), head[1] + page.to(gl.int64) * (BLOB // 2)
    async_copy.async_copy_global_to_shared(buffers[0], words + gl.arange(0, 1024, COPY_WORDS), mask=wanted)
    async_copy.async_copy_global_to_shared(buffers[1], halves + K_SCALE + gl.arange(0, 256, COPY_HALVES), mask=wanted)
    if N > 0:
        tokens = gl.arange(0, N * 128, COPY_TOKENS)
        async_copy.async_copy_global_to_shared(buffers[2], halves + OUTLIERS + tokens, mask=wanted)


@gluon.jit
def load_values(head, page, wanted, buffers, BLOB: gl.constexpr):
    """Starts copying the rest of it: codes, scale and zero."""
    words, halves = head[0] + page.to(gl.int64) * (BLOB // 4), head[1] + page.to(gl.int64) * (BLOB // 2)
    async_copy.async_copy_global_to_shared(buffers[0], words + V_CODES + gl.arange(0, 1024, COPY_WORDS), mask=wanted)
    async_copy.async_copy_global_to_shared(buffers[1], halves + V_SCALE + gl.arange(0, 256, COPY_HALVES), mask=wanted)


@gluon.jit
def load_meta(head, page, N: gl.constexpr, BLOB: gl.constexpr):
    """(V's factor as float32, N outlier channels)."""
    meta = head[0] + page.to(gl.int64) * (BLOB // 4) + (BLOB - 128) // 4
    channels = ()
    for n in gl.static_range(N):
        channels = channels + (gl.load(meta + 2 + n) & 127,)  # of a page that is not there: anything, but inside the row
    return gl.load(meta).to(gl.float32, bitcast=True), channels


@gluon.jit
def pick(q_rows, channels, scale, N: gl.constexpr):
    """Scaled q[channel] of each head, for N channels."""
    picked = ()
    for n in gl.static_range(N):
        picked = picked + (gl.load(q_rows + channels[n]).to(gl.float32) * scale,)
    return picked


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


@gluon.jit(do_not_specialize=["levels", "one", "n_pages", "n_tails", "table_row"])
def split_sealed(
    q, words, halves, page_table, sealed, lengths, tails, tail_k, tail_v, sink_k, sink_v, partial, stats,
    scale, levels, one, n_pages, n_tails, table_row, q_row, q_head,
    HK: gl.constexpr, G: gl.constexpr, BLOB: gl.constexpr, N: gl.constexpr, SINKS: gl.constexpr, TAIL: gl.constexpr,
):  # fmt: skip
    """Program (split, row * HK + KV head) -> partial and stats [row, head, split] of G heads, as `triton._merge` wants them."""
    split, splits = gl.program_id(0), gl.num_programs(0)
    kv_head, row = gl.program_id(1) % HK, gl.program_id(1) // HK
    pages = gl.load(sealed + row)
    first, last = split * pages // splits, (split + 1) * pages // splits
    table = page_table + row * table_row
    base = kv_head.to(gl.int64) * n_pages
    head = words + base * (BLOB // 4), halves + base * (BLOB // 2)
    length, tail = gl.load(lengths + row), gl.load(tails + row)
    page = gl.load(table + first, mask=first < last, other=0)
    entry = (kv_head * n_tails + tail).to(gl.int64)
    keys = sink_k + entry * (SINKS * 128), tail_k + entry * (TAIL * 128)
    values = sink_v + entry * (SINKS * 128), tail_v + entry * (TAIL * 128)
    sinks = gl.minimum(length, SINKS)
    skipped = gl.where(pages == 0, sinks, 0)
    spans = sinks, skipped, sinks + length - pages * 128 - skipped
    k_buffers, v_buffers = buffers(N)
    q_at = q + row.to(gl.int64) * q_row + kv_head * G * q_head
    query, row_scale = load_query(q_at, q_head, scale, G)
    state = attend_half(
        query,
        keys,
        values,
        spans,
        split * TILE,
        splits * TILE,
        head,
        page,
        first < last,
        k_buffers,
        v_buffers,
        row_scale,
        BLOB,
        N,
    )
    state = attend_pages(
        state, query, head, table, first, last, page, k_buffers, v_buffers,
        levels, one, q_at, q_head, scale, row_scale, G, BLOB, N, SINKS,
    )  # fmt: skip
    finish(state, partial, stats, (row * HK + kv_head) * G, split, splits, G)


@gluon.jit
def load_query(q_at, q_head, scale, G: gl.constexpr):
    """(Q of G heads as float16 [8, 128] in shared memory, scores per unit of it [8]); heads repeat beyond G.

    A power of two brings each head below 1, so that a product with any scale of K stays within float16.
    """
    head = gl.arange(0, 8, gl.SliceLayout(1, QUERY)) % G
    query = gl.load(q_at + head[:, None] * q_head + gl.arange(0, 128, gl.SliceLayout(0, QUERY))[None, :]).to(gl.float32)
    exponent = gl.max(gl.abs(query), 1).to(gl.int32, bitcast=True) >> 23
    query = query * ((253 - exponent) << 23).to(gl.float32, bitcast=True)[:, None]
    unit = gl.convert_layout(((exponent + 1) << 23).to(gl.float32, bitcast=True) * scale, gl.SliceLayout(1, rows_by(CHUNK)))
    return gl.allocate_shared_memory(gl.float16, [8, 128], SWIZZLED, query.to(gl.float16)), unit


@gluon.jit
def buffers(N: gl.constexpr):
    """Shared memory of one page: (K codes, K scale and zero, outliers), (V codes, V scale and zero)."""
    k_codes, v_codes = gl.allocate_shared_memory(gl.int32, [1024], FLAT), gl.allocate_shared_memory(gl.int32, [1024], FLAT)
    k_rest, v_rest = gl.allocate_shared_memory(gl.float16, [256], FLAT), gl.allocate_shared_memory(gl.float16, [256], FLAT)
    outliers = gl.allocate_shared_memory(gl.float16, [max(1, N) * 128], FLAT)
    return (k_codes, k_rest, outliers), (v_codes, v_rest)


@gluon.jit
def fetch_keys(tokens, spans, start, head, page, any_page, buffers, BLOB: gl.constexpr, N: gl.constexpr):
    """What the K buffers hold next: the tile at `start`, else the first page, else nothing. One group of copies in any case.

    Branches and not masks alone: a masked copy writes zeros, and two copies to one place have no order.
    """
    if start < spans[2]:
        load_tile(tokens, spans, start, buffers[0])
    elif any_page:
        load_keys(head, page, any_page, buffers, BLOB, N)
    async_copy.commit_group()


@gluon.jit
def fetch_values(tokens, spans, start, head, page, any_page, buffers, BLOB: gl.constexpr):
    """The same of the V buffers."""
    if start < spans[2]:
        load_tile(tokens, spans, start, buffers[0])
    elif any_page:
        load_values(head, page, any_page, buffers, BLOB)
    async_copy.commit_group()


@gluon.jit
def attend_half(
    query, keys, values, spans, first, stride, head, page, any_page, k_buffers, v_buffers, scale,
    BLOB: gl.constexpr, N: gl.constexpr,
):  # fmt: skip
    """Tiles of float16 tokens at first, first + stride, ... Leaves the first page's copies under way."""
    fetch_keys(keys, spans, first, head, page, any_page, k_buffers, BLOB, N)
    fetch_values(values, spans, first, head, page, any_page, v_buffers, BLOB)
    state = no_tokens()
    for start in range(first, spans[2], stride):
        async_copy.wait_group(1)
        s = tile_scores(query, k_buffers[0], start, spans, scale)
        fetch_keys(keys, spans, start + stride, head, page, any_page, k_buffers, BLOB, N)
        async_copy.wait_group(1)
        state = add_tile(state, s, v_buffers[0])
        fetch_values(values, spans, start + stride, head, page, any_page, v_buffers, BLOB)
    return to_pages(state)


@gluon.jit
def attend_pages(
    state, query, head, table, first, last, page, k_buffers, v_buffers, levels, one, q_at, q_head, scale, row_scale,
    G: gl.constexpr, BLOB: gl.constexpr, N: gl.constexpr, SINKS: gl.constexpr,
):  # fmt: skip
    """Pages [first, last) -> (maximum [8], sum of weights [8, 8], sum of weights times zero [8, 8], sums four [8, 32])."""
    PART: gl.constexpr = rows_by(CHUNK)
    q_rows = q_at + gl.arange(0, 8, gl.SliceLayout(1, PART)) % G * q_head
    top, total, sums = state
    weighted = gl.zeros([8, 8], gl.float32, rows_by(8))
    factor, channels = load_meta(head, page, N, BLOB)
    picked = pick(q_rows, channels, scale, N)
    coming = gl.load(table + first + 1, mask=first + 1 < last, other=0)
    for p in range(first, last):
        next_factor, channels = load_meta(head, coming, N, BLOB)
        after = gl.load(table + p + 2, mask=p + 2 < last, other=0)
        async_copy.wait_group(1)
        parts = scores(query, k_buffers[0], k_buffers[1], k_buffers[2], picked, levels, one, row_scale, N)
        load_keys(head, coming, p + 1 < last, k_buffers, BLOB, N)
        async_copy.commit_group()
        if SINKS > 0:
            if p == 0:
                parts = hide_sinks(parts, SINKS)
        page_top = row_max(gl.maximum(gl.maximum(parts[0], parts[1]), gl.maximum(parts[2], parts[3])))
        if gl.max(page_top - top, 0) > HEADROOM:
            top, total, weighted, sums = raise_top(top, page_top, total, weighted, sums)
        share = gl.exp2(page_top - top)
        picked = pick(q_rows, channels, scale, N)
        async_copy.wait_group(1)
        operand, page_total, page_weighted = weights(parts, page_top, v_buffers[1])
        across = gl.convert_layout(share, gl.SliceLayout(1, rows_by(8)), assert_trivial=True)[:, None]
        total, weighted = total + page_total * across, weighted + page_weighted * across
        sums = add_values(sums, operand, v_buffers[0], share * factor, levels, one)
        load_values(head, coming, p + 1 < last, v_buffers, BLOB)
        async_copy.commit_group()
        factor, coming = next_factor, after
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
