"""Sealing on a GPU: the same bytes as `ref.seal`, for formats whose levels lie on one grid (e2m0, asym2, asym3).

One program fits a page's keys or values, and writes scales, zeros, outliers and one byte per code; a second kernel packs those
in the stored order. Every step is the reference's: what it sums in float64 is summed in float64 here, which leaves no trace of
the order after rounding to float16, and products are not fused with sums.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from forefetch.kernels.kv_codec import orders
from forefetch.kernels.kv_codec.fit import ALTERNATIONS, GRIDS, MOST_GAIN, TURNS
from forefetch.kernels.kv_codec.formats import SATURATION, KvFormat
from forefetch.kernels.kv_codec.triton import _at, _get, _stored

_LIMIT = tl.constexpr(SATURATION)
_MOST_GAIN = tl.constexpr(MOST_GAIN)
_TURNS = tl.constexpr(len(TURNS))


@dataclass(frozen=True)
class _Rule:
    """A `fit.Grid`; the compiler takes a named tuple apart."""

    bits: int
    unit: int
    radix4: bool
    start: float
    nudge: float

    def factor(self, turn: int) -> float:
        """What a key's values are multiplied by before they are rounded."""
        return 1 + self.nudge * TURNS[turn]


_RULES = {name: _Rule(*GRIDS[name]) for name in ("e2m0", "asym2", "asym3")}


def supports(format: KvFormat) -> bool:
    """Whether `seal` knows the format."""
    return format.name in _RULES


def seal(k: Tensor, v: Tensor, format: KvFormat, *, skip: int = 0, weight: Tensor | None = None) -> Tensor:
    """`ref.seal`: k, v [n, T, D] -> blobs uint8 [n, blob_bytes]. ValueError for a format that `supports` refuses."""
    shape = (len(k), format.page, format.head_dim)
    if not supports(format) or k.shape != shape or v.shape != shape:
        raise ValueError(f"cannot seal {tuple(k.shape)} and {tuple(v.shape)} as {format}")
    blobs = torch.zeros((len(k), format.blob_bytes), dtype=torch.uint8, device=k.device)
    if not len(k):
        return blobs
    codes = torch.empty((2, *shape), dtype=torch.uint8, device=k.device)
    cost = k if weight is None else weight.float().contiguous()
    tile = triton.next_power_of_2(format.page), triton.next_power_of_2(format.head_dim)
    rule = {"G": _RULES[format.name], "F": format, "R": tile[0], "C": tile[1], "ROUNDS": ALTERNATIONS}
    options = {"num_warps": 16, "enable_fp_fusion": False}
    keys, values = k.contiguous(), v.contiguous()
    _seal_keys[(len(k),)](keys, cost, codes[0], blobs, skip, WEIGHTED=weight is not None, **rule, **options)
    _seal_values[(len(k),)](values, codes[1], blobs, skip, **rule, **options)
    for kind, name in enumerate("kv"):
        _pack_section(codes[kind], blobs, format, name)
    return blobs


def _pack_section(codes: Tensor, blobs: Tensor, format: KvFormat, name: str) -> None:
    """Codes of "k" or "v" into their section, and the third bits of asym3 into theirs."""
    parts = [(f"{name}_codes", 2, int(format.name == "asym3"))]
    if format.name == "asym3":
        parts.append((f"{name}_thirds", 1, 0))
    for section, bits, shift in parts:
        at = format.sections[section]
        order = _order(format, name, bits, codes.device)
        grid = (len(blobs), triton.cdiv(at.size, 1024))
        _pack[grid](codes, order, blobs[:, at.offset :], blobs.stride(0), at.size, codes[0].numel(), shift, bits, 1024)


_ORDERS: dict[tuple[KvFormat, str, int, torch.device], Tensor] = {}


def _order(format: KvFormat, name: str, bits: int, device: torch.device) -> Tensor:
    """`orders.code_order` on the device, made once."""
    key = format, name, bits, device
    if key not in _ORDERS:
        _ORDERS[key] = orders.code_order(format, name, bits).int().to(device)
    return _ORDERS[key]


@triton.constexpr_function
def _of(rule, name):
    return getattr(rule, name)


@triton.constexpr_function
def _factor(rule, turn):
    return rule.factor(turn)


@triton.jit
def _codes(y, scale, G: tl.constexpr):
    """The nearest level of each y, zero already taken off: `fit._codes`."""
    if _of(G, "radix4"):
        return (tl.abs(y) > 2.5 * scale).to(tl.int32) | (y < 0.0).to(tl.int32) << 1
    HALF: tl.constexpr = 2 ** (_of(G, "bits") - 1)
    code = HALF - 1 + (y >= 0.0).to(tl.int32)
    for step in tl.static_range(1, HALF):
        edge = 2 * _of(G, "unit") * step * scale
        code += (y >= edge).to(tl.int32) - (y < -edge).to(tl.int32)
    return code


@triton.jit
def _levels(code, G: tl.constexpr):
    """Codes -> float32 levels."""
    if _of(G, "radix4"):
        return ((1 + 3 * (code & 1)) * (1 - 2 * (code >> 1))).to(tl.float32)
    return ((2 * code - (2 ** _of(G, "bits") - 1)) * _of(G, "unit")).to(tl.float32)


@triton.jit
def _sum(x, AXIS: tl.constexpr):
    return tl.expand_dims(tl.sum(x.to(tl.float64), AXIS), AXIS)


@triton.jit
def _least_squares(x, valid, count, AXIS: tl.constexpr, G: tl.constexpr, ROUNDS: tl.constexpr):
    """scale and zero, float64, before they are rounded."""
    sum_x = _sum(x * valid, AXIS)
    zero = sum_x / count
    sum_x = zero * count
    away = x - zero.to(tl.float32)
    spread = tl.sqrt(_sum(away * away * valid, AXIS) / count)
    scale = spread * _of(G, "start")
    gain = tl.zeros_like(spread)
    for _ in tl.static_range(ROUNDS):
        level = _levels(_codes(x - zero.to(tl.float32), scale.to(tl.float32), G), G) * valid
        sum_l, sum_ll, sum_lx = _sum(level, AXIS), _sum(level * level, AXIS), _sum(level * x, AXIS)
        determinant = count * sum_ll - sum_l * sum_l
        better = (count * sum_lx - sum_l * sum_x) / tl.maximum(determinant, 1.0)
        scale = tl.where((determinant > 0.0) & (scale > 0.0), better, scale)
        zero = (sum_x - scale * sum_l) / count
        gain = count * spread * tl.sqrt(tl.maximum(determinant, 0.0)) / tl.maximum(count * sum_lx - sum_l * sum_x, 1e-30)
    scale = tl.where(scale > 0.0, scale * tl.minimum(tl.maximum(gain * gain, 1.0), _MOST_GAIN), scale)
    return scale, zero


@triton.jit
def _fit(x, valid, count, AXIS: tl.constexpr, G: tl.constexpr, ROUNDS: tl.constexpr):
    """x float32, valid float32 0 or 1, groups along AXIS of `count` valid elements -> (scale, zero as float32 that float16
    holds, codes, sum of squared errors): `fit.fit` with `unbiased`."""
    if _of(G, "start") == 0.0:
        low = tl.expand_dims(tl.min(tl.where(valid > 0.0, x, float("inf")), AXIS), AXIS).to(tl.float64)
        high = tl.expand_dims(tl.max(tl.where(valid > 0.0, x, float("-inf")), AXIS), AXIS).to(tl.float64)
        scale, zero = (high - low) / (2 * (2 ** _of(G, "bits") - 1) * _of(G, "unit")), (high + low) / 2
    else:
        scale, zero = _least_squares(x, valid, count, AXIS, G, ROUNDS)
    rounded = scale.to(tl.float32).to(tl.float16).to(tl.float32)
    middle = zero.to(tl.float32).to(tl.float16).to(tl.float32)
    y = x - middle
    code = tl.where((valid > 0.0) & (rounded > 0.0), _codes(y, rounded, G), 0)
    off = y - _levels(code, G) * rounded
    return rounded, middle, code, _sum(off * off * valid, AXIS)


@triton.jit
def _towards(y, counted, scale, G: tl.constexpr):
    """`fit.towards`: y [T, D], zero taken off; counted [1, D], scale [1, D] -> codes."""
    code = _codes(y, scale, G)
    least = tl.full([1, 1], float("inf"), tl.float64)
    for turn in tl.static_range(_TURNS):
        tried = _codes(y * _factor(G, turn), scale, G)
        miss = tl.abs(_sum(tl.where(counted, (_levels(tried, G) * scale - y) * y, 0.0), 1))
        code = tl.where(miss < least, tried, code)
        least = tl.minimum(miss, least)
    return code


@triton.jit
def _page(x, skip, F: tl.constexpr, R: tl.constexpr, C: tl.constexpr):
    """(token [R, 1], channel [1, C], inside, float32 values): as float16, saturated, the first `skip` tokens zero."""
    D: tl.constexpr = _get(F, "head_dim")
    t, c = tl.arange(0, R)[:, None], tl.arange(0, C)[None, :]
    inside = (t < _get(F, "page")) & (c < D)
    at = (tl.program_id(0).to(tl.int64) * _get(F, "page") + t) * D + c
    value = tl.load(x + at, mask=inside & (t >= skip), other=0.0).to(tl.float32)
    value = tl.minimum(tl.maximum(value, -_LIMIT), _LIMIT).to(tl.float16).to(tl.float32)
    return t, c, inside, at, value


@triton.jit
def _seal_keys(
    k, weight, codes, blobs, skip,
    G: tl.constexpr, F: tl.constexpr, R: tl.constexpr, C: tl.constexpr, ROUNDS: tl.constexpr, WEIGHTED: tl.constexpr,
):  # fmt: skip
    """Program (page): groups are channels."""
    t, c, inside, at, x = _page(k, skip, F, R, C)
    T: tl.constexpr = _get(F, "page")
    D: tl.constexpr = _get(F, "head_dim")
    valid = ((t >= skip) & (t < T)).to(tl.float32)
    scale, zero, _, error = _fit(x, valid, (T - skip).to(tl.float64), 0, G, ROUNDS)
    if WEIGHTED:
        error *= tl.load(weight + tl.program_id(0) * D + c, mask=c < D, other=0.0).to(tl.float64)
    blob = blobs + tl.program_id(0).to(tl.int64) * _get(F, "blob_bytes")
    halves, words = blob.to(tl.pointer_type(tl.float16)), (blob + _at(F, "meta")).to(tl.pointer_type(tl.int32))
    left, chosen = tl.where(c < D, error, -1.0), c < 0
    for _ in tl.static_range(_get(F, "outliers")):
        worst = tl.max(left, 1, keep_dims=True)
        channel = tl.min(tl.where(left == worst, c, C), 1, keep_dims=True)
        chosen, left = chosen | (c == channel), tl.where(c == channel, -1.0, left)
    dense, rest = tl.where(chosen, 0.0, 1.0), chosen
    for n in tl.static_range(_get(F, "outliers")):
        channel = tl.min(tl.where(rest, c, C), 1, keep_dims=True)
        rest = rest & (c != channel)
        own = tl.sum(tl.where(c == channel, x, 0.0), 1, keep_dims=True)
        tl.store(halves + _at(F, "outliers") // 2 + n * T + _stored(t, F), own.to(tl.float16), mask=t < T)
        tl.store(words + 2 + n + tl.zeros_like(channel), channel)
    code = _towards(x - zero, (dense * scale) > 0.0, scale, G)
    code = tl.where((valid > 0.0) & (scale > 0.0), code, 0)
    one = tl.full([1, 1], 1.0, tl.float32)
    tl.store(words.to(tl.pointer_type(tl.float32)) + 1 + tl.zeros([1, 1], tl.int32), one)
    tl.store(halves + _at(F, "k_scale") // 2 + c, (scale * dense).to(tl.float16), mask=c < D)
    tl.store(halves + _at(F, "k_zero") // 2 + c, (zero * dense).to(tl.float16), mask=c < D)
    tl.store(codes + at, tl.where(chosen, 0, code).to(tl.uint8), mask=inside)


@triton.jit
def _seal_values(
    v, codes, blobs, skip,
    G: tl.constexpr, F: tl.constexpr, R: tl.constexpr, C: tl.constexpr, ROUNDS: tl.constexpr,
):  # fmt: skip
    """Program (page): groups are tokens; the page's factor is the power of two that no scale exceeds."""
    t, c, inside, at, x = _page(v, skip, F, R, C)
    D: tl.constexpr = _get(F, "head_dim")
    scale, zero, code, _ = _fit(x, (c < D).to(tl.float32), tl.full([1, 1], D, tl.float64), 1, G, ROUNDS)
    most = tl.max(scale, 0, keep_dims=True)
    bits = tl.maximum(most, 2.0**-30).to(tl.int32, bitcast=True)
    up = (bits >> 23) + ((bits & 0x7FFFFF) != 0).to(tl.int32)
    factor = tl.where(most > 0.0, (up << 23).to(tl.float32, bitcast=True), 1.0)
    blob = blobs + tl.program_id(0).to(tl.int64) * _get(F, "blob_bytes")
    halves = blob.to(tl.pointer_type(tl.float16))
    tl.store((blob + _at(F, "meta")).to(tl.pointer_type(tl.float32)) + tl.zeros([1, 1], tl.int32), factor)
    known = t < _get(F, "page")
    tl.store(halves + _at(F, "v_scale") // 2 + _stored(t, F), (scale / factor).to(tl.float16), mask=known)
    tl.store(halves + _at(F, "v_zero") // 2 + _stored(t, F), zero.to(tl.float16), mask=known)
    tl.store(codes + at, tl.where(t >= skip, code, 0).to(tl.uint8), mask=inside)


@triton.jit
def _pack(codes, order, section, stride, size, count, shift, BITS: tl.constexpr, N: tl.constexpr):
    """Program (page, N bytes of its section): fields in stored order, the first in the lowest bits."""
    page, byte = tl.program_id(0).to(tl.int64), tl.program_id(1) * N + tl.arange(0, N)
    packed = tl.zeros([N], tl.int32)
    for field in tl.static_range(8 // BITS):
        source = tl.load(order + byte * (8 // BITS) + field, mask=byte < size, other=0)
        code = tl.load(codes + page * count + source, mask=byte < size, other=0).to(tl.int32)
        packed |= ((code >> shift) & ((1 << BITS) - 1)) << (field * BITS)
    tl.store(section + page * stride + byte, packed.to(tl.uint8), mask=byte < size)
