"""Who does what where long work of many rows is one line: float16 tiles and pages of all streams (a row and KV head each) lie
on it, in units of time, and every program takes an equal stretch, whatever the rows' lengths. A stretch may end in the next
stream; what it has of one is a part. Finding it takes a look at all rows, 1.5 us.

A stream takes, by COSTS (`Costs`): `start` units, then `tile` for each 16 float16 tokens, then `page` for each page. A tile or
a page belongs to the program in whose stretch it begins. No stretch is shorter than `least`. Program i's part of stream s has
the number i + s, which no other part has.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from forefetch.kernels.attention.gluon.copies import get
from forefetch.kernels.attention.gluon.half import TILE

ROWS = gl.constexpr(64)  # rows that are looked at at a time


@gluon.jit
def half_spans(pages, length, F: gl.constexpr):
    """A row's float16 tokens: (sinks read, tail slots skipped, tokens in all)."""
    sinks = gl.minimum(length, get(F, "sinks"))
    skipped = gl.where(pages == 0, sinks, 0)
    return sinks, skipped, sinks + length - pages * 128 - skipped


@gluon.jit
def tiles_of(spans):
    """How many tiles a row's float16 tokens are."""
    return (spans[2] + (TILE - 1)) // TILE


@gluon.jit
def stream_units(pages, length, F: gl.constexpr, COSTS: gl.constexpr):
    """(units before the first page, units in all) of each KV head of a row."""
    before = get(COSTS, "start") + tiles_of(half_spans(pages, length, F)) * get(COSTS, "tile")
    return before, before + pages * get(COSTS, "page")


@gluon.jit
def some_units(sealed, lengths, rows, first, F: gl.constexpr, COSTS: gl.constexpr, LAYOUT: gl.constexpr):
    """Units of a KV head of rows `first` and on [ROWS]; 0 where there is no row."""
    row = first + gl.arange(0, ROWS, LAYOUT)
    pages, length = gl.load(sealed + row, mask=row < rows, other=0), gl.load(lengths + row, mask=row < rows, other=0)
    _, units = stream_units(pages, length, F, COSTS)
    return gl.where(row < rows, units, 0)


@gluon.jit
def all_units(units, sealed, lengths, rows, F: gl.constexpr, COSTS: gl.constexpr):
    """Units of a KV head of all rows; `units`: the first rows' (`some_units`), as a rule all of them."""
    LAYOUT: gl.constexpr = units.type.layout
    for first in range(ROWS, rows, ROWS):
        units += some_units(sealed, lengths, rows, first, F, COSTS, LAYOUT)
    return gl.sum(units, 0)


@gluon.jit
def units_before(units, sealed, lengths, row, F: gl.constexpr, COSTS: gl.constexpr):
    """Units of a KV head of the rows before `row`."""
    mine = gl.where(gl.arange(0, ROWS, units.type.layout) < row, units, 0)
    return all_units(mine, sealed, lengths, row, F, COSTS)


@gluon.jit
def find_row(units, sealed, lengths, rows, unit, HK: gl.constexpr, F: gl.constexpr, COSTS: gl.constexpr):
    """(The row that a unit of all streams is in, where its first stream begins); `units`: the first rows'."""
    LAYOUT: gl.constexpr = units.type.layout
    row, start = _rows_over(units, 0, rows, unit, HK)
    base = gl.sum(units, 0)
    for first in range(ROWS, rows, ROWS):
        units = some_units(sealed, lengths, rows, first, F, COSTS, LAYOUT)
        more, later = _rows_over(units, base, rows - first, unit, HK)
        row, start, base = row + more, gl.maximum(start, later), base + gl.sum(units, 0)
    return row, start * HK


@gluon.jit
def _rows_over(units, base, rows, unit, HK: gl.constexpr):
    """(How many of these rows end before `unit`, where the last of them ends, per KV head)."""
    ends = base + gl.associative_scan(units, 0, _add)
    over = ((ends * HK) <= unit) & (gl.arange(0, ROWS, units.type.layout) < rows)
    return gl.sum(over.to(gl.int32), 0), gl.max(gl.where(over, ends, 0), 0)


@gluon.jit
def _add(a, b):
    return a + b


@gluon.jit
def shares_of(total, programs, COSTS: gl.constexpr):
    """How many programs have work."""
    return gl.maximum(1, gl.minimum(programs, total // get(COSTS, "least")))


@gluon.jit
def cut(i, total, shares):
    """Program i's stretch, from i total / shares on, in 32 bits; nothing where i = shares."""
    each = total // shares
    rest = total - each * shares
    more = i * rest // shares
    begin = i * each + more
    return begin, gl.minimum(begin + each + gl.where(i * rest - more * shares + rest >= shares, 1, 0), total)


@gluon.jit
def share_with(unit, total, shares):
    """The program whose stretch has `unit`."""
    return (((unit + 1).to(gl.int64) * shares - 1) // total).to(gl.int32)


@gluon.jit
def items_from(units, cost, most):
    """How many of `most` tiles or pages, one after another, begin before `units`."""
    return gl.minimum((gl.maximum(units, 0) + (cost - 1)) // cost, most)
