"""What is learned from a trace: a sketch of each layer's experts, and a correction per (layer, distance) where it helps.

A correction is kept where it beats tier 0 on documents that were not trained on. Letters: N rows of the trace, B batch,
H hidden, E experts, K top-k, F features, R rank.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from forefetch.kernels.grouped_mlp import SlotWeights
from router_service.lookahead.descent import descend
from router_service.lookahead.estimate import Estimator, Network
from router_service.lookahead.heads import EXTRA, REFINED, Head
from router_service.lookahead.record import Trace
from router_service.lookahead.sketch import Sketch, copied
from router_service.trunk import Trunk

PIECE = 8192  # rows of the trace that are worked on at once
SAMPLE = 16_384  # rows by which the units of a sketch are chosen
RESIDUAL, MEMBERSHIP = 10.0, 1.0  # weights in a sketch's loss; benchmarks/LOG.md has what others do


@dataclass(frozen=True)
class Options:
    """How networks are trained.

    distilled, rank: widths of the sketches and of the corrections; size on disk and time grow with them. 0: none.
    epochs, head_epochs: passes over the trace for sketches and for corrections, which learn little more after a few.
    batch, rate, decay: rows per update, peak learning rate and weight decay of AdamW; the rate rises and falls once.
    """

    distilled: int = 576
    rank: int = 32
    epochs: int = 12
    head_epochs: int = 4
    batch: int = 512
    rate: float = 4e-3
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

    def __init__(self, trunk: Trunk, trace: Trace, estimator: Estimator) -> None:
        self.trunk, self.trace, self.estimator = trunk, trace, estimator

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
            first = estimate = look.reach(layer, target, trace.after[layer][rows].to(like))
            return look.unit(first), look.logits(target, estimate), truth
        x, ids, weights = trace.x[layer][rows].to(like), trace.ids[layer][rows].long(), trace.weights[layer][rows].float()
        moe = self.trunk.spec.moe_layers
        first = look.reach(layer, moe[moe.index(layer) + 1], look.behind(layer, x, ids, weights))
        estimate = first if distance == 1 else look.reach(moe[moe.index(target) - 1], target, first)
        return look.features(x, first, ids, weights), look.logits(target, estimate), truth


def train_head(task: Task, options: Options) -> tuple[Head, float]:
    """The better of tier 0 and a trained correction, calibrated, and its slots@k+2 on the held-in rows."""
    held = task.held_in
    found: Network | None = None
    logits = task.base[held].float()
    if options.rank:
        correction = fit_correction(task, options)
        corrected = logits + _in_pieces(correction, task.features[held])
        if task.recall(corrected) > task.recall(logits):
            found, logits = correction, corrected
    best, ids = logits.topk(min(task.top_k + EXTRA, logits.shape[1]))
    return Head(found, *calibrate(lead(best, task.top_k), task.member[held].gather(1, ids))), task.recall(logits)


def fit_correction(task: Task, options: Options) -> Network:
    """Trains on the rows that are not held in."""
    features, experts = task.features.shape[1], task.base.shape[1]
    network = Network.zero(features, options.rank, experts, task.base.device, options.seed)

    def value(part: Tensor) -> Tensor:
        logits = task.base[part].float() + network(task.features[part].float())
        return loss(logits, task.truth[part].float(), task.member[part], task.top_k)

    _descend(list(vars(network).values()), value, (~task.held_in).nonzero()[:, 0], options.head_epochs, options)
    return network


def distil(tasks: Tasks, layer: int, experts: SlotWeights, options: Options) -> Sketch:
    """A sketch of `experts` for what the mean outputs of `layer` leave unexplained, so that later gates see what they will see.

    The loss: the error of the residual relative to its length, which is what a norm makes of it; and at the next two gates, if
    their residual is off by just this error, the divergence of their softmax and the membership of their top-k.
    """
    trace, look, spec = tasks.trace, tasks.estimator, tasks.trunk.spec
    rows = (~trace.held_in[: trace.rows]).nonzero()[:, 0]
    moe = spec.moe_layers
    seen_by = moe[moe.index(layer) + 1 : moe.index(layer) + 3]
    norm = tasks.trunk.layers[layer].post_norm

    def inputs(part: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        x, ids, weights = trace.x[layer][part].float(), trace.ids[layer][part].long(), trace.weights[layer][part].float()
        return look.behind(layer, x, ids, weights), look.unit(x), look.choice(x, ids, weights)

    sample = rows[torch.randperm(len(rows), generator=torch.Generator().manual_seed(options.seed))[:SAMPLE].to(rows.device)]
    sketch = copied(experts, norm, *inputs(sample)[1:], options.distilled, spec.residual_multiplier)

    def value(part: Tensor) -> Tensor:
        base, unit, choice = inputs(part)
        after = trace.after[layer][part].float()
        error = base + sketch(unit, choice) - after
        total = RESIDUAL * (error.square().sum(1) / after.square().sum(1).clamp(min=1e-12)).mean()
        for target in seen_by:
            x = trace.x[target][part].float()
            truth = look.logits(target, x)
            member = torch.zeros_like(truth, dtype=torch.bool).scatter_(1, trace.ids[target][part].long(), True)
            total = total + loss(look.logits(target, x + error), truth, member, spec.top_k, MEMBERSHIP)
        return total

    _descend(list(vars(sketch).values()), value, rows, options.epochs, options)
    return sketch


def _descend(parameters: list[Tensor], value: Callable[[Tensor], Tensor], rows: Tensor, epochs: int, options: Options) -> None:
    descend(
        parameters, value, rows, epochs=epochs, batch=options.batch, rate=options.rate, decay=options.decay, seed=options.seed
    )


def _divergence(logits: Tensor, truth: Tensor) -> Tensor:
    """KL to the softmax of the true logits, mean over rows."""
    return functional.kl_div(logits.log_softmax(-1), truth.log_softmax(-1), log_target=True, reduction="batchmean")


def loss(logits: Tensor, truth: Tensor, member: Tensor, top_k: int, membership: float = 8.0) -> Tensor:
    """KL to the router's softmax, plus cross-entropy of being in the top-k on each expert's lead over the row's threshold."""
    ranking = functional.binary_cross_entropy_with_logits(2.0 * lead(logits, top_k), member.float())
    return _divergence(logits, truth) + membership * ranking


def lead(logits: Tensor, top_k: int) -> Tensor:
    """Logits relative to the point midway between a row's K-th and next one [.., E]."""
    edge = logits.topk(min(top_k + 1, logits.shape[-1])).values[..., top_k - 1 :].mean(-1, keepdim=True)
    return logits - edge


@torch.no_grad()
def _in_pieces(network: Network, features: Tensor) -> Tensor:
    pieces = [features[at : at + PIECE] for at in range(0, len(features), PIECE)]
    return torch.cat([network(piece.float()) for piece in pieces])


def calibrate(leads: Tensor, hit: Tensor) -> tuple[float, float]:
    """Leads [N, M] of the named experts and whether they were chosen -> scale and shift of `heads.named`."""
    target = hit.float()
    knobs = torch.tensor([1.0, 0.0], device=leads.device, requires_grad=True)
    optimizer = torch.optim.LBFGS([knobs], max_iter=50, line_search_fn="strong_wolfe")

    def closure() -> Tensor:
        optimizer.zero_grad()
        value = functional.binary_cross_entropy_with_logits(knobs[0] * leads + knobs[1], target)
        value = value + 1e-4 * knobs.square().sum()  # rows that are always right would push the scale to infinity
        value.backward()  # type: ignore[no-untyped-call]
        return value

    optimizer.step(closure)  # type: ignore[no-untyped-call]
    scale, shift = knobs.tolist()
    return scale, shift
