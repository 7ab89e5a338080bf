"""Which pages one launch seals, and where their tokens lie: worked out on the device, by every program for itself.

Tokens of all lanes lie in one row of slots per layer and head, [lanes * slots, D]; rows of a step that are not committed yet
lie there too, behind the lanes. An entry is a page to be sealed, its first tokens in a tail, the rest among the step's rows.
"""

from __future__ import annotations

import triton
import triton.language as tl

from forefetch.kernels.kv_codec.formats import SATURATION
from forefetch.kernels.kv_codec.triton import _get

EACH, TAILS, CHUNKS = 0, 1, 2
"""Kinds of tables. EACH: none, entry n is page n of tokens n * T on. TAILS: int32 [n, 3], lane, page number and tokens to skip,
of tails that begin with a full page. CHUNKS: `attention.chunks.ChunkPlan.chunks`."""
VARIABLE = ["chunks", "width", "slots", "rows_at", "skip", "entries"]
"""Arguments that must not give rise to kernels of their own: none is to be compiled while somebody waits for a token."""
_EACH, _TAILS = tl.constexpr(EACH), tl.constexpr(TAILS)
_LIMIT = tl.constexpr(SATURATION)


@triton.jit
def entry(
    number, table, tables, chunks, width, slots, rows_at, skip, F: tl.constexpr, KIND: tl.constexpr, MP: tl.constexpr
):  # fmt: skip
    """(page number, -1: none; slot of token 0 in the tail; the same among a step's rows; tokens in the tail; tokens to skip).

    `slots` per lane; `rows_at`: slot of a step's row 0; `chunks`: rows of CHUNKS' table, at most MP, a power of two."""
    T: tl.constexpr = _get(F, "page")
    if KIND == _EACH:
        return number, number.to(tl.int64) * T, number.to(tl.int64) * T, number * 0 + T, number * 0 + skip
    elif KIND == _TAILS:
        at = tl.load(table + number * 3).to(tl.int64) * slots
        return tl.load(table + number * 3 + 1), at, at, number * 0 + T, tl.load(table + number * 3 + 2)
    else:
        return _of_chunk(number, table, tables, chunks, width, slots, rows_at, F, MP)


@triton.jit
def _of_chunk(number, table, tables, chunks, width, slots, rows_at, F: tl.constexpr, MP: tl.constexpr):
    T: tl.constexpr = _get(F, "page")
    chunk = tl.arange(0, MP)
    at, known = table + chunk * 5, chunk < chunks
    start, loaded = tl.load(at + 1, mask=known, other=0), tl.load(at + 3, mask=known, other=0)
    count = tl.load(at + 4, mask=known, other=0)
    before = tl.maximum(tl.maximum(start - _get(F, "recent"), 0) // T, loaded)
    after = tl.maximum(tl.maximum(start + count - _get(F, "recent"), 0) // T, loaded)
    ends = tl.cumsum(after - before, 0)
    mine = (number < ends) & (number >= ends - (after - before))
    here = tl.sum(tl.where(mine, chunk, 0), 0)
    index = number - tl.sum(tl.where(mine, ends - after, 0), 0)
    live = tl.sum(mine.to(tl.int32), 0) > 0
    first, lane = tl.load(table + here * 5), tl.load(table + here * 5 + 2)
    start, held = tl.sum(tl.where(mine, start, 0), 0), tl.sum(tl.where(mine, before, 0), 0)
    page = tl.load(tables + here * width + index, mask=live, other=-1)
    tail = lane.to(tl.int64) * slots + (index - held) * T
    own = rows_at.to(tl.int64) + first + index * T - start
    split = tl.minimum(tl.maximum(start - index * T, 0), T)
    return page, tail, own, split, tl.where(index == 0, _get(F, "sinks"), 0)


@triton.jit
def tokens(x, t, c, where, F: tl.constexpr):
    """Tokens t [R, 1] of a page, channels c [1, C]: float32 values that float16 holds, saturated; those skipped are 0. `x`: the
    head's slots; `where`: an entry."""
    D: tl.constexpr = _get(F, "head_dim")
    slot = tl.where(t < where[3], where[1], where[2]) + t
    inside = (t >= where[4]) & (t < _get(F, "page")) & (c < D)
    value = tl.load(x + slot * D + c, mask=inside, other=0.0).to(tl.float32)
    return tl.minimum(tl.maximum(value, -_LIMIT), _LIMIT).to(tl.float16).to(tl.float32)


@triton.jit
def head_of(x, group, heads, outer, inner):
    """Where the slots of a (layer, head) begin."""
    return x + (group // heads).to(tl.int64) * outer + (group % heads).to(tl.int64) * inner
