"""Muon for the matrices, AdamW for embedding and norms, under one warm-up, stable, decay schedule."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from models.recipe.model import Model

NEWTON_SCHULZ = (3.4445, -4.7750, 2.0315)  # Jordan et al. 2024: drives singular values into about [0.7, 1.2]
UPDATE_RMS = 0.2  # Liu et al. 2025: makes a Muon step as large as an AdamW step, so both share one learning rate


def orthogonalize(matrices: Tensor, steps: int = 5) -> Tensor:
    """Nearest semi-orthogonal matrices of [n, rows, columns] with rows <= columns, by Newton-Schulz iteration."""
    a, b, c = NEWTON_SCHULZ
    x = matrices.to(torch.bfloat16 if matrices.is_cuda else torch.float32)
    x = F.normalize(x.flatten(1), eps=1e-7).view_as(x)
    for _ in range(steps):
        gram = x @ x.mT
        x = a * x + (b * gram + c * gram @ gram) @ x
    return x


def oriented(tensor: Tensor, rows: int) -> Tensor:
    """The matrices inside a parameter, as a view [n, short, long]."""
    matrices = tensor.view(-1, rows, tensor.shape[-1])
    short_first = matrices if rows <= tensor.shape[-1] else matrices.mT
    return short_first


class Muon:
    """Momentum whose update is orthogonalized; matrices of one shape, over all layers and experts, go together."""

    def __init__(self, parameters: list[tuple[nn.Parameter, int]], momentum: float = 0.95, decay: float = 0.1) -> None:
        """Parameters come with the rows of one matrix in them: [E, 2I, H] with I rows is 2E matrices of [I, H]."""
        self.momentum, self.decay = momentum, decay
        self.groups: dict[tuple[int, int], list[tuple[nn.Parameter, int]]] = defaultdict(list)
        for parameter, rows in parameters:
            shape = oriented(parameter, rows).shape
            self.groups[shape[1], shape[2]].append((parameter, rows))
        self.buffers = {
            shape: torch.zeros_like(torch.cat([oriented(p.detach(), rows) for p, rows in group]))
            for shape, group in self.groups.items()
        }

    @torch.no_grad()
    def step(self, rate: float) -> None:
        """One update of every matrix at learning rate `rate`."""
        for (short, long), group in self.groups.items():
            buffer = self.buffers[short, long]
            grads = torch.cat([oriented(p.grad, rows) for p, rows in group if p.grad is not None])
            buffer.lerp_(grads, 1 - self.momentum)
            update = orthogonalize(grads.lerp(buffer, self.momentum)).float() * (UPDATE_RMS * long**0.5)
            sizes = [oriented(p, rows).shape[0] for p, rows in group]
            for (parameter, rows), part in zip(group, update.split(sizes), strict=True):
                parameter.mul_(1 - rate * self.decay)
                oriented(parameter, rows).sub_(part, alpha=rate)

    def state(self) -> dict[tuple[int, int], Tensor]:
        """Momentum by shape."""
        return self.buffers

    def load(self, state: dict[tuple[int, int], Tensor]) -> None:
        """Continue from `state`."""
        for shape, buffer in self.buffers.items():
            buffer.copy_(state[shape])


class Optimizer:
    """Both optimizers of one model."""

    def __init__(self, model: Model) -> None:
        matrices: list[tuple[nn.Parameter, int]] = []
        rest: list[nn.Parameter] = []
        for name, parameter in model.named_parameters():
            if parameter.dim() < 2 or name == "embedding":
                rest.append(parameter)
            else:
                fused = name.endswith("gate_up")
                matrices.append((parameter, model.config.expert_width if fused else parameter.shape[-2]))
        self.parameters = [*(p for p, _ in matrices), *rest]
        self.muon = Muon(matrices)
        self.adam = torch.optim.AdamW(rest, lr=0.0, betas=(0.9, 0.95), eps=1e-10, weight_decay=0.0, fused=rest[0].is_cuda)

    def step(self, rate: float) -> None:
        """Clip, update, clear."""
        nn.utils.clip_grad_norm_(self.parameters, 1.0)
        for group in self.adam.param_groups:
            group["lr"] = rate
        self.muon.step(rate)
        self.adam.step()
        for parameter in self.parameters:
            parameter.grad = None

    def state(self) -> dict[str, Any]:
        """For a checkpoint."""
        return {"muon": self.muon.state(), "adam": self.adam.state_dict()}

    def load(self, state: dict[str, Any]) -> None:
        """Continue from a checkpoint."""
        self.muon.load(state["muon"])
        self.adam.load_state_dict(state["adam"])


def learning_rate(step: int, progress: float, peak: float, warm_up: int = 100, decay_from: float = 0.4) -> float:
    """Rate at `progress` in [0, 1] of the time: linear warm-up over the first steps, flat, linear down to zero."""
    return peak * min(1.0, (step + 1) / warm_up, max(0.0, (1 - progress) / (1 - decay_from)))
