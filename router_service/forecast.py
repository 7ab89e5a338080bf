"""What a step will need of a later layer, out of what heads say about its rows. Pure: numbers in, numbers out.

Letters: T rows, M experts named per row, E experts, R rows that are looked at.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]
Sure = npt.NDArray[np.float32] | Floats

FLOOR = 0.1
"""A named expert less likely than this is not worth its bytes; benchmarks/LOG.md has what the cut costs."""

MOST_ROWS = 64
"""Rows of a step that are looked at. A step with more has a prompt in it, whose neighbours ask for much the same."""

_SURE = 1.0 - 1e-9  # log(1 - p) stays finite
_WEIGHT = 0.25  # of the newest duration in a running mean


def likeliest(experts: Ints, probabilities: Sure, count: int, floor: float = FLOOR) -> tuple[Ints, Floats]:
    """Experts [T, M] that heads name and how sure they are [T, M] -> those worth naming, likeliest first, and their chances.

    One row, the commonest case, needs no arithmetic, and for ten numbers plain lists are quickest.
    """
    if len(experts) != 1:
        chance = chances(experts, probabilities, count)
        names = shortlist(chance, floor)
        return names, chance[names]
    row = zip(experts[0].tolist(), probabilities[0].tolist(), strict=True)
    usable = sorted(((min(p, _SURE), e) for e, p in row if 0 <= e < count and p >= floor), key=_chance)  # NaN is not greater
    found = {expert: chance for chance, expert in usable}
    return np.array(list(found), dtype=np.int64), np.array(list(found.values()), dtype=np.float64)


def _chance(pair: tuple[float, int]) -> float:
    return -pair[0]


def chances(experts: Ints, probabilities: Sure, count: int) -> Floats:
    """Experts [T, M] that heads name and how sure they are [T, M] -> [E] chance that at least one row chooses the expert.

    Rows are taken as independent: 1 - prod(1 - p). Whatever heads make up, numbers come out: an expert that does not exist or a
    probability that is not a number counts as not named.
    """
    usable = (experts >= 0) & (experts < count) & (probabilities > 0.0)  # NaN is not greater
    missed = np.log1p(-np.minimum(probabilities[usable].astype(np.float64), _SURE))
    return -np.expm1(np.bincount(experts[usable], weights=missed, minlength=count))


def shortlist(chance: Floats, floor: float = FLOOR) -> Ints:
    """Chances [E] -> the experts worth naming, likeliest first; of equals the one with the lower number."""
    names = np.flatnonzero(chance >= floor)
    return names[np.argsort(-chance[names], kind="stable")]


def looked_at(decodes: int, tokens: int, most: int = MOST_ROWS) -> Ints | None:
    """Which of a step's rows to look at: every decoding one, then prompt rows evenly spread, `most` in all. None: all."""
    if tokens <= most:
        return None
    first = min(decodes, most)
    left = min(most - first, tokens - decodes)
    spread = decodes + (np.arange(left) * (tokens - decodes)) // max(left, 1)
    return np.concatenate((np.arange(first), spread))


class Pace:
    """How long until a later layer's gate, as recent steps took. Running means, for steps with and without prompts apart.

    Time comes in as numbers, nanoseconds of any monotonic clock.
    """

    def __init__(self, layers: Sequence[int]) -> None:
        """`layers`: those with routed experts, ascending."""
        self._before = dict(zip(layers[1:], layers, strict=False))
        self._spans: dict[tuple[bool, int, bool], float] = {}  # (prompts, layer, from behind it) -> ns to the next gate
        self._last: dict[bool, tuple[int, int]] = {}  # from behind a layer or not -> (layer, when)
        self._prompts = False

    def begin(self, prompts: bool) -> None:
        """A step starts; `prompts`: it computes prompt tokens."""
        self._prompts = prompts
        self._last.clear()

    def gate(self, layer: int, now: int) -> None:
        """The layer's gate has chosen."""
        for behind, (before, since) in self._last.items():
            if self._before.get(layer) == before:
                self._learn((self._prompts, before, behind), now - since)
        self._last = {False: (layer, now)}

    def returned(self, layer: int, now: int) -> None:
        """The layer's experts are back."""
        self._last[True] = (layer, now)

    def window(self, target: int, now: int) -> int:
        """Nanoseconds until the gate of `target`, a layer ahead; 0 when it is due or when nothing is known yet."""
        behind = True in self._last
        if not self._last:
            return 0
        layer, since = self._last[behind]
        spans = []
        at = target
        while at != layer:
            at = self._before.get(at, layer)
            spans.append(self._spans.get((self._prompts, at, behind and at == layer)))
        if not spans or None in spans:
            return 0
        return max(0, int(sum(filter(None, spans))) - (now - since))

    def _learn(self, key: tuple[bool, int, bool], duration: int) -> None:
        before = self._spans.get(key)
        self._spans[key] = float(duration) if before is None else before + _WEIGHT * (duration - before)


class Trial:
    """Which of several ways costs least, found by trying: each for a few steps, then the best for many, then all again."""

    def __init__(self, ways: Sequence[str], *, tried: int = 8, ignored: int = 2, kept: int = 1024) -> None:
        """`tried`: steps of each way, of which the first `ignored` still pay for the way before; `kept`: steps of the best."""
        self._ways, self._tried, self._ignored, self._kept = tuple(ways), tried, ignored, kept
        self._costs: dict[str, float] = {}
        self._seen, self._sum = 0, 0.0
        self.way = self._ways[0]

    def learn(self, cost: float) -> None:
        """What a step in `way` cost; afterwards `way` is that of the next one. Whatever the ways are to be compared by."""
        self._seen += 1
        if len(self._costs) == len(self._ways):  # the best one is running
            if self._seen >= self._kept:
                self._costs.clear()
                self._go_on(self._ways[0])
            return
        if self._seen > self._ignored:
            self._sum += cost
        if self._seen >= self._tried:
            self._costs[self.way] = self._sum / (self._tried - self._ignored)
            left = [way for way in self._ways if way not in self._costs]
            self._go_on(left[0] if left else min(self._ways, key=self._costs.__getitem__))

    def _go_on(self, way: str) -> None:
        self.way, self._seen, self._sum = way, 0, 0.0
