"""How good hints are: a trunk's observer that makes them as a router would and compares them with the true choice.

slots@m: share of the true top-k among the m experts named first. whole_set: share of tokens whose true top-k were all among the
k + 2 named. Both averaged over tokens, then over the layers that can be looked ahead to. Letters: T rows, E experts, K top-k.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.nn.functional import linear

from router_service.lookahead.estimate import Estimator
from router_service.lookahead.heads import EXTRA, Hint, Lookahead
from router_service.lookahead.store import Trained
from router_service.trunk import Attend, Trunk

NEXT, SECOND, REFINED, CONTROL = "L+1", "L+2", "L+1 refined", "control"
METRICS = ("slots@k", "slots@k+2", "whole_set")
HEADS, NO_ATTENTION = "lookahead", "without attention"
TIER0_ATTENDED, TIER0, NO_OUTPUTS = "tier 0 with attention", "tier 0", "tier 0 without outputs"
NEXT_GATE, PREVIOUS, HOT = "next gate", "previous token", "hot list"
METHODS = (HEADS, NO_ATTENTION, TIER0_ATTENDED, TIER0, NO_OUTPUTS, NEXT_GATE, PREVIOUS, HOT)

Row = dict[str, float]
Key = tuple[str, str, int]  # method, distance, layer that was looked ahead to


@dataclass
class Scores:
    """Sums over rows, by method, distance and layer."""

    top_k: int
    sums: dict[Key, Tensor] = field(default_factory=dict)
    rows: dict[Key, int] = field(default_factory=dict)

    def add(self, key: Key, named: Tensor, truth: Tensor) -> None:
        """named [T, M], likeliest first, against the true choice [T, K]."""
        hit = (named[:, :, None] == truth[:, None, :]).any(-1)  # [T, M]
        count = hit.sum(-1)
        parts = (hit[:, : self.top_k].sum() / self.top_k, count.sum() / self.top_k, (count == self.top_k).sum())
        self.sums[key] = self.sums.get(key, 0.0) + torch.stack([part.double() for part in parts]).cpu()
        self.rows[key] = self.rows.get(key, 0) + len(named)

    def layer(self, key: Key) -> Row:
        """The three shares of one layer."""
        return dict(zip(METRICS, (self.sums[key] / self.rows[key]).tolist(), strict=True))

    def layers(self, method: str, distance: str) -> dict[int, Row]:
        """Layer -> its shares."""
        return {key[2]: self.layer(key) for key in sorted(self.sums) if key[:2] == (method, distance)}

    def mean(self, method: str, distance: str) -> Row:
        """Averaged over layers; empty when nothing was scored."""
        found = self.layers(method, distance).values()
        return {metric: sum(row[metric] for row in found) / len(found) for metric in METRICS} if found else {}


class Evaluator:
    """Scores hints and every baseline on the rows that pass, one token of each sequence at a time, longest sequence first."""

    def __init__(self, trunk: Trunk, trained: Trained) -> None:
        spec = trunk.spec
        self.scores, self._trunk, self._moe = Scores(spec.top_k), trunk, spec.moe_layers
        self._named = min(spec.top_k + EXTRA, spec.num_experts)
        self._plain, self._hot = Estimator(trunk, {}), _hot(trained.load, self._named, trunk.embedding.device)
        means = Estimator(trunk, trained.outputs)
        self._full, self._tier0, self._bare = trained.on(trunk), Lookahead(trunk, means, {}), Lookahead(trunk, self._plain, {})
        self._due: dict[int, list[tuple[str, str, Tensor]]] = {}
        self._before: dict[int, Tensor] = {}

    def begin(self) -> None:
        """Other sequences follow, from their first token."""
        self._due, self._before = {}, {}

    def chosen(self, layer: int, x: Tensor, ids: Tensor, weights: Tensor, attend: Attend) -> None:
        """Scores what was named for this layer; names experts for later ones."""
        own = self._plain.logits(layer, x)
        self.scores.add((CONTROL, CONTROL, layer), own.topk(self._trunk.spec.top_k).indices, ids)
        for method, distance, named in self._due.pop(layer, []):
            self.scores.add((method, distance, layer), named, ids)
        place = self._moe.index(layer)
        hot = self._hot[layer].expand(len(ids), -1)
        for distance in (NEXT, SECOND)[:place]:
            self.scores.add((PREVIOUS, distance, layer), self._before.get(layer, hot)[: len(ids)], ids)
            self.scores.add((HOT, distance, layer), hot, ids)
        self._before[layer] = own.topk(self._named).indices
        self._expect(HEADS, self._full.predict(layer, x, ids, weights, attend))
        self._expect(NO_ATTENTION, self._full.predict(layer, x, ids, weights))
        self._expect(TIER0_ATTENDED, self._tier0.predict(layer, x, ids, weights, attend))
        self._expect(TIER0, self._tier0.predict(layer, x, ids, weights))
        self._expect(NO_OUTPUTS, self._bare.predict(layer, x, ids, weights))
        self._next_gate(layer, self._plain.normed(layer, x))

    def returned(self, layer: int, x: Tensor) -> None:
        """Names the next layer's experts again."""
        for method, lookahead in ((HEADS, self._full), (TIER0, self._tier0)):
            hint = lookahead.refine(layer, x)
            if hint is not None:
                self._due.setdefault(hint.layer, []).append((method, REFINED, hint.experts))

    def _next_gate(self, layer: int, h: Tensor) -> None:
        """The later layers' gates, as they are, on this gate's input h [T, H]."""
        for distance, target in zip((NEXT, SECOND), self._full.targets[layer], strict=False):
            gate = self._trunk.layers[target].gate
            assert gate is not None
            self._due.setdefault(target, []).append((NEXT_GATE, distance, linear(h, gate).topk(self._named).indices))

    def _expect(self, method: str, hints: Sequence[Hint]) -> None:
        for distance, hint in zip((NEXT, SECOND), hints, strict=False):
            self._due.setdefault(hint.layer, []).append((method, distance, hint.experts))


def _hot(load: Mapping[int, Tensor], named: int, device: torch.device) -> dict[int, Tensor]:
    return {layer: share.topk(named).indices.to(device) for layer, share in load.items()}


def report(scores: Scores) -> dict[str, object]:
    """One domain's part of the JSON answer: the heads by distance, then `layers`, `baselines` and the control."""
    distances = (NEXT, SECOND, REFINED)
    answer: dict[str, object] = {distance: scores.mean(HEADS, distance) for distance in distances}
    answer["layers"] = {d: {str(layer): row for layer, row in scores.layers(HEADS, d).items()} for d in distances}
    answer["baselines"] = {
        method: {d: row for d in distances if (row := scores.mean(method, d))} for method in METHODS if method != HEADS
    }
    answer["control"] = scores.mean(CONTROL, CONTROL).get("slots@k")
    return answer
