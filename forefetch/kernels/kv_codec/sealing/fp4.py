"""Sealing of fp4: `fit.fit_fp4` and `fit.recode_fp4` in three launches. The largest of 32 elements says where a scale is looked
for (`_span_pages`); once all of a page are known they have their common factor, and V gets its scales and codes, K its scales
and errors (`_scale_pages`); then keys get theirs (`_choose`).

Letters: a tile's groups of 32 lie along one axis of three, K's as [channels, T/32, 32], V's as [tokens, D/32, 32].
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl

from forefetch.kernels.kv_codec.fit import NEARBY, NUDGE4, TURNS
from forefetch.kernels.kv_codec.formats import GROUP
from forefetch.kernels.kv_codec.sealing.entries import VARIABLE, entry, head_of, tokens
from forefetch.kernels.kv_codec.sealing.fit import factor_of, total
from forefetch.kernels.kv_codec.sealing.grids import CHANNELS, KEYS, TOKENS, columns, put_meta, put_outliers, worst
from forefetch.kernels.kv_codec.sealing.pack import put_keys, put_values
from forefetch.kernels.kv_codec.triton import _at, _get, _stored, level_of

if TYPE_CHECKING:
    from forefetch.kernels.kv_codec.sealing import Job

_CHANNELS, _TOKENS, _KEYS, _GROUP = tl.constexpr(CHANNELS), tl.constexpr(TOKENS), tl.constexpr(KEYS), tl.constexpr(GROUP)
_TURNS, _NUDGE = tl.constexpr(len(TURNS)), tl.constexpr(NUDGE4)
_NEAREST, _FARTHEST = tl.constexpr(NEARBY[0]), tl.constexpr(NEARBY[1])


def seal_fp4(job: Job, units: int) -> None:
    """The job's `units` pages."""
    format, device = job.format, job.k.device
    page, dim, groups = format.page, format.head_dim, -(-format.head_dim // GROUP)
    counts = page // GROUP * dim, page * groups  # scales of K and of V
    doubles = torch.empty((units, sum(counts)), dtype=torch.float64, device=device)
    zeros = torch.empty((units, dim + page), dtype=torch.float32, device=device)
    errors = torch.empty((units, dim), dtype=torch.float64, device=device)
    chosen = torch.empty((units, counts[0]), dtype=torch.uint8, device=device)
    tile = {"R": triton.next_power_of_2(page), "C": max(GROUP, triton.next_power_of_2(dim))}
    rule = {**job.options, **tile, "KS": counts[0], "VS": counts[1], "enable_fp_fusion": False, "num_warps": 4}
    cost = errors if job.weight is None else job.weight.float().contiguous()
    shares, sources = dim // CHANNELS + page // TOKENS, (job.k, job.v)
    _span_pages[(units, shares)](*sources, doubles, zeros, *job.where, **rule)
    weighted, found = job.weight is not None, (doubles, zeros, errors, chosen)
    _scale_pages[(units, shares)](*sources, job.pages, cost, *found, *job.where, WEIGHTED=weighted, **rule)
    _choose[(units, page // KEYS)](job.k, job.pages, *found, *job.where, **rule)


@triton.constexpr_function
def _power_of_2(count):
    return triton.next_power_of_2(count)


@triton.jit
def _codes(y, step):
    """`fit._codes4`: int32."""
    size = tl.abs(y)
    code = (size > 6.5 * step).to(tl.int32) + (size > 13.0 * step).to(tl.int32) + (size > 20.0 * step).to(tl.int32)
    code += (size > 28.0 * step).to(tl.int32) + (size > 36.0 * step).to(tl.int32) + (size > 44.0 * step).to(tl.int32)
    code += (size > 56.0 * step).to(tl.int32)
    code = tl.where(y < 0.0, code | 8, code)
    return tl.where(step > 0.0, code, 0)


@triton.jit
def _spans(y, AXIS: tl.constexpr):
    """The scale that puts a group's largest value on the last level: float64, its axis kept."""
    return tl.expand_dims(tl.max(tl.abs(y), AXIS), AXIS).to(tl.float64) / 64


@triton.jit
def _factor(scales, COUNT: tl.constexpr):
    """`fit._factor`: float32 [1]."""
    at = tl.arange(0, _power_of_2(COUNT))
    most = tl.max(tl.load(scales + at, mask=at < COUNT, other=0.0), 0, keep_dims=True)
    bits = (tl.maximum(most, 2.0**-100) / 224.0).to(tl.int64, bitcast=True)
    up = ((bits >> 52) - 1023 + ((bits & 0xFFFFFFFFFFFFF) != 0).to(tl.int64)).to(tl.int32)
    up = tl.minimum(tl.maximum(up, -40), 40)
    return tl.where(most > 0.0, ((up + 127) << 23).to(tl.float32, bitcast=True), 1.0)


@triton.jit
def _byte(scale, factor):
    """float64 scales, not negative, over the factor as E4M3, int32; spelled out, as older GPUs lack the type."""
    value = tl.minimum((scale / factor.to(tl.float64)).to(tl.float32), 448.0)
    exponent = tl.maximum((value.to(tl.int32, bitcast=True) >> 23) - 127, -6)
    steps = value * ((130 - exponent) << 23).to(tl.float32, bitcast=True)
    steps = (steps + 12582912.0) - 12582912.0  # to the nearest integer, ties to even
    return (exponent + 6) * 8 + steps.to(tl.int32)


@triton.jit
def _number(byte):
    """What E4M3 bytes up to 126 mean: float32."""
    exponent = byte >> 3
    steps = (byte & 7) + tl.where(exponent > 0, 8, 0)
    return steps.to(tl.float32) * ((117 + tl.maximum(exponent, 1)) << 23).to(tl.float32, bitcast=True)


@triton.jit
def _search(y, counted, scale, factor, AXIS: tl.constexpr):
    """Bytes of the scales of each group along AXIS of y that leave the least error where `counted`, and that; axes kept.
    `scale`: `_spans`."""
    start = _byte(scale, factor)
    byte, least = start, tl.full(start.shape, float("inf"), tl.float64)
    for away in range(_NEAREST, _FARTHEST):
        tried = tl.minimum(tl.maximum(start + away, 0), 126)
        step = _number(tried) * factor
        off = tl.where(counted, y - level_of(_codes(y, step)).to(tl.float32) * step, 0.0)
        error = total(off * off, AXIS)
        byte, least = tl.where(error < least, tried, byte), tl.minimum(error, least)
    return byte, least


@triton.jit
def _channels(k, zeros, share, where, F: tl.constexpr, R: tl.constexpr, FIT: tl.constexpr):
    """A program's channels of K, zero taken off, by groups [channels, R/32, 32]; `zeros` are found with FIT, else read."""
    c, t = columns(share, R)
    x = tokens(k, t, c, where, F)
    if FIT:
        zero = total(x, 1) / (_get(F, "page") - where[4]).to(tl.float64)
        zero = zero.to(tl.float32).to(tl.float16).to(tl.float32)
        tl.store(zeros + c, zero)
    else:
        zero = tl.load(zeros + c)
    y = tl.where((t >= where[4]) & (t < _get(F, "page")), x - zero, 0.0)
    return tl.reshape(y, (_CHANNELS, R // _GROUP, _GROUP))


@triton.jit
def _values(v, zeros, start, where, F: tl.constexpr, C: tl.constexpr, FIT: tl.constexpr):
    """The same of a program's tokens of V: [tokens, C/32, 32]."""
    D: tl.constexpr = _get(F, "head_dim")
    t, c = start + tl.arange(0, _TOKENS)[:, None], tl.arange(0, C)[None, :]
    x = tokens(v, t, c, where, F)
    if FIT:
        zero = (total(x, 1) / D).to(tl.float32).to(tl.float16).to(tl.float32)
        tl.store(zeros + D + t, zero)
    else:
        zero = tl.load(zeros + D + t)
    return tl.reshape(tl.where(c < D, x - zero, 0.0), (_TOKENS, C // _GROUP, _GROUP))


@triton.jit
def _key_groups(share, R: tl.constexpr):
    """(group, channel) of a program's scales [channels, R/32, 1]."""
    return tl.arange(0, R // _GROUP)[None, :, None], (share * _CHANNELS + tl.arange(0, _CHANNELS))[:, None, None]


@triton.jit
def _value_groups(share, F: tl.constexpr, C: tl.constexpr):
    """(first token, token, group) of a program's scales [tokens, C/32, 1]."""
    start = (share - _get(F, "head_dim") // _CHANNELS) * _TOKENS
    return start, start + tl.arange(0, _TOKENS)[:, None, None], tl.arange(0, C // _GROUP)[None, :, None]


@triton.jit
def _span_values(v, zeros, scales, share, where, F: tl.constexpr, C: tl.constexpr, VS: tl.constexpr):
    start, t, group = _value_groups(share, F, C)
    y = _values(v, zeros, start, where, F, C, True)
    PER: tl.constexpr = VS // _get(F, "page")
    tl.store(scales + t * PER + group, _spans(y, 2), mask=group < PER)


@triton.jit
def _scale_keys(
    y, weight, scales, errors, chosen, share, skip,
    F: tl.constexpr, R: tl.constexpr, KS: tl.constexpr, WEIGHTED: tl.constexpr,
):  # fmt: skip
    group, channel = _key_groups(share, R)
    counted = group * _GROUP + tl.arange(0, _GROUP)[None, None, :] >= skip
    factor, known = _factor(scales, KS)[None, None, :], group < _get(F, "page") // _GROUP
    at = group * _get(F, "head_dim") + channel
    byte, least = _search(y, counted, tl.load(scales + at, mask=known, other=0.0), factor, 2)
    tl.store(chosen + at, byte.to(tl.uint8), mask=known)
    error = tl.sum(tl.where(known, least, 0.0), 1)
    c = (share * _CHANNELS + tl.arange(0, _CHANNELS))[:, None]
    if WEIGHTED:
        error *= tl.load(weight + c).to(tl.float64)
    tl.store(errors + c, error)


@triton.jit
def _scale_values(v, zeros, scales, page, share, where, F: tl.constexpr, C: tl.constexpr, VS: tl.constexpr):
    start, t, group = _value_groups(share, F, C)
    y = _values(v, zeros, start, where, F, C, False)
    PER: tl.constexpr = VS // _get(F, "page")
    factor = _factor(scales, VS)[None, None, :]
    counted = group * _GROUP + tl.arange(0, _GROUP)[None, None, :] < _get(F, "head_dim")
    byte, _ = _search(y, counted, tl.load(scales + t * PER + group, mask=group < PER, other=0.0), factor, 2)
    code = tl.where(t >= where[4], _codes(y, _number(byte) * factor), 0)
    put_values(page, tl.reshape(code, (_TOKENS, C)), start, F, C)
    tl.store(page + _at(F, "v_scale") + group * _get(F, "page") + _stored(t, F), byte.to(tl.uint8), mask=group < PER)
    zero = tl.load(zeros + _get(F, "head_dim") + start + tl.arange(0, _TOKENS))
    halves = page.to(tl.pointer_type(tl.float16)) + _at(F, "v_zero") // 2
    tl.store(halves + _stored(start + tl.arange(0, _TOKENS), F), zero.to(tl.float16))


@triton.jit(do_not_specialize=VARIABLE)
def _span_pages(
    k, v, doubles, zeros,
    table, tables, chunks, width, slots, rows_at, skip, entries, heads, outer, inner, page_group,
    F: tl.constexpr, KIND: tl.constexpr, MP: tl.constexpr, R: tl.constexpr, C: tl.constexpr,
    KS: tl.constexpr, VS: tl.constexpr,
):  # fmt: skip
    """Program (page, its share of channels of K or of tokens of V). `doubles` [pages, KS + VS]: scales [T/32, D], [T, D/32]."""
    unit, share = tl.program_id(0), tl.program_id(1)
    where = entry(unit % entries, table, tables, chunks, width, slots, rows_at, skip, F, KIND, MP)
    if where[0] >= 0:
        D: tl.constexpr = _get(F, "head_dim")
        T: tl.constexpr = _get(F, "page")
        scales, own = doubles + unit.to(tl.int64) * (KS + VS), zeros + unit * (D + T)
        if share < D // _CHANNELS:
            y = _channels(head_of(k, unit // entries, heads, outer, inner), own, share, where, F, R, True)
            group, c = _key_groups(share, R)
            tl.store(scales + group * D + c, _spans(y, 2), mask=group < T // _GROUP)
        else:
            _span_values(head_of(v, unit // entries, heads, outer, inner), own, scales + KS, share, where, F, C, VS)


@triton.jit(do_not_specialize=VARIABLE)
def _scale_pages(
    k, v, pages, weight, doubles, zeros, errors, chosen,
    table, tables, chunks, width, slots, rows_at, skip, entries, heads, outer, inner, page_group,
    F: tl.constexpr, KIND: tl.constexpr, MP: tl.constexpr, R: tl.constexpr, C: tl.constexpr,
    KS: tl.constexpr, VS: tl.constexpr, WEIGHTED: tl.constexpr,
):  # fmt: skip
    """Program as above: errors and scales (`chosen`) of K's channels; V's codes, scales and zeros."""
    unit, share = tl.program_id(0), tl.program_id(1)
    where = entry(unit % entries, table, tables, chunks, width, slots, rows_at, skip, F, KIND, MP)
    if where[0] >= 0:
        D: tl.constexpr = _get(F, "head_dim")
        T: tl.constexpr = _get(F, "page")
        scales, own = doubles + unit.to(tl.int64) * (KS + VS), zeros + unit * (D + T)
        if share < D // _CHANNELS:
            y = _channels(head_of(k, unit // entries, heads, outer, inner), own, share, where, F, R, False)
            _scale_keys(
                y, weight + unit * D, scales, errors + unit * D, chosen + unit * KS, share, where[4], F, R, KS, WEIGHTED
            )
        else:
            page = head_of(pages, unit // entries, 1, page_group, 0) + where[0].to(tl.int64) * _get(F, "blob_bytes")
            _scale_values(head_of(v, unit // entries, heads, outer, inner), own, scales + KS, page, share, where, F, C, VS)


@triton.jit
def _towards(y, counted, step):
    """`fit.towards`: y [N, C], zero taken off; counted, step [1, C] -> codes."""
    code, least = tl.zeros(y.shape, tl.int32), tl.full([y.shape[0], 1], float("inf"), tl.float64)
    for turn in range(_TURNS):
        tried = _codes(y * factor_of(turn, _NUDGE), step)
        miss = tl.abs(total(tl.where(counted, (level_of(tried).to(tl.float32) * step - y) * y, 0.0), 1))
        code, least = tl.where(miss < least, tried, code), tl.minimum(miss, least)
    return code


@triton.jit(do_not_specialize=VARIABLE)
def _choose(
    k, pages, doubles, zeros, errors, chosen,
    table, tables, chunks, width, slots, rows_at, skip, entries, heads, outer, inner, page_group,
    F: tl.constexpr, KIND: tl.constexpr, MP: tl.constexpr, R: tl.constexpr, C: tl.constexpr,
    KS: tl.constexpr, VS: tl.constexpr,
):  # fmt: skip
    """Program (page, 16 of its keys); the first of a page writes what belongs to all."""
    unit, share = tl.program_id(0), tl.program_id(1)
    where = entry(unit % entries, table, tables, chunks, width, slots, rows_at, skip, F, KIND, MP)
    if where[0] >= 0:
        D: tl.constexpr = _get(F, "head_dim")
        T: tl.constexpr = _get(F, "page")
        scales, own, error = doubles + unit.to(tl.int64) * (KS + VS), zeros + unit * (D + T), errors + unit * D
        mine = chosen + unit * KS
        page = head_of(pages, unit // entries, 1, page_group, 0) + where[0].to(tl.int64) * _get(F, "blob_bytes")
        c = tl.arange(0, C)[None, :]
        outlier = worst(tl.load(error + c, mask=c < D, other=-1.0), c, F, C)
        start, factor = share * _KEYS, _factor(scales, KS)[None, :]
        t = start + tl.arange(0, _KEYS)[:, None]
        step = _number(tl.load(mine + start // _GROUP * D + c, mask=c < D, other=0).to(tl.int32)) * factor
        zero = tl.load(own + c, mask=c < D, other=0.0)
        x = tokens(head_of(k, unit // entries, heads, outer, inner), t, c, where, F)
        code = _towards(tl.where(t >= where[4], x - zero, 0.0), (outlier == 0) & (c < D), step)
        put_keys(page, tl.where((t >= where[4]) & (outlier == 0), code, 0), start, F, _KEYS, C)
        put_outliers(page, x, outlier, t, F, C)
        if share == 0:
            group = tl.arange(0, R // _GROUP)[:, None]
            known = (group < T // _GROUP) & (c < D)
            byte = tl.load(mine + group * D + c, mask=known, other=0)
            tl.store(page + _at(F, "k_scale") + group * D + c, tl.where(outlier, 0, byte).to(tl.uint8), mask=known)
            halves = page.to(tl.pointer_type(tl.float16)) + _at(F, "k_zero") // 2
            tl.store(halves + c, (zero * tl.where(outlier, 0.0, 1.0)).to(tl.float16), mask=c < D)  # -0, as the reference
            put_meta(page, outlier, outlier, _factor(scales + KS, VS)[None, :], factor, F, C)
