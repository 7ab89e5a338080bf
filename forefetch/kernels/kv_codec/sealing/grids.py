"""Sealing of e2m0, asym2, asym3 and mixed: every channel of K and every token of V is fitted by itself (`_fit_pages`, many
programs a page), then each program chooses the codes of 16 keys, knowing all channels (`_choose`)."""

from __future__ import annotations

import triton
import triton.language as tl

from forefetch.kernels.kv_codec.formats import ALIGN
from forefetch.kernels.kv_codec.sealing.entries import VARIABLE, entry, head_of, tokens
from forefetch.kernels.kv_codec.sealing.fit import fit, towards
from forefetch.kernels.kv_codec.sealing.pack import put_bits, put_keys, put_values
from forefetch.kernels.kv_codec.triton import _at, _get, _stored

CHANNELS, TOKENS, KEYS = 16, 32, 16
"""Channels of K that a program fits, tokens of V, and keys whose codes it chooses."""
_CHANNELS, _TOKENS, _KEYS = tl.constexpr(CHANNELS), tl.constexpr(TOKENS), tl.constexpr(KEYS)
_ALIGN = tl.constexpr(ALIGN)


@triton.constexpr_function
def _sections(format):
    """How many sections a page has."""
    return len(format.sections)


@triton.constexpr_function
def _end(format, number):
    """Where a section ends."""
    section = list(format.sections.values())[number]
    return section.offset + section.size


@triton.constexpr_function
def _gap(format, number):
    """Bytes between a section's end and the next."""
    return -_end(format, number) % ALIGN


@triton.jit
def columns(share, R: tl.constexpr):
    """A program's channels of K [16, 1] and tokens [1, R]. The order and the hint give each thread one channel: what is worked
    out per channel in float64 must not be done eight times over because a load could be that wide."""
    return tl.max_contiguous(share * _CHANNELS + tl.arange(0, _CHANNELS), 1)[:, None], tl.arange(0, R)[None, :]


@triton.jit
def _fit_keys(
    k, weight, own, errors, share, where,
    F: tl.constexpr, G: tl.constexpr, FINE: tl.constexpr, R: tl.constexpr, ROUNDS: tl.constexpr, WEIGHTED: tl.constexpr,
):  # fmt: skip
    D: tl.constexpr = _get(F, "head_dim")
    c, t = columns(share, R)
    x = tokens(k, t, c, where, F)
    valid = ((t >= where[4]) & (t < _get(F, "page"))).to(tl.float32)
    count = (_get(F, "page") - where[4]).to(tl.float64)
    scale, zero, _, error = fit(x, valid, count, 1, G, ROUNDS)
    cost = tl.full([1, 1], 1.0, tl.float64)
    if WEIGHTED:
        cost = tl.load(weight + c).to(tl.float64)
    tl.store(own + c, scale)
    tl.store(own + D + c, zero)
    tl.store(errors + c, error * cost)
    if FINE is not None:
        scale, zero, _, less = fit(x, valid, count, 1, FINE, ROUNDS)
        tl.store(own + 2 * D + c, scale)
        tl.store(own + 3 * D + c, zero)
        tl.store(errors + D + c, (error - less) * cost)


@triton.jit
def _fit_values(
    v, own, page, thirds, start, where, F: tl.constexpr, G: tl.constexpr, C: tl.constexpr, ROUNDS: tl.constexpr
):  # fmt: skip
    D: tl.constexpr = _get(F, "head_dim")
    t, c = start + tl.arange(0, _TOKENS)[:, None], tl.arange(0, C)[None, :]
    x = tokens(v, t, c, where, F)
    scale, zero, code, _ = fit(x, (c < D).to(tl.float32), tl.full([1, 1], D, tl.float64), 1, G, ROUNDS)
    tl.store(own + t, scale)
    tl.store(own + _get(F, "page") + t, zero)
    code = tl.where(t >= where[4], code, 0)
    if _get(F, "name") == "asym3":
        tl.store(thirds + t * D + c, (code & 1).to(tl.uint8), mask=c < D)
        code = code >> 1
    put_values(page, code, start, F, C)


@triton.jit(do_not_specialize=VARIABLE)
def _fit_pages(
    k, v, pages, weight, floats, errors, bits,
    table, tables, chunks, width, slots, rows_at, skip, entries, heads, outer, inner, page_group,
    F: tl.constexpr, G: tl.constexpr, FINE: tl.constexpr, KIND: tl.constexpr, MP: tl.constexpr,
    R: tl.constexpr, C: tl.constexpr, ROUNDS: tl.constexpr, WEIGHTED: tl.constexpr,
):  # fmt: skip
    """Program (page, its share of channels of K or of tokens of V). `floats` [pages, 4 D + 2 T]: scales and zeros of K, those
    of the fine grid, those of V; `errors` float64 [pages, 2 D]: of K's channels, and what a third bit takes off; `bits`: of
    asym3 [pages, 2, T, D]."""
    unit, share = tl.program_id(0), tl.program_id(1)
    where = entry(unit % entries, table, tables, chunks, width, slots, rows_at, skip, F, KIND, MP)
    if where[0] >= 0:
        D: tl.constexpr = _get(F, "head_dim")
        T: tl.constexpr = _get(F, "page")
        own = floats + unit.to(tl.int64) * (4 * D + 2 * T)
        if share < D // _CHANNELS:
            x = head_of(k, unit // entries, heads, outer, inner)
            error = errors + unit.to(tl.int64) * (2 * D)
            _fit_keys(x, weight + unit * D, own, error, share, where, F, G, FINE, R, ROUNDS, WEIGHTED)
        else:
            x = head_of(v, unit // entries, heads, outer, inner)
            page = head_of(pages, unit // entries, 1, page_group, 0) + where[0].to(tl.int64) * _get(F, "blob_bytes")
            thirds = bits + (unit.to(tl.int64) * 2 + 1) * (T * D)
            _fit_values(x, own + 4 * D, page, thirds, (share - D // _CHANNELS) * _TOKENS, where, F, G, C, ROUNDS)


@triton.jit
def worst(errors, c, F: tl.constexpr, C: tl.constexpr):
    """Which channels [1, C] are outliers: those with the largest errors [1, C], of equal ones the lower."""
    left, chosen = tl.where(c < _get(F, "head_dim"), errors, -1.0), c < 0
    for _ in tl.static_range(_get(F, "outliers")):
        most = tl.max(left, 1, keep_dims=True)
        channel = tl.min(tl.where(left == most, c, C), 1, keep_dims=True)
        chosen, left = chosen | (c == channel), tl.where(c == channel, -1.0, left)
    return chosen


@triton.jit
def _with_third(gains, outlier, c, F: tl.constexpr, C: tl.constexpr):
    """Which channels [1, C] have a third bit: those that gain most by it, outliers counting as -1, of equal ones the lower."""
    D: tl.constexpr = _get(F, "head_dim")
    own, rank = tl.where(outlier, -1.0, tl.load(gains + c, mask=c < D, other=0.0)), tl.zeros([1, C], tl.int32)
    for start in range(0, D, _CHANNELS):
        other = start + tl.arange(0, _CHANNELS)[:, None]
        gain, rest = tl.load(gains + other), outlier
        for _ in tl.static_range(_get(F, "outliers")):
            channel = tl.min(tl.where(rest, c, C), 1, keep_dims=True)
            rest, gain = rest & (c != channel), tl.where(other == channel, -1.0, gain)
        rank += tl.sum(((gain > own) | ((gain == own) & (other < c))).to(tl.int32), 0, keep_dims=True)
    return (rank < _get(F, "thirds")) & (c < D)


@triton.jit
def ranks(chosen, C: tl.constexpr):
    """How many before it are chosen, [1, C]; one dimension, because Triton 3.6 fails to scan some layouts of two."""
    return tl.expand_dims(tl.cumsum(tl.reshape(chosen.to(tl.int32), (C,)), 0) - 1, 0)


@triton.jit
def put_meta(page, outlier, third, factor_v, factor_k, F: tl.constexpr, C: tl.constexpr):
    """The page's last section, from which channels [1, C] are outliers and which have a third bit, and all gaps."""
    c, words = tl.arange(0, C)[None, :], (page + _at(F, "meta")).to(tl.pointer_type(tl.int32))
    none, byte = tl.zeros([1, 1], tl.int32), tl.arange(0, _ALIGN)
    nothing = (byte * 0).to(tl.uint8)
    tl.store(words.to(tl.pointer_type(tl.float32)) + none, factor_v)
    tl.store(words.to(tl.pointer_type(tl.float32)) + 1 + none, factor_k)
    rest = outlier
    for n in tl.static_range(_get(F, "outliers")):
        channel = tl.min(tl.where(rest, c, C), 1, keep_dims=True)
        rest = rest & (c != channel)
        tl.store(words + 2 + n + none, channel)
    tl.store(page + _at(F, "meta") + byte, nothing, mask=(byte >= 8 + 4 * _get(F, "outliers")) & (byte < 32))
    if _get(F, "thirds") > 0:
        tl.store(page + _at(F, "meta") + 32 + ranks(third, C), c.to(tl.uint8), mask=third)
    tl.store(page + _at(F, "meta") + byte, nothing, mask=byte >= 32 + _get(F, "thirds"))
    for n in tl.static_range(_sections(F)):
        if _gap(F, n) > 0:
            tl.store(page + _end(F, n) + byte, nothing, mask=byte < _gap(F, n))


@triton.jit
def put_outliers(page, x, outlier, t, F: tl.constexpr, C: tl.constexpr):
    """float16 values of K's outlier channels: x float32 [N, C] of tokens t [N, 1]."""
    c, rest, halves = tl.arange(0, C)[None, :], outlier, page.to(tl.pointer_type(tl.float16))
    for n in tl.static_range(_get(F, "outliers")):
        channel = tl.min(tl.where(rest, c, C), 1, keep_dims=True)
        rest = rest & (c != channel)
        own = tl.sum(tl.where(c == channel, x, 0.0), 1, keep_dims=True)
        tl.store(halves + _at(F, "outliers") // 2 + n * _get(F, "page") + _stored(t, F), own.to(tl.float16))


@triton.jit
def _value_scales(page, own, F: tl.constexpr, R: tl.constexpr):
    """V's scales and zeros, and the page's factor: the power of two that no scale exceeds, float32 [1, 1]."""
    D: tl.constexpr = _get(F, "head_dim")
    T: tl.constexpr = _get(F, "page")
    t, halves = tl.arange(0, R)[None, :], page.to(tl.pointer_type(tl.float16))
    scale = tl.load(own + 4 * D + t, mask=t < T, other=0.0)
    zero = tl.load(own + 4 * D + T + t, mask=t < T, other=0.0)
    most = tl.max(scale, 1, keep_dims=True)
    bits = tl.maximum(most, 2.0**-30).to(tl.int32, bitcast=True)
    up = (bits >> 23) + ((bits & 0x7FFFFF) != 0).to(tl.int32)
    factor = tl.where(most > 0.0, (up << 23).to(tl.float32, bitcast=True), 1.0)
    tl.store(halves + _at(F, "v_scale") // 2 + _stored(t, F), (scale / factor).to(tl.float16), mask=t < T)
    tl.store(halves + _at(F, "v_zero") // 2 + _stored(t, F), zero.to(tl.float16), mask=t < T)
    return factor


@triton.jit(do_not_specialize=VARIABLE)
def _choose(
    k, pages, floats, errors, bits,
    table, tables, chunks, width, slots, rows_at, skip, entries, heads, outer, inner, page_group,
    F: tl.constexpr, G: tl.constexpr, FINE: tl.constexpr, KIND: tl.constexpr, MP: tl.constexpr,
    R: tl.constexpr, C: tl.constexpr,
):  # fmt: skip
    """Program (page, 16 of its keys); the first of a page writes what belongs to all."""
    unit, share = tl.program_id(0), tl.program_id(1)
    where = entry(unit % entries, table, tables, chunks, width, slots, rows_at, skip, F, KIND, MP)
    if where[0] >= 0:
        D: tl.constexpr = _get(F, "head_dim")
        T: tl.constexpr = _get(F, "page")
        own, error = floats + unit.to(tl.int64) * (4 * D + 2 * T), errors + unit.to(tl.int64) * (2 * D)
        page = head_of(pages, unit // entries, 1, page_group, 0) + where[0].to(tl.int64) * _get(F, "blob_bytes")
        c = tl.arange(0, C)[None, :]
        scale, zero = tl.load(own + c, mask=c < D, other=0.0), tl.load(own + D + c, mask=c < D, other=0.0)
        outlier, third = worst(tl.load(error + c, mask=c < D, other=-1.0), c, F, C), c < 0
        if FINE is not None:
            third = _with_third(error + D, outlier, c, F, C)
            scale = tl.where(third, tl.load(own + 2 * D + c, mask=c < D, other=0.0), scale)
            zero = tl.where(third, tl.load(own + 3 * D + c, mask=c < D, other=0.0), zero)
        start, dense = share * _KEYS, tl.where(outlier, 0.0, 1.0)
        t = start + tl.arange(0, _KEYS)[:, None]
        x = tokens(head_of(k, unit // entries, heads, outer, inner), t, c, where, F)
        code = towards(x - zero, (dense * scale) > 0.0, scale, third, G, FINE)
        code = tl.where((t >= where[4]) & (scale > 0.0) & (dense > 0.0), code, 0)
        if _get(F, "name") == "asym3":
            tl.store(bits + unit.to(tl.int64) * (2 * T * D) + t * D + c, (code & 1).to(tl.uint8), mask=c < D)
            code = code >> 1
        if FINE is not None:
            place = ranks(third, C)
            one = (code & 1).to(tl.uint8)
            tl.store(bits + unit.to(tl.int64) * (2 * T * D) + place * T + t, one, mask=third & (t < T))
            code = tl.where(third, code >> 1, code)
        put_keys(page, code, start, F, _KEYS, C)
        put_outliers(page, x, outlier, t, F, C)
        if share == 0:
            halves = page.to(tl.pointer_type(tl.float16))
            tl.store(halves + _at(F, "k_scale") // 2 + c, (scale * dense).to(tl.float16), mask=c < D)
            tl.store(halves + _at(F, "k_zero") // 2 + c, (zero * dense).to(tl.float16), mask=c < D)
            put_meta(page, outlier, third, _value_scales(page, own, F, R), tl.full([1, 1], 1.0, tl.float32), F, C)


@triton.jit(do_not_specialize=VARIABLE)
def _pack_bits(
    pages, bits, order, table, tables, chunks, width, slots, rows_at, skip, entries, page_group, part,
    F: tl.constexpr, KIND: tl.constexpr, MP: tl.constexpr, KEYS: tl.constexpr, SIZE: tl.constexpr,
    N: tl.constexpr,
):  # fmt: skip
    """Program (page, N bytes): the third bits of K or V into their section."""
    unit = tl.program_id(0)
    where = entry(unit % entries, table, tables, chunks, width, slots, rows_at, skip, F, KIND, MP)
    if where[0] >= 0:
        page = head_of(pages, unit // entries, 1, page_group, 0) + where[0].to(tl.int64) * _get(F, "blob_bytes")
        own = bits + (unit.to(tl.int64) * 2 + part) * (_get(F, "page") * _get(F, "head_dim"))
        put_bits(page + _at(F, "k_thirds" if KEYS else "v_thirds"), own, order, SIZE, tl.program_id(1), N)
