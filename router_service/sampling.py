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

from forefetch.device import upload
from forefetch.kernels.argmax import argmax
from router_service.admission import SamplingParams

# How many tokens are ranked at first, and next for the rows that this did not settle; at last all of V. Milliseconds per row
# on a CPU core at V = 152k: 0.5 for 256, 3 for 4,096, 18 for V.
WIDTHS = (256, 4096)
_MASK = (1 << 64) - 1


@dataclass(slots=True)
class Sampled:
    """One entry per row. `logprobs` (natural, of the raw logits) and `tops` are None and [] for rows that asked for none.

    `bad` lists rows without a usable maximum (a NaN, +inf, or nothing above -inf): the model is broken there. Their id is -1.
    `late` lists rows that the device alone did not settle: there `Choice.ids` held another token, or might have.
    """

    ids: list[int]
    logprobs: list[float | None]
    tops: list[list[tuple[int, float]]]
    bad: tuple[int, ...] = ()
    late: tuple[int, ...] = ()


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

    Again for rows whose distribution is so flat (or top_k so large) that the first of WIDTHS does not settle them.
    """
    return choose(logits, params, positions).read()


def choose(
    logits: Tensor, params: Sequence[SamplingParams], positions: Sequence[int], *, into: tuple[Tensor, Tensor] | None = None
) -> Choice:
    """`sample` without waiting for the device. `into`, for a step whose logits will be overwritten before the choice is read:
    int64 [>= B] on the device where `Choice.ids` go, and [>= B] on the host, pinned, the choice's own until it is read."""
    attempt, keep = _attempt(logits, params, positions, WIDTHS[0], into), into is not None
    doubtful = any(p.temperature > 0 or p.top_logprobs is not None for p in params)
    if keep and doubtful:
        logits = logits.clone()
    return Choice(attempt, logits, params, positions)


_BAD, _UNSETTLED = -1, -2


@dataclass(frozen=True, slots=True)
class _Attempt:
    """ids [B] int64, valid in every row; told: ids or _BAD or _UNSETTLED [B], then the tables of rows `asking`, M = `most`.
    `landed`: told is host memory, and there when the device has come so far."""

    ids: Tensor
    told: Tensor
    asking: list[int]
    most: int
    landed: bool = False


class Choice:
    """Tokens that are chosen on the device and on their way to the host. `ids` [B] int64 on the device: any token in rows
    that will turn out bad or late."""

    def __init__(self, attempt: _Attempt, logits: Tensor, params: Sequence[SamplingParams], positions: Sequence[int]) -> None:
        self.ids = attempt.ids
        self._attempt, self._logits, self._params, self._positions = attempt, logits, params, positions
        self._told, self._ready = attempt.told, None
        if logits.is_cuda:
            if not attempt.landed:
                self._told = torch.empty(attempt.told.shape, dtype=attempt.told.dtype, pin_memory=True)
                self._told.copy_(attempt.told, non_blocking=True)
            self._ready = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._ready.record()

    def read(self) -> Sampled:
        """Waits for the device. Rows that need it are looked at again, wider."""
        if self._ready is not None:
            self._ready.synchronize()
        sampled = _unpack(self._told.tolist(), self._params, self._attempt)
        sampled.late = tuple(row for row, token in enumerate(sampled.ids) if token == _UNSETTLED)
        for width in (*WIDTHS[1:], self._logits.shape[1]):
            again = [row for row, token in enumerate(sampled.ids) if token == _UNSETTLED]
            if not again:
                break
            params, positions = [self._params[r] for r in again], [self._positions[r] for r in again]
            attempt = _attempt(self._logits[again], params, positions, width)
            wider = _unpack(attempt.told.tolist(), params, attempt)
            for i, row in enumerate(again):
                sampled.ids[row], sampled.logprobs[row], sampled.tops[row] = wider.ids[i], wider.logprobs[i], wider.tops[i]
        return sampled


def _attempt(
    logits: Tensor,
    params: Sequence[SamplingParams],
    positions: Sequence[int],
    width: int,
    into: tuple[Tensor, Tensor] | None = None,
) -> _Attempt:
    drawing = [row for row, p in enumerate(params) if p.temperature > 0]
    asking = [row for row, p in enumerate(params) if p.top_logprobs is not None]
    if into is not None and not drawing and not asking:
        best = argmax(logits, into)
        return _Attempt(into[0][: len(best)], best, asking, 0, landed=True)
    best = argmax(logits)
    ids = best.clamp_min(0) if into is None else torch.clamp(best, min=0, out=into[0][: len(best)])
    if not drawing and not asking:
        return _Attempt(ids, best, asking, 0)
    most = min(max((params[row].top_logprobs or 0 for row in asking), default=0), logits.shape[1])
    settled = torch.ones_like(ids, dtype=torch.bool)
    if drawing:
        rows = upload(torch.tensor(drawing), logits.device)
        knobs = upload(_knobs(drawing, params, positions), logits.device)
        top_k_only = all(params[row].top_k for row in drawing)
        ids[rows], settled[rows] = _draw(logits[rows].float(), knobs, width, needs_whole=not top_k_only)
    tables: list[Tensor] = []
    if asking:
        rows = upload(torch.tensor(asking), logits.device)
        table, known = _logprobs(logits[rows].float(), ids[rows], most, width)
        settled[rows] &= known
        tables.append(table.flatten())
    told = ids.where(settled, _UNSETTLED).where(best >= 0, _BAD)
    return _Attempt(ids, torch.cat([told.double(), *tables]), asking, most)


def _knobs(rows: list[int], params: Sequence[SamplingParams], positions: Sequence[int]) -> Tensor:
    """What `_draw` needs of each row, on the host."""
    chosen = [(params[row], uniform(params[row].seed, positions[row])) for row in rows]
    return torch.tensor([(p.temperature, p.top_k, p.top_p, p.min_p, chance) for p, chance in chosen], dtype=torch.float64)


def _unpack(flat: list[float], params: Sequence[SamplingParams], attempt: _Attempt) -> Sampled:
    """`flat`: ids [B], then for each row of `asking`: its logprob, M ids, M logprobs."""
    count, most = len(params), attempt.most
    ids = [int(token) for token in flat[:count]]
    bad = tuple(row for row, token in enumerate(ids) if token == _BAD)
    sampled = Sampled(ids, [None] * count, [[] for _ in range(count)], bad)
    for i, row in enumerate(attempt.asking):
        chosen, *rest = flat[count + i * (1 + 2 * most) : count + (i + 1) * (1 + 2 * most)]
        pairs = zip(map(int, rest[:most]), rest[most:], strict=True)
        sampled.logprobs[row] = chosen
        sampled.tops[row] = list(pairs)[: params[row].top_logprobs]
    return sampled


def _ranked(scores: Tensor, width: int) -> tuple[Tensor, Tensor, Tensor]:
    """scores [N, V] -> the `width` best (values, ids), best first, ties by lower id; how many of the ids are certain [N, 1].

    All of them when width is V. Else which of the tokens equal to the last value were taken is chance.
    """
    if width >= scores.shape[1]:
        values, ids = scores.sort(dim=-1, descending=True, stable=True)
        return values, ids, ids.new_full((len(ids), 1), scores.shape[1])
    ids = scores.topk(width).indices.sort().values
    values, order = scores.gather(1, ids).sort(dim=-1, descending=True, stable=True)
    return values, ids.gather(1, order), (values > values[:, -1:]).sum(-1, keepdim=True)


def _draw(scores: Tensor, knobs: Tensor, width: int, *, needs_whole: bool) -> tuple[Tensor, Tensor]:
    """scores [N, V] float32, knobs [N, 5] (temperature, top_k, top_p, min_p, uniform) -> ids [N], settled [N].

    In ranked order each filter keeps a prefix, so the kept set is a count:
    top_k keeps values >= the k-th (ties stay), top_p keeps while the mass before a token is under top_p, min_p keeps
    weights >= min_p. Weights are relative to the best token, in float64, so that no temperature overflows. `needs_whole`: some
    row has no top_k, so the mass of the whole vocabulary is needed.
    """
    temperature, top_k, top_p, min_p, chance = knobs.unsqueeze(-1).unbind(1)  # [N, 1] each
    values, ids, certain = _ranked(scores, width)
    width, everything = values.shape[1], values.shape[1] == scores.shape[1]
    best = values[:, :1].double()
    weights = ((values.double() - best) / temperature).exp()  # [N, W]
    mass = weights.cumsum(-1)
    whole = ((scores.double() - best) / temperature).exp_().sum(-1, keepdim=True) if needs_whole else mass[:, -1:]

    worst = values.gather(1, top_k.long().clamp(1, width) - 1)
    in_k = (values >= worst).sum(-1, keepdim=True).where(top_k > 0, width)
    k_mass = mass.gather(1, in_k - 1).where(top_k > 0, whole)
    in_p = (mass - weights < top_p * k_mass).sum(-1, keepdim=True).where(top_p < 1, width)
    in_min = (weights >= min_p).sum(-1, keepdim=True)
    kept = torch.minimum(torch.minimum(in_k, in_p), in_min).clamp(min=1)  # rows with NaN count 0

    complete = (kept < width) | everything
    target = chance * mass.gather(1, kept - 1).where(complete, whole)
    index = torch.minimum((mass <= target).sum(-1, keepdim=True), kept - 1)
    k_known = (top_k == 0) | (in_k < width) | everything
    unfiltered = (top_k == 0) & (top_p >= 1) & (min_p == 0)
    settled = k_known & (complete | (unfiltered & (target < mass[:, -1:]))) & (index < certain)
    return ids.gather(1, index)[:, 0], settled[:, 0]


def _logprobs(logits: Tensor, ids: Tensor, most: int, width: int) -> tuple[Tensor, Tensor]:
    """logits [R, V] float32, ids [R] -> [R, 1 + 2M] float64: logprob of the id, the M best ids, their logprobs; certain [R]."""
    logprobs = logits.log_softmax(-1).double()
    _, best, certain = _ranked(logits, width)
    best = best[:, :most]
    table = torch.cat([logprobs.gather(1, ids.unsqueeze(1)), best.double(), logprobs.gather(1, best)], dim=1)
    return table, certain[:, 0] >= most
