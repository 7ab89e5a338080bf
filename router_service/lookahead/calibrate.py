"""Probabilities of hints made with attention: walked on documents that were not trained on, compared with what was chosen."""

from __future__ import annotations

import torch
from torch import Tensor

from router_service.lookahead.heads import ATTENDED, Head, Hint, Lookahead
from router_service.lookahead.train import calibrate
from router_service.trunk import Attend

Key = tuple[int, int]  # (layer, distance)


class Walker:
    """A trunk's observer that keeps, per (layer, distance), how sure each named expert was and whether it was chosen."""

    def __init__(self, lookahead: Lookahead) -> None:
        """`lookahead` must not be calibrated with attention yet."""
        self._lookahead, self._due = lookahead, dict[int, list[tuple[Key, Hint]]]()
        self._leads: dict[Key, list[Tensor]] = {}
        self._hits: dict[Key, list[Tensor]] = {}

    def chosen(self, layer: int, x: Tensor, ids: Tensor, weights: Tensor, attend: Attend) -> None:
        """Compares what was named for this layer; names experts for later ones."""
        for key, hint in self._due.pop(layer, []):
            self._leads.setdefault(key, []).append(torch.logit(hint.probabilities.double(), eps=1e-12).float())
            self._hits.setdefault(key, []).append((hint.experts[:, :, None] == ids[:, None, :]).any(-1))
        for distance, hint in enumerate(self._lookahead.predict(layer, x, ids, weights, attend), ATTENDED + 1):
            self._due.setdefault(hint.layer, []).append(((layer, distance), hint))

    def returned(self, layer: int, x: Tensor) -> None:
        """Nothing to do."""

    def heads(self, top_k: int) -> dict[Key, tuple[Head, float]]:
        """(layer, distance) -> calibrated head, slots@k+2."""
        found = {}
        for key, leads in self._leads.items():
            hits = torch.cat(self._hits[key])
            found[key] = Head(None, *calibrate(torch.cat(leads), hits)), float(hits.sum() / (top_k * len(hits)))
        return found
