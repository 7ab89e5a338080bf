"""The kernel: one warp per share of a stream (a row and KV head), or per stretch of all of them (`cut`): first its sinks and
tail, then page by page."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy

from forefetch.kernels.attention.gluon.copies import buffers, codes_at, fetch_keys, fetch_values, get, heads, load_meta, width
from forefetch.kernels.attention.gluon.cut import (
    all_units,
    cut,
    find_row,
    half_spans,
    items_from,
    shares_of,
    some_units,
    stream_units,
    tiles_of,
)
from forefetch.kernels.attention.gluon.decode import load_table
from forefetch.kernels.attention.gluon.finish import finish
from forefetch.kernels.attention.gluon.half import TILE, add_tile, no_tokens, tile_scores, to_pages
from forefetch.kernels.attention.gluon.half_columns import add_tile_columns, no_tokens_columns, tile_scores_columns
from forefetch.kernels.attention.gluon.launch import await_others, let_others_start
from forefetch.kernels.attention.gluon.layouts import CHUNK, PER_ROW, QUERY, SWIZZLED, by_column, rows_by
from forefetch.kernels.attention.gluon.loop_columns import attend_pages_columns
from forefetch.kernels.attention.gluon.loop_half import attend_half_pages
from forefetch.kernels.attention.gluon.loops import attend_pages
from forefetch.kernels.attention.gluon.page_half import UP


@gluon.jit(do_not_specialize=["rows", "apart", "one", "n_pages", "n_tails", "table_row"])
def split_sealed(
    q, words, halves, raw, page_table, sealed, lengths, tails, tail_k, tail_v, sink_k, sink_v, partial, stats,
    scale, levels, rows, apart, one, n_pages, n_tails, table_row, q_row, q_head,
    HK: gl.constexpr, G: gl.constexpr, TAIL: gl.constexpr, F: gl.constexpr, COSTS: gl.constexpr,
):  # fmt: skip
    """Program (split, stream), which is row * HK + KV head -> partial and stats [row, head, split] of G heads, as
    `triton._merge` wants them, of a share of the stream's pages and tiles; `apart`: how many of the stream's programs take its
    float16 tiles, and no pages; 0: all take their share of both. With COSTS: a program's stretch of all work (`cut`) -> its
    parts of partial [parts, G, 128] and stats [parts, G, 2], as `merge_parts` wants them.

    `words`, `halves`, `raw`: the pages as int32, float16 and bytes. `levels` int32 [2, 32]: four levels, a byte
    each, of the codes without and with a third bit (`level_bytes`), 32 times (`load_table`).
    """
    await_others()
    pages_at = words, halves, raw, n_pages, page_table, table_row
    places = q, q_row, q_head, pages_at, tails, n_tails, tail_k, tail_v, sink_k, sink_v
    k_and_v = buffers(F, width(F, G))
    if COSTS is not None:
        stream, at, begin, end = first_stream(sealed, lengths, rows, HK, F, COSTS)
        while at < end:
            pages, length = gl.load(sealed + stream // HK), gl.load(lengths + stream // HK)
            before, units = stream_units(pages, length, F, COSTS)
            mine = share_of_stream(begin - at, end - at, before, units, pages, length, F, COSTS)
            at += units
            spans, left = half_spans(pages, length, F), ((gl.program_id(0) + stream) * G, 1)
            attend_stream(places, stream, spans, mine, k_and_v, levels, one, scale, partial, stats, left, HK, G, TAIL, F)
            stream += 1
    else:
        stream, split, each = gl.program_id(1), gl.program_id(0), gl.num_programs(0)
        pages, length = gl.load(sealed + stream // HK), gl.load(lengths + stream // HK)
        spans = half_spans(pages, length, F)
        mine, left = even_share(split, each, apart, pages, spans), (stream * G * each + split, each)
        attend_stream(places, stream, spans, mine, k_and_v, levels, one, scale, partial, stats, left, HK, G, TAIL, F)


@gluon.jit
def even_share(split, each, apart, pages, spans):
    """What of a stream the program `split` of `each` takes: (first float16 token, end, first page, end). Who has fewer pages
    than others has no fewer tiles."""
    shares, tiles = each - apart, tiles_of(spans)
    turn, takers, me = gl.minimum(split, shares), each, split
    if apart > 0:
        takers, me = apart, split - shares
    return (
        (gl.maximum(me, 0) * tiles + takers - 1) // takers * TILE,
        (gl.maximum(me + 1, 0) * tiles + takers - 1) // takers * TILE,
        turn * pages // shares,
        gl.minimum(turn + 1, shares) * pages // shares,
    )


@gluon.jit
def first_stream(sealed, lengths, rows, HK: gl.constexpr, F: gl.constexpr, COSTS: gl.constexpr):
    """(The first stream of a program's stretch of the work of all streams, where that begins; the stretch: begin, end)."""
    units_of = some_units(sealed, lengths, rows, 0, F, COSTS, PER_ROW)
    total = all_units(units_of, sealed, lengths, rows, F, COSTS) * HK
    shares = shares_of(total, gl.num_programs(0), COSTS)
    begin, end = cut(gl.minimum(gl.program_id(0), shares), total, shares)
    row, at = find_row(units_of, sealed, lengths, rows, begin, HK, F, COSTS)
    safe = gl.minimum(row, rows - 1)
    _, units = stream_units(gl.load(sealed + safe), gl.load(lengths + safe), F, COSTS)
    over = (begin - at) // gl.maximum(units, 1)
    return row * HK + over, at + over * units, begin, end


@gluon.jit
def share_of_stream(low, high, before, units, pages, length, F: gl.constexpr, COSTS: gl.constexpr):
    """What of a stream begins in its units [low, high): (first float16 token, end, first page, end)."""
    START: gl.constexpr = get(COSTS, "start")
    tiles, high = tiles_of(half_spans(pages, length, F)), gl.minimum(high, units)
    return (
        items_from(low - START, get(COSTS, "tile"), tiles) * TILE,
        items_from(high - START, get(COSTS, "tile"), tiles) * TILE,
        items_from(low - before, get(COSTS, "page"), pages),
        items_from(high - before, get(COSTS, "page"), pages),
    )


@gluon.jit
def half_tokens(sink_k, tail_k, sink_v, tail_v, entry, TAIL: gl.constexpr, F: gl.constexpr):
    """Where a row's float16 tokens are: (K's sinks and tail, V's)."""
    SINKS: gl.constexpr = get(F, "sinks")
    keys = sink_k + entry * (SINKS * 128), tail_k + entry * (TAIL * 128)
    values = sink_v + entry * (SINKS * 128), tail_v + entry * (TAIL * 128)
    return keys, values


@gluon.jit
def attend_stream(
    places, stream, spans, mine, k_and_v, levels, one, scale, partial, stats, left,
    HK: gl.constexpr, G: gl.constexpr, TAIL: gl.constexpr, F: gl.constexpr,
):  # fmt: skip
    """A program's share of a stream: its float16 tokens, then its pages. `places`: where everything is; `spans`: `half_spans`,
    `mine`: `share_of_stream` or `even_share`, `left`: where the first head's part is, how far it is to the next one's."""
    W: gl.constexpr = width(F, G)
    BLOB: gl.constexpr = get(F, "blob_bytes")
    q, q_row, q_head, pages_at, tails, n_tails, tail_k, tail_v, sink_k, sink_v = places
    words, halves, raw, n_pages, page_table, table_row = pages_at
    k_buffers, v_buffers = k_and_v
    row, kv_head = stream // HK, stream % HK
    q_at = q + row.to(gl.int64) * q_row + kv_head * G * q_head
    asked, table = load_heads(q_at, q_head, G, W), page_table + row * table_row
    entry = (kv_head * n_tails + gl.load(tails + row)).to(gl.int64)
    tokens = half_tokens(sink_k, tail_k, sink_v, tail_v, entry, TAIL, F)
    base = kv_head.to(gl.int64) * n_pages
    head = words + base * (BLOB // 4), halves + base * (BLOB // 2), raw + base * BLOB
    have, page = mine[3] - mine[2], gl.load(table + mine[2], mask=mine[2] < mine[3], other=0)
    fetch_keys(tokens[0], spans, mine[0], mine[1], head, page, have, k_buffers, F)
    fetch_values(tokens[1], spans, mine[0], mine[1], head, page, have, v_buffers, F, W)
    query, unit, row_scale = store_query(asked, scale, W, UP if get(F, "name") == "fp4" else 0)
    meta = load_meta(head, page, F)
    state = attend_half(query, tokens, spans, mine, head, page, have, k_buffers, v_buffers, row_scale, F, W)
    scales, span = (scale, row_scale, unit), (table, mine[2], mine[3])
    state = attend_sealed(
        state, query, head, span, (page, meta), k_buffers, v_buffers, levels, one, (q_at, q_head), scales, G, F
    )
    let_others_start()
    finish(state, partial, stats, left, G, W)


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
def attend_half(query, tokens, spans, mine, head, page, have, k_buffers, v_buffers, scale, F: gl.constexpr, W: gl.constexpr):
    """Float16 tokens; the first tile is fetched. Leaves the first page's copies under way."""
    state = no_tokens() if W == 0 else no_tokens_columns(W)
    for start in range(mine[0], mine[1], TILE):
        async_copy.wait_group(1)
        if W == 0:
            s = tile_scores(query, codes_at(k_buffers, 0, F), start, spans, scale)
        else:
            s = tile_scores_columns(query, codes_at(k_buffers, 0, F), start, spans, scale)
        fetch_keys(tokens[0], spans, start + TILE, mine[1], head, page, have, k_buffers, F)
        async_copy.wait_group(1)
        if W == 0:
            state = add_tile(state, s, codes_at(v_buffers, 2, F))
        else:
            state = add_tile_columns(state, s, codes_at(v_buffers, 2, F))
        fetch_values(tokens[1], spans, start + TILE, mine[1], head, page, have, v_buffers, F, W)
    if W == 0:
        state = to_pages(state)
    return state
