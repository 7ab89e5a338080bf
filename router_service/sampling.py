"""Logits -> token ids. A row's token is a pure function of (its logits, its params, its position) and of nothing else.

Randomness is a counter-based hash of (seed, position), so a replayed step draws the same token. The draw inverts the
cumulative distribution in one fixed order: most likely first, ties by lower id.

Letters: N rows that sample, V vocabulary, W ranked prefix, M alternatives.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from router_service.admission import SamplingParams

# Ranking this many tokens instead of V is ten times faster at V = 152k; a row that needs more is drawn again over all of V.
PREFIX = 256
_MASK = (1 << 64) - 1


@dataclass(slots=True)
class Sampled:
    """One entry per row. `logprobs` (natural, of the raw logits) and `tops` are None and [] for rows that asked for none.

    `bad` lists rows without a usable maximum (a NaN, +inf, or nothing above -inf): the model is broken there. Their id is -1.
    """

    ids: list[int]
    logprobs: list[float | None]
    tops: list[list[tuple[int, float]]]
    bad: tuple[int, ...] = ()


def _splitmix64(x: int) -> int:
    """The output function of SplitMix64 (Steele, Lea, Flood 2014) at state x + golden gamma."""
    x = (x + 0x9E3779B97F4A7C15) & _MASK
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & _MASK
    return x ^ (x >> 31)


def uniform(seed: int, position: int) -> float:
    """A number in [0, 1) with 53 random bits for the token at `position` (prompt included) of a request with `seed`."""
    return (_splitmix64(_splitmix64(_splitmix64(seed) + position)) >> 11) * 2.0**-53


def sample(logits: Tensor, params: Sequence[SamplingParams], positions: Sequence[int]) -> Sampled:
    """logits [B, V] of any float type -> one token per row. Synchronises with the host once.

    A second time when a row's distribution is so flat (or its top_k so large) that PREFIX ranked tokens do not settle it.
    """
    sampled = _attempt(logits, params, positions, PREFIX)
    again = [row for row, token in enumerate(sampled.ids) if token == _UNSETTLED]
    if again:
        wide = _attempt(logits[again], [params[r] for r in again], [positions[r] for r in again], logits.shape[1])
        for i, row in enumerate(again):
            sampled.ids[row], sampled.logprobs[row], sampled.tops[row] = wide.ids[i], wide.logprobs[i], wide.tops[i]
    return sampled


_BAD, _UNSETTLED = -1, -2


def _attempt(logits: Tensor, params: Sequence[SamplingParams], positions: Sequence[int], width: int) -> Sampled:
    best, ids = logits.max(dim=-1)  # the first of equal maxima; NaN wins
    drawing = [row for row, p in enumerate(params) if p.temperature > 0]
    asking = [row for row, p in enumerate(params) if p.top_logprobs is not None]
    settled = torch.ones_like(ids, dtype=torch.bool)
    if drawing:
        rows = torch.tensor(drawing, device=logits.device)
        knobs = [
            (p.temperature, p.top_k, p.top_p, p.min_p, uniform(p.seed, positions[row])) for row in drawing if (p := params[row])
        ]
        ids[rows], settled[rows] = _draw(logits[rows].float(), torch.tensor(knobs, dtype=torch.float64), width)
    parts = [ids.where(settled, _UNSETTLED).where(best.isfinite(), _BAD).double()]
    most = max((params[row].top_logprobs or 0 for row in asking), default=0)
    if asking:
        rows = torch.tensor(asking, device=logits.device)
        parts.append(_logprobs(logits[rows].float(), ids[rows], most).flatten())
    return _unpack(torch.cat(parts).tolist(), params, asking, min(most, logits.shape[1]))


def _unpack(flat: list[float], params: Sequence[SamplingParams], asking: list[int], most: int) -> Sampled:
    """`flat`: ids [B], then for each row of `asking`: its logprob, M ids, M logprobs."""
    count = len(params)
    ids = [int(token) for token in flat[:count]]
    bad = tuple(row for row, token in enumerate(ids) if token == _BAD)
    sampled = Sampled(ids, [None] * count, [[] for _ in range(count)], bad)
    for i, row in enumerate(asking):
        chosen, *rest = flat[count + i * (1 + 2 * most) : count + (i + 1) * (1 + 2 * most)]
        pairs = zip(map(int, rest[:most]), rest[most:], strict=True)
        sampled.logprobs[row] = chosen
        sampled.tops[row] = list(pairs)[: params[row].top_logprobs]
    return sampled


def _ranked(scores: Tensor, width: int) -> tuple[Tensor, Tensor]:
    """scores [N, V] float32 -> the `width` best (values, ids), best first, ties by lower id.

    Value and id are packed into one integer key, which makes every key distinct and the order independent of the algorithm.
    """
    vocab = scores.shape[1]
    bits = (scores + 0.0).view(torch.int32)  # + 0.0 turns -0.0 into 0.0
    ordered = bits ^ ((bits >> 31) & 0x7FFFFFFF)  # integers in the order of the floats
    keys = (ordered.long() << 32) | torch.arange(vocab - 1, -1, -1, device=scores.device)
    ids = vocab - 1 - (keys.topk(min(width, vocab)).values & 0xFFFFFFFF)
    return scores.gather(1, ids), ids


def _draw(scores: Tensor, knobs: Tensor, width: int) -> tuple[Tensor, Tensor]:
    """scores [N, V] float32, knobs [N, 5] (temperature, top_k, top_p, min_p, uniform) -> ids [N], settled [N].

    In ranked order each filter keeps a prefix, so the kept set is a count:
    top_k keeps values >= the k-th (ties stay), top_p keeps while the mass before a token is under top_p, min_p keeps
    weights >= min_p. Weights are relative to the best token, in float64, so that no temperature overflows.
    """
    temperature, top_k, top_p, min_p, chance = knobs.to(scores.device).unsqueeze(-1).unbind(1)  # [N, 1] each
    values, ids = _ranked(scores, width)
    width, everything = values.shape[1], values.shape[1] == scores.shape[1]
    best = values[:, :1].double()
    weights = ((values.double() - best) / temperature).exp()  # [N, W]
    mass = weights.cumsum(-1)
    all_mass = ((scores.double() - best) / temperature).exp_().sum(-1, keepdim=True)

    worst = values.gather(1, (top_k.long().clamp(1, width)) - 1)
    in_k = (values >= worst).sum(-1, keepdim=True).where(top_k > 0, width)
    k_known = (top_k == 0) | (in_k < width) | everything
    k_mass = mass.gather(1, in_k - 1).where(top_k > 0, all_mass)
    in_p = (mass - weights < top_p * k_mass).sum(-1, keepdim=True).where(top_p < 1, width)
    in_min = (weights >= min_p).sum(-1, keepdim=True)
    kept = torch.minimum(torch.minimum(in_k, in_p), in_min).clamp(min=1)  # NaN rows count 0

    unfiltered = (top_k == 0) & (top_p >= 1) & (min_p == 0)
    complete = (kept < width) | everything
    target = chance * mass.gather(1, kept - 1).where(complete, all_mass)
    settled = k_known & (complete | (unfiltered & (target < mass[:, -1:])))
    index = torch.minimum((mass <= target).sum(-1, keepdim=True), kept - 1)
    return ids.gather(1, index)[:, 0], settled[:, 0]


def _logprobs(logits: Tensor, ids: Tensor, most: int) -> Tensor:
    """logits [R, V] float32, ids [R] -> [R, 1 + 2M] float64: logprob of the id, the M best ids, their logprobs."""
    logprobs = logits.log_softmax(-1).double()
    _, best = _ranked(logits, most)
    return torch.cat([logprobs.gather(1, ids.unsqueeze(1)), best.double(), logprobs.gather(1, best)], dim=1)
