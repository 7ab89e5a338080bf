"""Heads from a trace: a correction per (layer, distance), kept where it beats tier 0 on documents that were not trained on.

Letters: N rows of the trace, B batch, H hidden, E experts, K top-k, F features, R rank.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from router_service.lookahead.estimate import Estimator
from router_service.lookahead.heads import EXTRA, REFINED, Correction, Head
from router_service.lookahead.record import Trace
from router_service.trunk import Trunk

PIECE = 8192  # rows of the trace that are worked on at once


@dataclass(frozen=True)
class Options:
    """How a head is trained.

    rank: width of the correction; its size on disk and its time grow with it.
    epochs, batch, rate: passes over the trace, rows per update, peak learning rate of AdamW under a one-cycle schedule.
    """

    rank: int = 64
    epochs: int = 8
    batch: int = 1024
    rate: float = 3e-3
    decay: float = 0.01
    seed: int = 1


@dataclass(frozen=True)
class Task:
    """One head's data, all [N, ...] in float16: features, tier 0's logits and the true ones; `member` marks the true top-k."""

    features: Tensor
    base: Tensor
    truth: Tensor
    member: Tensor  # [N, E] bool
    held_in: Tensor  # [N] bool
    top_k: int

    def recall(self, logits: Tensor) -> float:
        """slots@k+2 of logits for the held-in rows [N', E]."""
        named = logits.topk(min(self.top_k + EXTRA, logits.shape[1])).indices
        return float(self.member[self.held_in].gather(1, named).sum() / (self.top_k * len(named)))


class Tasks:
    """Everything that can be learned from one trace."""

    def __init__(self, trunk: Trunk, trace: Trace, outputs: dict[int, Tensor]) -> None:
        self.trunk, self.trace, self.estimator = trunk, trace, Estimator(trunk, outputs)

    def keys(self) -> Iterator[tuple[int, int, int]]:
        """(layer, distance, layer that is looked ahead to) of every head."""
        moe = self.trunk.spec.moe_layers
        for place, layer in enumerate(moe):
            for distance, target in enumerate(moe[place + 1 : place + 3], 1):
                yield layer, distance, target
            if place + 1 < len(moe):
                yield layer, REFINED, moe[place + 1]

    @torch.inference_mode()
    def task(self, layer: int, distance: int, target: int) -> Task:
        """The data of one head."""
        rows, trace, experts = self.trace.rows, self.trace, self.trunk.spec.num_experts
        pieces = [slice(at, min(at + PIECE, rows)) for at in range(0, rows, PIECE)]
        parts = zip(*(self._piece(layer, distance, target, piece) for piece in pieces), strict=True)
        features, base, truth = (torch.cat([part.to(torch.float16) for part in column]) for column in parts)
        member = torch.zeros(rows, experts, dtype=torch.bool, device=base.device)
        member.scatter_(1, trace.ids[target][:rows].long(), True)
        return Task(features, base, truth, member, trace.held_in[:rows], self.trunk.spec.top_k)

    def _piece(self, layer: int, distance: int, target: int, rows: slice) -> tuple[Tensor, Tensor, Tensor]:
        """features [n, F], tier 0's logits [n, E], true logits [n, E] of some rows."""
        trace, look, like = self.trace, self.estimator, self.trunk.embedding
        truth = look.logits(target, trace.x[target][rows].to(like))
        if distance == REFINED:
            first = estimate = look.between(layer, target, trace.after[layer][rows].to(like))
            return look.unit(first), look.logits(target, estimate), truth
        x, ids, weights = trace.x[layer][rows].to(like), trace.ids[layer][rows].long(), trace.weights[layer][rows].float()
        moe = self.trunk.spec.moe_layers
        first = look.between(layer, moe[moe.index(layer) + 1], look.behind(layer, x, ids, weights))
        estimate = first if distance == 1 else look.between(moe[moe.index(target) - 1], target, first)
        return look.features(x, first, ids, weights), look.logits(target, estimate), truth


def train_head(task: Task, options: Options) -> tuple[Head, float]:
    """The better of tier 0 and a trained correction, calibrated, and its slots@k+2 on the held-in rows."""
    held = task.held_in
    base = task.base[held].float()
    correction = fit(task, options)
    corrected = base + _in_pieces(correction, task.features[held])
    if task.recall(corrected) > task.recall(base):
        return Head(correction, *calibrate(corrected, task.member[held], task.top_k)), task.recall(corrected)
    return Head(None, *calibrate(base, task.member[held], task.top_k)), task.recall(base)


def zero(features: int, experts: int, rank: int, device: torch.device, seed: int = 1) -> Correction:
    """A correction that corrects nothing yet."""
    draw = torch.Generator().manual_seed(seed)
    down = torch.randn(rank, features, generator=draw).to(device) / features**0.5
    return Correction(
        *(down, torch.zeros(rank, device=device)),
        *(torch.zeros(experts, rank, device=device), torch.zeros(experts, device=device)),
    )


def fit(task: Task, options: Options) -> Correction:
    """Trains on the rows that are not held in."""
    rows = (~task.held_in).nonzero()[:, 0]
    correction = zero(task.features.shape[1], task.base.shape[1], options.rank, task.base.device, options.seed)
    parameters = [part.requires_grad_() for part in vars(correction).values()]
    batch = min(options.batch, len(rows))
    steps = options.epochs * (len(rows) // batch)
    optimizer = torch.optim.AdamW(parameters, options.rate, weight_decay=options.decay)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, options.rate, total_steps=max(steps, 2), pct_start=0.1)
    draw = torch.Generator().manual_seed(options.seed)
    for _ in range(options.epochs):
        for part in rows[torch.randperm(len(rows), generator=draw).to(rows.device)].split(batch):  # type: ignore[no-untyped-call]
            if len(part) < batch:
                continue
            logits = task.base[part].float() + correction(task.features[part].float())
            optimizer.zero_grad()
            loss(logits, task.truth[part].float(), task.member[part], task.top_k).backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            schedule.step()
    return Correction(*(part.detach() for part in parameters))


def loss(logits: Tensor, truth: Tensor, member: Tensor, top_k: int) -> Tensor:
    """KL to the router's softmax, plus cross-entropy of being in the top-k on each expert's lead over the row's threshold."""
    divergence = functional.kl_div(logits.log_softmax(-1), truth.log_softmax(-1), log_target=True, reduction="batchmean")
    ranking = functional.binary_cross_entropy_with_logits(2.0 * lead(logits, top_k), member.float())
    return divergence + 8.0 * ranking


def lead(logits: Tensor, top_k: int) -> Tensor:
    """Logits relative to the point midway between a row's K-th and next one [.., E]."""
    edge = logits.topk(min(top_k + 1, logits.shape[-1])).values[..., top_k - 1 :].mean(-1, keepdim=True)
    return logits - edge


@torch.no_grad()
def _in_pieces(correction: Correction, features: Tensor) -> Tensor:
    return torch.cat([correction(piece.float()) for piece in features.split(PIECE)])  # type: ignore[no-untyped-call]


def calibrate(logits: Tensor, member: Tensor, top_k: int) -> tuple[float, float]:
    """Scale and shift under which sigmoid(scale * lead + shift) is the chance of being chosen, for the M named of each row."""
    best, ids = logits.topk(min(top_k + EXTRA, logits.shape[1]))
    leads, hit = lead(best, top_k), member.gather(1, ids).float()
    knobs = torch.tensor([1.0, 0.0], device=logits.device, requires_grad=True)
    optimizer = torch.optim.LBFGS([knobs], max_iter=50, line_search_fn="strong_wolfe")

    def closure() -> Tensor:
        optimizer.zero_grad()
        value = functional.binary_cross_entropy_with_logits(knobs[0] * leads + knobs[1], hit)
        value = value + 1e-4 * knobs.square().sum()  # rows that are always right would push the scale to infinity
        value.backward()  # type: ignore[no-untyped-call]
        return value

    optimizer.step(closure)  # type: ignore[no-untyped-call]
    scale, shift = knobs.tolist()
    return scale, shift
