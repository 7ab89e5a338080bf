"""The kernel: one warp per (split, row and KV head), first over its share of sinks and tail, then page by page."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy

from forefetch.kernels.attention.gluon.copies import buffers, codes_at, fetch_keys, fetch_values, get, heads, load_meta, width
from forefetch.kernels.attention.gluon.decode import load_table
from forefetch.kernels.attention.gluon.finish import finish
from forefetch.kernels.attention.gluon.half import TILE, add_tile, no_tokens, tile_scores, to_pages
from forefetch.kernels.attention.gluon.half_columns import add_tile_columns, no_tokens_columns, tile_scores_columns
from forefetch.kernels.attention.gluon.launch import await_others, let_others_start
from forefetch.kernels.attention.gluon.layouts import CHUNK, QUERY, SWIZZLED, by_column, rows_by
from forefetch.kernels.attention.gluon.loop_columns import attend_pages_columns
from forefetch.kernels.attention.gluon.loop_half import attend_half_pages
from forefetch.kernels.attention.gluon.loops import attend_pages
from forefetch.kernels.attention.gluon.page_half import UP


@gluon.jit(do_not_specialize=["apart", "one", "n_pages", "n_tails", "table_row"])
def split_sealed(
    q, words, halves, raw, page_table, sealed, lengths, tails, tail_k, tail_v, sink_k, sink_v, partial, stats,
    scale, levels, apart, one, n_pages, n_tails, table_row, q_row, q_head,
    HK: gl.constexpr, G: gl.constexpr, TAIL: gl.constexpr, F: gl.constexpr,
):  # fmt: skip
    """Program (split, row * HK + KV head) -> partial and stats [row, head, split] of G heads, as `triton._merge` wants them.

    `words`, `halves`, `raw`: the pages as int32, float16 and bytes. `levels` int32 [2, 32]: four levels, a byte
    each, of the codes without and with a third bit (`level_bytes`), 32 times (`load_table`). `apart`: how many programs of a
    row and KV head take its float16 tokens, and no pages; 0: all take their share of both.
    """
    await_others()
    W: gl.constexpr = width(F, G)
    BLOB: gl.constexpr = get(F, "blob_bytes")
    split, shares = gl.program_id(0), gl.num_programs(0) - apart
    kv_head, row = gl.program_id(1) % HK, gl.program_id(1) // HK
    q_at = q + row.to(gl.int64) * q_row + kv_head * G * q_head
    asked = load_heads(q_at, q_head, G, W)
    pages, length = gl.load(sealed + row), gl.load(lengths + row)
    mine = gl.minimum(split, shares)
    span = page_table + row * table_row, mine * pages // shares, gl.minimum(mine + 1, shares) * pages // shares
    base = kv_head.to(gl.int64) * n_pages
    head = words + base * (BLOB // 4), halves + base * (BLOB // 2), raw + base * BLOB
    page = gl.load(span[0] + span[1], mask=span[1] < span[2], other=0)
    entry = (kv_head * n_tails + gl.load(tails + row)).to(gl.int64)
    tokens = half_tokens(sink_k, tail_k, sink_v, tail_v, entry, pages, length, TAIL, F)
    steps = half_steps(tokens[2], split, shares, apart)
    k_buffers, v_buffers = buffers(F)
    fetch_keys(tokens[0], tokens[2], steps[0], head, page, span[2] - span[1], k_buffers, F)
    fetch_values(tokens[1], tokens[2], steps[0], head, page, span[2] - span[1], v_buffers, F)
    query, unit, row_scale = store_query(asked, scale, W, UP if get(F, "name") == "fp4" else 0)
    meta = load_meta(head, page, F)
    state = attend_half(query, tokens, steps, head, page, span[2] - span[1], k_buffers, v_buffers, row_scale, F, W)
    scales, first = (scale, row_scale, unit), (page, meta)
    state = attend_sealed(state, query, head, span, first, k_buffers, v_buffers, levels, one, (q_at, q_head), scales, G, F)
    let_others_start()
    finish(state, partial, stats, (row * HK + kv_head) * G, split, gl.num_programs(0), G, W)


@gluon.jit
def half_tokens(sink_k, tail_k, sink_v, tail_v, entry, pages, length, TAIL: gl.constexpr, F: gl.constexpr):
    """Where a row's float16 tokens are: (K's sinks and tail, V's, `spans` of `half.load_tile`)."""
    SINKS: gl.constexpr = get(F, "sinks")
    keys = sink_k + entry * (SINKS * 128), tail_k + entry * (TAIL * 128)
    values = sink_v + entry * (SINKS * 128), tail_v + entry * (TAIL * 128)
    sinks = gl.minimum(length, SINKS)
    skipped = gl.where(pages == 0, sinks, 0)
    return keys, values, (sinks, skipped, sinks + length - pages * 128 - skipped)


@gluon.jit
def half_steps(spans, split, shares, apart):
    """(The first of a program's tiles, how far it is to the next): all programs take turns, or those apart."""
    first, stride = split * TILE, shares * TILE
    if apart > 0:
        first, stride = gl.where(split < shares, spans[2], (split - shares) * TILE), apart * TILE
    return first, stride


@gluon.jit
def attend_sealed(
    state, query, head, span, pages, k_buffers, v_buffers, levels, one, q, scales, G: gl.constexpr, F: gl.constexpr
):
    """The span's pages by the loop for the format and the number of heads."""
    tables = load_table(levels), load_table(levels + 32)
    if get(F, "name") == "fp4":
        return attend_half_pages(state, query, head, span, pages, k_buffers, v_buffers, tables, one, q, scales, G, F)
    elif width(F, G) == 4:
        return attend_pages_columns(state, query, head, span, pages, k_buffers, v_buffers, tables, one, q, scales, G, F)
    else:
        return attend_pages(state, query, head, span, pages, k_buffers, v_buffers, tables, one, q, scales, G, F)


@gluon.jit
def load_heads(q_at, q_head, G: gl.constexpr, W: gl.constexpr):
    """Q of G heads [8, 128], rows as `heads` has them."""
    head = heads(G, W, gl.SliceLayout(1, QUERY))
    return gl.load(q_at + head[:, None] * q_head + gl.arange(0, 128, gl.SliceLayout(0, QUERY))[None, :])


@gluon.jit
def store_query(query, scale, W: gl.constexpr, HIGH: gl.constexpr):
    """(Q as float16 [8, 128], by column [W, 128], in shared memory; what it was multiplied by [8], by row; scores per unit of
    it: [8], or [W] by column).

    A power of two brings each head below 2^HIGH, so that a product with any scale of K stays within float16.
    """
    query = query.to(gl.float32)
    exponent = gl.maximum(gl.max(gl.abs(query), 1).to(gl.int32, bitcast=True) >> 23, HIGH)
    unit = ((253 + HIGH - exponent) << 23).to(gl.float32, bitcast=True)
    query = (query * unit[:, None]).to(gl.float16)
    back = ((exponent + 1 - HIGH) << 23).to(gl.float32, bitcast=True) * scale
    unit = gl.convert_layout(unit, gl.SliceLayout(1, rows_by(CHUNK)))
    if W == 0:
        back = gl.convert_layout(back, gl.SliceLayout(1, rows_by(CHUNK)))
    else:
        if W == 4:
            back = gl.max(gl.reshape(back, (4, 2)), 1)  # they are equal
        back = gl.convert_layout(back, gl.SliceLayout(0, by_column(CHUNK, W)))
    if W == 4:
        query = gl.max(gl.reshape(query, (4, 2, 128)), 1).to(gl.float16)  # again
    return gl.allocate_shared_memory(gl.float16, [W if W > 0 else 8, 128], SWIZZLED, query), unit, back


@gluon.jit
def attend_half(query, tokens, steps, head, page, have, k_buffers, v_buffers, scale, F: gl.constexpr, W: gl.constexpr):
    """Float16 tokens by `half_tokens`, `half_steps`; the first tile is fetched. Leaves the first page's copies under way."""
    spans = tokens[2]
    state = no_tokens() if W == 0 else no_tokens_columns(W)
    for start in range(steps[0], spans[2], steps[1]):
        async_copy.wait_group(1)
        if W == 0:
            s = tile_scores(query, codes_at(k_buffers, 0, F), start, spans, scale)
        else:
            s = tile_scores_columns(query, codes_at(k_buffers, 0, F), start, spans, scale)
        fetch_keys(tokens[0], spans, start + steps[1], head, page, have, k_buffers, F)
        async_copy.wait_group(1)
        if W == 0:
            state = add_tile(state, s, codes_at(v_buffers, 2, F))
        else:
            state = add_tile_columns(state, s, codes_at(v_buffers, 2, F))
        fetch_values(tokens[1], spans, start + steps[1], head, page, have, v_buffers, F)
    if W == 0:
        state = to_pages(state)
    return state
