"""Scale, zero and codes of a group by least squares: what sealing does with the numbers before they become bytes.

Groups lie along the last dim. Codes and (scale, zero) are improved in turns (Lloyd's algorithm with levels on a fixed grid),
from a start that is optimal for a Gaussian. Sums are float64, so that the order in which they are added does not reach the
result; it is rounded to float16 at the end and the codes are chosen once more against what was rounded. `asym3` is not fitted,
and `fp4`, whose scales are E4M3 numbers, takes of six the one that leaves least error.

Least squares shrinks: what it gives back has less energy than the values had, by the share D of energy that is error (11 % at
two bits). A query that looks for one key is aligned with it, so its score would be too small by that share, and the scores of
sealed tokens too flat. Keys therefore get their scale times 1 / (1 - D), measured per group. It costs no byte and took the
reference model's perplexity at 2 bits from +3.7 % to +2.7 % (benchmarks/LOG.md).

A key's error along the key itself counts most for the query that looks for it, and it is one direction of D. So a key's codes
are those of the key times a factor near 1, the one of seven whose codes leave least of that error (`towards`): a fifth less
divergence from float16's predictions for no byte.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from forefetch.kernels.kv_codec.formats import GROUP, LEVELS

ALTERNATIONS = 4
MOST_GAIN = 1.5
"""More than any distribution of 128 values that is not made up: a Laplace source needs 1.22 at two bits."""


class Grid(NamedTuple):
    """Levels a code may stand for. `radix4`: +-unit, +-4 unit; else 2**bits levels, 2 * unit apart, around 0."""

    bits: int
    unit: int
    radix4: bool
    start: float  # scale over standard deviation that is best for a Gaussian; 0: levels span the range, nothing is fitted
    nudge: float  # step of the factors that a key's codes are chosen by: about the share of a key that its error along it is


GRIDS = {
    "e2m0": Grid(2, 1, True, 0.396, 0.04),
    "asym2": Grid(2, 1, False, 0.498, 0.04),
    "coarse": Grid(2, 2, False, 0.249, 0.04),  # two bits of mixed and asym3
    "fine": Grid(3, 1, False, 0.293, 0.04),  # all three, in mixed
    "asym3": Grid(3, 1, False, 0.0, 0.02),
}
NUDGE4 = 0.01
"""The same for fp4."""
TURNS = (0, 1, -1, 2, -2, 3, -3)
"""Nudges that are tried; of equal ones the first."""


class Fitted(NamedTuple):
    """scale, zero [...] as float32 that float16 holds exactly; codes [..., m] uint8 (radix 4: exponent bit, sign bit; else
    counted from the lowest level); error [...]: sum of squares over the valid elements, float64."""

    scale: Tensor
    zero: Tensor
    codes: Tensor
    error: Tensor


def fit(x: Tensor, valid: Tensor, grid: Grid, *, unbiased: bool = False) -> Fitted:
    """x [..., m] float32, valid [m] float32 of 0 and 1: which elements count. A group of equal values gets scale 0, exactly.

    `unbiased`: slope 1 instead of least squares."""
    if not grid.start:
        return _spanned(x, valid, grid)
    count = valid.sum(dtype=torch.float64)
    zero = (x * valid).sum(-1, dtype=torch.float64) / count
    spread = (x - _last(zero)).square_().mul_(valid).sum(-1, dtype=torch.float64).div_(count).sqrt_()
    scale = spread * grid.start
    sum_x = zero * count
    gain = torch.ones_like(scale)
    for _ in range(ALTERNATIONS):
        levels = _levels(_codes(x - _last(zero), _last(scale), grid), grid).mul_(valid)
        sum_l, sum_ll = levels.sum(-1, dtype=torch.float64), levels.square().sum(-1, dtype=torch.float64)
        sum_lx = (levels * x).sum(-1, dtype=torch.float64)
        determinant = count * sum_ll - sum_l.square()
        better = (count * sum_lx - sum_l * sum_x) / determinant.clamp_min(1)
        scale = torch.where((determinant > 0) & (scale > 0), better, scale)
        zero = (sum_x - scale * sum_l) / count
        if unbiased:
            gain = count * spread * determinant.clamp_min(0).sqrt() / (count * sum_lx - sum_l * sum_x).clamp_min(1e-30)
    if unbiased:
        scale = torch.where(scale > 0, scale * gain.square().clamp(1, MOST_GAIN), scale)
    return _rounded(x, valid, scale, zero, grid)


def towards(y: Tensor, counted: Tensor, nudge: float, code: Callable[[Tensor], tuple[Tensor, Tensor]]) -> Tensor:
    """Keys' codes [n, D, T] whose error along each key is least.

    y [n, D, T] float32: keys, zero taken off; counted [n, D, 1] bool: channels whose codes are kept; `code`: values -> codes,
    and what these give back, zero taken off.
    """
    codes, least = torch.empty(0), torch.empty(0)
    for turn in TURNS:
        tried, back = code(y * (1 + nudge * turn))
        miss = ((back - y) * y).mul_(counted).sum(1, keepdim=True, dtype=torch.float64).abs_()  # [n, 1, T]
        better = miss < least if turn else torch.ones_like(miss, dtype=torch.bool)
        codes, least = (torch.where(better, a, b) if turn else a for a, b in ((tried, codes), (miss, least)))
    return codes


def recode(
    fitted: Fitted,
    columns: Tensor,
    counted: Tensor,
    valid: Tensor,
    grid: Grid,
    more: Grid | None = None,
    chosen: Tensor | None = None,
) -> Tensor:
    """Codes [n, D, T] by `towards` of keys' columns [n, D, T]; `more`: the grid of the channels `chosen` [n, D]."""
    scale = fitted.scale[..., None]

    def code(y: Tensor) -> tuple[Tensor, Tensor]:
        codes = _codes(y, scale, grid)
        back = _levels(codes, grid)
        if more is not None and chosen is not None:
            finer = _codes(y, scale, more)
            codes, back = (torch.where(chosen[..., None], a, b) for a, b in ((finer, codes), (_levels(finer, more), back)))
        return codes, back * scale

    codes = towards(columns - fitted.zero[..., None], counted, grid.nudge, code)
    return codes.mul_(valid.to(torch.uint8)).mul_((scale > 0).to(torch.uint8))


def _spanned(x: Tensor, valid: Tensor, grid: Grid) -> Fitted:
    """The lowest level is the minimum, the highest the maximum: large values decide which key a query finds; with three bits
    there is room to keep them (benchmarks/LOG.md)."""
    outside = torch.where(valid > 0, 0.0, torch.inf)
    low, high = (x + outside).amin(-1).double(), (x - outside).amax(-1).double()
    return _rounded(x, valid, (high - low) / (2 * (2**grid.bits - 1) * grid.unit), (high + low) / 2, grid)


def _rounded(x: Tensor, valid: Tensor, scale: Tensor, zero: Tensor, grid: Grid) -> Fitted:
    scale, zero = scale.half().float(), zero.half().float()
    y = x - zero[..., None]
    codes = _codes(y, scale[..., None], grid).mul_(valid.to(torch.uint8)).mul_((scale > 0).to(torch.uint8)[..., None])
    error = (y - _levels(codes, grid) * scale[..., None]).square_().mul_(valid).sum(-1, dtype=torch.float64)
    return Fitted(scale, zero, codes, error)


def _last(values: Tensor) -> Tensor:
    return values.float()[..., None]


def _codes(y: Tensor, scale: Tensor, grid: Grid) -> Tensor:
    """The nearest level of each y (zero already taken off), as uint8."""
    if grid.radix4:
        return (y.abs() > 2.5 * scale).to(torch.uint8) | (y < 0).to(torch.uint8) << 1
    half = 2 ** (grid.bits - 1)
    codes = torch.full(y.shape, half - 1, dtype=torch.uint8, device=y.device) + (y >= 0).to(torch.uint8)
    for step in range(1, half):
        edge = 2 * grid.unit * step * scale
        codes += (y >= edge).to(torch.uint8)
        codes -= (y < -edge).to(torch.uint8)
    return codes


def _levels(codes: Tensor, grid: Grid) -> Tensor:
    """Codes -> float32 levels."""
    if grid.radix4:
        return ((codes & 1).float() * 3 + 1) * (1 - (codes >> 1).float() * 2)
    levels: Tensor = (codes.float() * 2 - (2**grid.bits - 1)) * grid.unit
    return levels


class Fitted4(NamedTuple):
    """`fp4`: scales [..., m / 32 rounded up] float32 that E4M3 holds, times `factor` (one power of two per page, [n]);
    zero [...]; codes [..., m]; error [...]."""

    scales: Tensor
    factor: Tensor
    zero: Tensor
    codes: Tensor
    error: Tensor


_MAGNITUDES = torch.tensor(LEVELS["fp4"][:8], dtype=torch.float32)
_EDGES = (_MAGNITUDES[1:] + _MAGNITUDES[:-1]) / 2
_E4M3 = torch.arange(127, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
"""What bytes 0 to 126 mean."""
NEARBY = (-2, 4)
"""Scales that are tried for a group: so many E4M3 numbers from the one that puts its largest value on the last level. Of
equally good ones the first. Larger ones leave less error in one group of a hundred. Nothing is fitted before: with E2M1's
levels least squares, rounded to E4M3, left 0.3 dB more error."""


def fit_fp4(x: Tensor, valid: Tensor) -> Fitted4:
    """x [n, g, m] float32: n pages of g groups with a zero each; valid [m]. No level is 0, so that what is not valid must not
    be counted as an error."""
    zero = ((x * valid).sum(-1, dtype=torch.float64) / valid.sum(dtype=torch.float64)).half().float()
    size = x.shape[-1]
    padding = -size % GROUP
    y, counted = (torch.nn.functional.pad(part, (0, padding)) for part in ((x - zero[..., None]) * valid, valid))
    y, counted = y.reshape(*zero.shape, -1, GROUP), counted.view(-1, GROUP)  # [n, g, k, 32], [k, 32]
    most = y.abs().amax(-1).double() / LEVELS["fp4"][7]
    factor = _factor(most)
    start = (most / factor[:, None, None]).float().to(torch.float8_e4m3fn).view(torch.uint8).int()
    scales, least, known = torch.zeros_like(most).float(), torch.full_like(most, torch.inf), _E4M3.to(x.device)
    for away in range(*NEARBY):
        tried = known[(start + away).clamp_(0, 126)]
        step = tried * factor[:, None, None]
        error = (y - _levels4(y, step) * step[..., None]).square_().mul_(counted).sum(-1, dtype=torch.float64)
        scales, least = torch.where(error < least, tried, scales), torch.minimum(error, least)
    codes = _codes4(y, scales * factor[:, None, None])
    return Fitted4(scales, factor, zero, codes.flatten(-2)[..., :size], least.sum(-1))


def _factor(scales: Tensor) -> Tensor:
    """Scales [n, g, k] -> the power of two [n] by which the largest, and what is tried above it, come within E4M3."""
    most = scales.flatten(1).amax(-1)
    exponent = torch.ceil(torch.log2(most.clamp_min(2.0**-100) / 224.0)).clamp_(-40, 40)
    return torch.where(most > 0, torch.exp2(exponent), 1.0).float()


def recode_fp4(fitted: Fitted4, columns: Tensor, counted: Tensor, valid: Tensor) -> Tensor:
    """As `recode`, for fp4."""
    n, dim, page = columns.shape
    step = (fitted.scales * fitted.factor[:, None, None])[..., None]  # [n, D, T/32, 1]

    def code(y: Tensor) -> tuple[Tensor, Tensor]:
        codes = _codes4(y.view(n, dim, -1, GROUP), step[..., 0])
        return codes.view(n, dim, page), (_meaning4(codes) * step).view(n, dim, page)

    y = (columns - fitted.zero[..., None]) * valid
    return towards(y, counted, NUDGE4, code)


def _levels4(y: Tensor, scale: Tensor) -> Tensor:
    return _meaning4(_codes4(y, scale))


def _meaning4(codes: Tensor) -> Tensor:
    """Codes of fp4 -> float32 levels."""
    levels: Tensor = _MAGNITUDES.to(codes.device)[(codes & 7).int()] * (1 - (codes >> 3).float() * 2)
    return levels


def _codes4(y: Tensor, scale: Tensor) -> Tensor:
    """y [..., 32], scale [...] -> codes of fp4 uint8; 0 where the scale is 0."""
    step = _last(scale)
    magnitude = y.abs()
    codes = torch.zeros(y.shape, dtype=torch.uint8, device=y.device)
    for edge in _EDGES.tolist():
        codes += (magnitude > edge * step).to(torch.uint8)
    codes |= (y < 0).to(torch.uint8) << 3
    return codes.mul_((step > 0).to(torch.uint8))
