"""`fit.fit` and `fit.towards` on tiles, for the formats whose levels lie on grids: the same float32 steps, sums in float64.

Sums of levels are integers, and are summed as such: turning a number into a float64 is what such a kernel has least room for.
"""

from __future__ import annotations

from dataclasses import dataclass

import triton
import triton.language as tl

from forefetch.kernels.kv_codec.fit import GRIDS, MOST_GAIN, TURNS

# Loops stay loops: a program runs but once, so the code that it fetches is part of what it costs.

_MOST_GAIN = tl.constexpr(MOST_GAIN)
_TURNS = tl.constexpr(len(TURNS))
assert tuple((turn + 1) // 2 * (2 * (turn & 1) - 1) for turn in range(len(TURNS))) == TURNS


@dataclass(frozen=True)
class Rule:
    """A `fit.Grid`; the compiler takes a named tuple apart."""

    bits: int
    unit: int
    radix4: bool
    start: float
    nudge: float


RULES = {name: Rule(*grid) for name, grid in GRIDS.items()}


@triton.constexpr_function
def _of(rule, name):
    return getattr(rule, name)


@triton.jit
def factor_of(turn, NUDGE: tl.constexpr):
    """1 + NUDGE * fit.TURNS[turn]: what a key's values are multiplied by before they are rounded; float32 [1, 1]."""
    number = tl.zeros([1, 1], tl.int32) + turn
    steps = (number + 1) // 2 * (2 * (number & 1) - 1)
    return (tl.full([1, 1], NUDGE, tl.float64) * steps.to(tl.float64) + 1.0).to(tl.float32)


@triton.jit
def codes_of(y, scale, G: tl.constexpr):
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
def levels_of(code, G: tl.constexpr):
    """Codes -> levels, int32."""
    if _of(G, "radix4"):
        return (1 + 3 * (code & 1)) * (1 - 2 * (code >> 1))
    return (2 * code - (2 ** _of(G, "bits") - 1)) * _of(G, "unit")


@triton.jit
def total(x, AXIS: tl.constexpr):
    """The sum, float64, its axis kept."""
    return tl.expand_dims(tl.sum(x.to(tl.float64), AXIS), AXIS)


@triton.jit
def _count(levels, AXIS: tl.constexpr):
    return tl.expand_dims(tl.sum(levels, AXIS), AXIS).to(tl.float64)


@triton.jit
def _least_squares(x, valid, count, AXIS: tl.constexpr, G: tl.constexpr, ROUNDS: tl.constexpr):
    """scale and zero, float64, before they are rounded."""
    sum_x = total(x * valid, AXIS)
    zero = sum_x / count
    sum_x = zero * count
    away = x - zero.to(tl.float32)
    spread = tl.sqrt(total(away * away * valid, AXIS) / count)
    scale = spread * _of(G, "start")
    gain = tl.zeros_like(spread)
    for _ in range(ROUNDS):
        level = levels_of(codes_of(x - zero.to(tl.float32), scale.to(tl.float32), G), G) * valid.to(tl.int32)
        sum_l, sum_ll, sum_lx = _count(level, AXIS), _count(level * level, AXIS), total(level.to(tl.float32) * x, AXIS)
        determinant = count * sum_ll - sum_l * sum_l
        better = (count * sum_lx - sum_l * sum_x) / tl.maximum(determinant, 1.0)
        scale = tl.where((determinant > 0.0) & (scale > 0.0), better, scale)
        zero = (sum_x - scale * sum_l) / count
        gain = count * spread * tl.sqrt(tl.maximum(determinant, 0.0)) / tl.maximum(count * sum_lx - sum_l * sum_x, 1e-30)
    scale = tl.where(scale > 0.0, scale * tl.minimum(tl.maximum(gain * gain, 1.0), _MOST_GAIN), scale)
    return scale, zero


@triton.jit
def fit(x, valid, count, AXIS: tl.constexpr, G: tl.constexpr, ROUNDS: tl.constexpr):
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
    code = tl.where((valid > 0.0) & (rounded > 0.0), codes_of(y, rounded, G), 0)
    off = y - levels_of(code, G).to(tl.float32) * rounded
    return rounded, middle, code, total(off * off * valid, AXIS)


@triton.jit
def towards(y, counted, scale, third, G: tl.constexpr, FINE: tl.constexpr):
    """`fit.towards`: y [T, D], zero taken off; counted, scale, third [1, D] -> codes; FINE: the grid of channels `third`."""
    code = tl.zeros(y.shape, tl.int32)
    least = tl.full([y.shape[0], 1], float("inf"), tl.float64)
    for turn in range(_TURNS):
        nudged = y * factor_of(turn, _of(G, "nudge"))
        tried = codes_of(nudged, scale, G)
        level = levels_of(tried, G)
        if FINE is not None:
            finer = codes_of(nudged, scale, FINE)
            tried, level = tl.where(third, finer, tried), tl.where(third, levels_of(finer, FINE), level)
        miss = tl.abs(total(tl.where(counted, (level.to(tl.float32) * scale - y) * y, 0.0), 1))
        code, least = tl.where(miss < least, tried, code), tl.minimum(miss, least)
    return code
