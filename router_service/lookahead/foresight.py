"""Between two steps: which experts every layer of the next one will choose, before it begins.

A step's token is chosen a good while before the next step runs its first layer: events are handed out, the next batch is
planned and laid out, and on a CPU all threads but one have nothing to do. What is known then is the token and the residual
that chose it. One linear map of both, fitted by least squares to what the layers chose (0 or 1), is as good at naming as a
gate that is seen from one layer before it, and what it gives are chances already:

    chances [T, L E] = [unit(embedding of the token), unit(residual behind the last layer, one position before)] weight + offset

Letters: N rows of the trace, T rows, H hidden, L MoE layers, E experts, K top-k.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import rms_norm

from router_service.lookahead.record import Trace
from router_service.trunk import Trunk

EXTRA = 2  # as heads.EXTRA
PIECE = 8192  # rows
RIDGES = (1e-3, 1e-2, 1e-1)  # times the mean square of an input; the one that serves rows kept aside best
MOST_INPUTS = 4096
"""Wider models have none: their normal equations would take more memory than their weights are worth."""


@dataclass(frozen=True)
class Foresight:
    """The map. `recall`: share of the true top-k among the K + 2 likeliest of a layer, on documents kept aside."""

    weight: Tensor  # [2H, L E]
    offset: Tensor  # [L E]
    recall: float

    def chances(self, inputs: Tensor) -> Tensor:
        """inputs [T, 2H] -> [T, L E], not cut to 0 .. 1."""
        return torch.addmm(self.offset, inputs, self.weight)


def inputs(embedded: Tensor, behind: Tensor, eps: float) -> Tensor:
    """Rows of the embedding and residuals behind the last layer, [T, H] each -> [T, 2H]."""
    return torch.cat([rms_norm(part, part.shape[-1:], None, eps) for part in (embedded, behind)], dim=-1)


def possible(trunk: Trunk) -> bool:
    """Whether the model's last layer has experts, so that its trace holds what comes out, and inputs are not too many."""
    spec = trunk.spec
    return spec.moe_layers[-1] == spec.layers - 1 and 2 * spec.hidden_size <= MOST_INPUTS


@torch.inference_mode()
def fit(trunk: Trunk, trace: Trace) -> Foresight | None:
    """Least squares over the trace's rows that follow another. None where it is not `possible` or there are no such rows."""
    rows = torch.nonzero(trace.follows[: trace.rows]).flatten()
    aside = trace.held_in[rows]
    if not possible(trunk) or not 0 < int(aside.sum()) < len(rows):
        return None
    size, outputs = 2 * trunk.spec.hidden_size + 1, len(trunk.spec.moe_layers) * trunk.spec.num_experts
    square, moment = (torch.zeros(size, n, dtype=torch.float64, device=rows.device) for n in (size, outputs))
    for seen, chosen in _pieces(trunk, trace, rows[~aside]):
        known = torch.cat((seen, torch.ones_like(seen[:, :1])), 1).double()
        square += known.T @ known
        moment += known.T @ chosen.double()
    found = (_solved(square, moment, ridge) for ridge in RIDGES)
    return max((_scored(one, trunk, trace, rows[aside]) for one in found), key=lambda one: one.recall)


def _solved(square: Tensor, moment: Tensor, ridge: float) -> Foresight:
    damping = square.diagonal().mean() * ridge * torch.ones(len(square), dtype=square.dtype, device=square.device)
    damping[-1] = 0.0  # the offset is free
    both = torch.linalg.solve(square + damping.diag(), moment).float()
    return Foresight(both[:-1].contiguous(), both[-1].contiguous(), 0.0)


def _scored(one: Foresight, trunk: Trunk, trace: Trace, rows: Tensor) -> Foresight:
    shape = len(trunk.spec.moe_layers), trunk.spec.num_experts
    named, hits = min(trunk.spec.top_k + EXTRA, shape[1]), 0.0
    for known, chosen in _pieces(trunk, trace, rows):
        best = one.chances(known).view(-1, *shape).topk(named).indices
        hits += float(chosen.view(-1, *shape).gather(2, best).sum())
    return Foresight(one.weight, one.offset, hits / (len(rows) * shape[0] * trunk.spec.top_k))


def _pieces(trunk: Trunk, trace: Trace, rows: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """inputs [n, 2H] and whether experts were chosen [n, L E], of some rows at a time."""
    spec = trunk.spec
    for at in range(0, len(rows), PIECE):
        now = rows[at : at + PIECE]
        embedded = trunk.embedding[trace.tokens[now]].float()
        behind = trace.after[spec.moe_layers[-1]][now - 1].float()
        ids = torch.stack([trace.ids[layer][now].long() for layer in spec.moe_layers], dim=1)  # [n, L, K]
        chosen = torch.zeros(len(now), len(spec.moe_layers), spec.num_experts, device=ids.device).scatter_(2, ids, 1.0)
        yield inputs(embedded, behind, spec.rms_eps), chosen.flatten(1)
