"""Gradient descent on small networks. On a GPU an update is recorded once and replayed: launching its hundred small kernels
one by one would take ten times as long as running them."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

_WARM = 0.1  # of the updates: the rate rises
_RECORDED_AFTER = 3  # updates, so that the optimizer's state and the gradients exist


def descend(
    parameters: Sequence[Tensor],
    value: Callable[[Tensor], Tensor],
    rows: Tensor,
    *,
    epochs: int,
    batch: int,
    rate: float,
    decay: float,
    seed: int,
) -> None:
    """AdamW, in place, on value(row numbers [B]), over `epochs` passes through `rows` in random order.

    `value` must not wait for a GPU. `rate` is the peak: it rises for a tenth of the updates, then falls along a cosine.
    """
    batch, device = min(batch, len(rows)), rows.device
    recorded = device.type == "cuda"
    leaves = [part.requires_grad_() for part in parameters]
    now = torch.tensor(rate, device=device)
    optimizer = torch.optim.AdamW(leaves, now if recorded else rate, weight_decay=decay, foreach=True, capturable=recorded)
    part = rows[:batch].clone()

    def update() -> None:
        optimizer.zero_grad(set_to_none=False)
        value(part).backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(leaves, 1.0)
        optimizer.step()

    run, done, updates = update, 0, epochs * (len(rows) // batch)
    draw = torch.Generator().manual_seed(seed)
    for _ in range(epochs):
        order = rows[torch.randperm(len(rows), generator=draw).to(device)]
        for at in range(0, len(rows) - batch + 1, batch):
            part.copy_(order[at : at + batch])
            _set_rate(optimizer, now, rate * _share(done, updates))
            if recorded and done == _RECORDED_AFTER:
                run = _recorded(update)
            run()
            done += 1
    for leaf in leaves:
        leaf.requires_grad_(False).grad = None


def _share(done: int, updates: int) -> float:
    """Of the peak rate, after `done` of `updates`."""
    warm = max(1, int(_WARM * updates))
    return (done + 1) / warm if done < warm else 0.5 * (1.0 + math.cos(math.pi * (done - warm) / max(1, updates - warm)))


def _set_rate(optimizer: torch.optim.Optimizer, now: Tensor, rate: float) -> None:
    for group in optimizer.param_groups:
        if isinstance(group["lr"], Tensor):
            now.fill_(rate)
        else:
            group["lr"] = rate


def _recorded(update: Callable[[], None]) -> Callable[[], None]:
    """A CUDA graph of one update. Recording runs nothing."""
    stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        update()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        update()
    return graph.replay
