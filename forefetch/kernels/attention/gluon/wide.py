"""The kernel with four warps to a program, for 5 to 8 heads per KV head and codes of two bits: see `wide_page.py`."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared

from forefetch.kernels.attention.gluon.codes import LIMIT, STEPS
from forefetch.kernels.attention.gluon.copies import get, place
from forefetch.kernels.attention.gluon.kernel import half_tokens
from forefetch.kernels.attention.gluon.launch import await_others, let_others_start
from forefetch.kernels.attention.gluon.layouts import FLAT
from forefetch.kernels.attention.gluon.wide_half import add_tiles, tile_span
from forefetch.kernels.attention.gluon.wide_layouts import BY, COPY_HALVES, OPERAND, PLAIN, QUERY, TOTAL, WORDS
from forefetch.kernels.attention.gluon.wide_page import (
    awaited,
    by_token,
    largest,
    levels_by,
    load_table,
    over_total,
    per_lane,
    products,
    put_queries,
    put_weights,
)


@gluon.jit(do_not_specialize=["apart", "one", "n_pages", "n_tails", "table_row"])
def split_wide(
    q, words, halves, page_table, sealed, lengths, tails, tail_k, tail_v, sink_k, sink_v, partial, stats,
    scale, levels, apart, one, n_pages, n_tails, table_row, q_row, q_head,
    HK: gl.constexpr, G: gl.constexpr, TAIL: gl.constexpr, F: gl.constexpr, LATE: gl.constexpr,
):  # fmt: skip
    """As `kernel.split_sealed`, whose arguments these are."""
    await_others()
    BLOB: gl.constexpr = get(F, "blob_bytes")
    split, shares = gl.program_id(0), gl.num_programs(0) - apart
    kv_head, row = gl.program_id(1) % HK, gl.program_id(1) // HK
    pages, length = gl.load(sealed + row), gl.load(lengths + row)
    mine = gl.minimum(split, shares)
    first, last = mine * pages // shares, gl.minimum(mine + 1, shares) * pages // shares
    table, base = page_table + row * table_row, kv_head.to(gl.int64) * n_pages
    head = words + base * (BLOB // 4), halves + base * (BLOB // 2)
    page = gl.load(table + first, mask=first < last, other=0)
    q_at = q + row.to(gl.int64) * q_row + kv_head * G * q_head
    asked = load_queries(q_at, q_head, G)
    entry = (kv_head * n_tails + gl.load(tails + row)).to(gl.int64)
    tokens = half_tokens(sink_k, tail_k, sink_v, tail_v, entry, pages, length, TAIL, F)
    span = tile_span(tokens[2][2], split, shares, apart)
    buffers = page_buffers(F)
    query, floats, back, unit = scaled_queries(asked, scale)
    state = add_tiles(query, unit, tokens, span, buffers[3])
    fetch_keys(head, page, first < last, buffers, F)
    fetch_values(head, page, first < last, buffers, F)
    state = attend_pages(state, query, floats, back, head, table, first, last, page, buffers, levels, one, q_at, q_head, scale, G, F, LATE)
    let_others_start()
    finish(state, partial, stats, (row * HK + kv_head) * G, split, gl.num_programs(0), G)


@gluon.jit
def load_queries(q_at, q_head, G: gl.constexpr):
    """Q of G heads [8, 128]; rows repeat."""
    head = gl.arange(0, 8, gl.SliceLayout(1, QUERY)) % G
    return gl.load(q_at + head[:, None] * q_head + gl.arange(0, 128, gl.SliceLayout(0, QUERY))[None, :])


@gluon.jit
def scaled_queries(query, scale):
    """(float16 [8, 128] with each head below 1 by a power of two; the same as float32; scores per unit of it [8]; that by head
    of BY)."""
    query = query.to(gl.float32)
    exponent = gl.maximum(gl.max(gl.abs(query), 1).to(gl.int32, bitcast=True) >> 23, 0)
    unit = ((253 - exponent) << 23).to(gl.float32, bitcast=True)
    query = (query * unit[:, None]).to(gl.float16)
    back = ((exponent + 1) << 23).to(gl.float32, bitcast=True) * scale
    return query, query.to(gl.float32), back, gl.convert_layout(back, gl.SliceLayout(0, BY))


@gluon.jit
def page_buffers(F: gl.constexpr):
    """Shared memory: K's scale and zero; V's; outliers; what warps tell one another: maxima, a page's numbers, operands of K's
    and of V's products."""
    k_rest, v_rest = gl.allocate_shared_memory(gl.float16, [256], FLAT), gl.allocate_shared_memory(gl.float16, [256], FLAT)
    outliers = gl.allocate_shared_memory(gl.float16, [max(1, get(F, "outliers")) * 128], FLAT)
    maxima = gl.allocate_shared_memory(gl.float32, [4, 8], PLAIN)
    numbers = gl.allocate_shared_memory(gl.float32, [8], FLAT), gl.allocate_shared_memory(gl.float32, [8], FLAT)
    asked = gl.allocate_shared_memory(gl.int8, [16, 128], OPERAND)
    weights = gl.allocate_shared_memory(gl.int8, [16, 128], OPERAND)
    return k_rest, v_rest, outliers, maxima, numbers, asked, weights


@gluon.jit
def fetch_keys(head, page, wanted, buffers, F: gl.constexpr):
    """Starts copying K's scale and zero: a group."""
    halves = head[1] + page.to(gl.int64) * (get(F, "blob_bytes") // 2)
    _copy(buffers[0], halves + place(F, "k_scale") // 2, wanted, 256)
    async_copy.commit_group()


@gluon.jit
def fetch_values(head, page, wanted, buffers, F: gl.constexpr):
    """Starts copying what there is for each token: a group."""
    halves = head[1] + page.to(gl.int64) * (get(F, "blob_bytes") // 2)
    OWN: gl.constexpr = get(F, "outliers") * 128
    _copy(buffers[1], halves + place(F, "v_scale") // 2, wanted, 256)
    if OWN > 0:
        _copy(buffers[2], halves + place(F, "outliers") // 2, wanted, OWN)
    async_copy.commit_group()


@gluon.jit
def _copy(buffer, source, wanted, COUNT: gl.constexpr):
    async_copy.async_copy_global_to_shared(buffer, source + gl.arange(0, COUNT, COPY_HALVES), mask=wanted)


@gluon.jit
def load_codes(head, page, wanted, AT: gl.constexpr, F: gl.constexpr):
    """The 1,024 words of codes at word AT of a page."""
    words = head[0] + page.to(gl.int64) * (get(F, "blob_bytes") // 4) + AT
    return gl.load(words + gl.arange(0, 1024, gl.SliceLayout(1, WORDS)), mask=wanted)


@gluon.jit
def load_meta(head, page, F: gl.constexpr):
    """(V's factor; N outlier channels). Of a page that is not there: anything, but channels inside the row."""
    meta, channels = head[0] + page.to(gl.int64) * (get(F, "blob_bytes") // 4) + place(F, "meta") // 4, ()
    for n in gl.static_range(get(F, "outliers")):
        channels = channels + (gl.load(meta + 2 + n) & 127,)
    return gl.load(meta).to(gl.float32, bitcast=True), channels


@gluon.jit
def pick(q_at, q_head, channels, scale, G: gl.constexpr, N: gl.constexpr):
    """Scaled q[channel] of each head, for N outlier channels: [8]."""
    head, picked = gl.arange(0, 8, gl.SliceLayout(0, BY)) % G, ()
    for n in gl.static_range(N):
        picked = picked + (gl.load(q_at + head * q_head + channels[n]).to(gl.float32) * scale,)
    return picked


@gluon.jit
def attend_pages(
    state, query, floats, back, head, table, first, last, page, buffers, levels, one, q_at, q_head, scale,
    G: gl.constexpr, F: gl.constexpr, LATE: gl.constexpr,
):  # fmt: skip
    """Pages [first, last) of a row -> (maximum [8]; sums of weights, and of weights times zero, by lane [4, 8, 8]; sums [128, 8])."""
    N: gl.constexpr = get(F, "outliers")
    V_CODES: gl.constexpr = place(F, "v_codes") // 4
    k_rest, v_rest, outliers, maxima, numbers, asked, weights = buffers
    top, total, sums = state
    weighted = gl.zeros([4, 8, 8], gl.float32, TOTAL)
    lut = load_table(levels)
    k_words = load_codes(head, page, first < last, 0, F)
    v_words = k_words
    if not LATE & 1:
        v_words = load_codes(head, page, first < last, V_CODES, F)
    meta = load_meta(head, page, F)
    coming = gl.load(table + first + 1, mask=first + 1 < last, other=0)
    async_copy.wait_group(0)
    for p in range(first, last):
        more = p + 1 < last
        after = gl.load(table + p + 2, mask=p + 2 < last, other=0)
        following = load_meta(head, coming, F)
        picked = pick(q_at, q_head, meta[1], scale, G, N)
        put_queries(query, floats, k_rest, back, asked, numbers)
        fence_async_shared()
        async_copy.wait_group(0)
        acc = products(levels_by(k_words, lut, one), asked)
        fetch_keys(head, coming, more, buffers, F)
        if LATE & 1:
            v_words = load_codes(head, page, True, V_CODES, F)
        else:
            k_words = load_codes(head, coming, more, 0, F)
        part = numbers[0].load(gl.SliceLayout(0, BY))[None, :]
        unit = numbers[1].load(gl.SliceLayout(0, BY))[None, :]
        for n in gl.static_range(N):
            part = picked[n][None, :] * by_token(outliers.slice(n * 128, 128)).to(gl.float32)[:, None] + part
        v_scale, v_zero = by_token(v_rest.slice(0, 128)), by_token(v_rest.slice(128, 128)).to(gl.float32)
        s = awaited(acc) * unit + part
        if get(F, "sinks") > 0:
            if p == 0:
                s = gl.where((gl.arange(0, 128, gl.SliceLayout(1, BY)) < get(F, "sinks"))[:, None], float("-inf"), s)
        page_top = largest(s, maxima)
        fetch_values(head, coming, more, buffers, F)
        weight = gl.exp2(s - page_top[None, :])
        put_weights(weight, v_scale, weights)
        fence_async_shared()
        async_copy.wait_group(1)
        acc = products(levels_by(v_words, lut, one), weights)
        if LATE & 1:
            k_words = load_codes(head, coming, more, 0, F)
        else:
            v_words = load_codes(head, coming, more, V_CODES, F)
        higher = gl.maximum(top, page_top)
        shrink, share = gl.exp2(top - higher), gl.exp2(page_top - higher)
        shrunk, shared = over_total(shrink), over_total(share)
        total = total * shrunk + per_lane(weight) * shared
        weighted = weighted * shrunk + per_lane(weight * v_zero[:, None]) * shared
        sums = sums * shrink[None, :] + awaited(acc) * (share * meta[0] * (1.0 / (LIMIT * STEPS)))[None, :]
        top, meta, page, coming = higher, following, coming, after
    async_copy.wait_group(0)
    return top, total, weighted, sums


@gluon.jit
def finish(state, partial, stats, first_head, split, splits, G: gl.constexpr):
    """Writes what `triton._merge` joins."""
    HEAD: gl.constexpr = gl.SliceLayout(0, BY)
    top, total, weighted, sums = state
    total = gl.convert_layout(gl.sum(gl.sum(total, 0), 0), HEAD)
    zero = gl.convert_layout(gl.sum(gl.sum(weighted, 0), 0), HEAD)
    g = gl.arange(0, 8, HEAD)
    at = (first_head + g) * splits + split
    out = partial + at[None, :].to(gl.int64) * 128 + gl.arange(0, 128, gl.SliceLayout(1, BY))[:, None]
    gl.store(out, sums + zero[None, :], mask=(g < G)[None, :])
    gl.store(stats + at * 2, top, mask=g < G)
    gl.store(stats + at * 2 + 1, total, mask=g < G)
