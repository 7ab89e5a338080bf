"""Routed experts' MLP over (row, expert) pairs: out[row] = sum over the row's pairs of weight * w2 @ (silu(gate) * up).

`ref.py` is the definition, a float32 loop over pairs; `grouped.py` computes it expert by expert, `cpu.py` in one loop for
CPUs. `forefetch.pairs` sorts a call's pairs, but on a CPU where experts keep their slots: see `whole_calls`.

Letters: N rows, H hidden, P pairs, I expert width, S slots. One expert may be named twice for a row: both count.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol

import torch
from torch import Tensor

from forefetch.kernels import compiled
from forefetch.kernels.grouped_mlp.grouped import Evaluation, Pairs, SlotWeights
from forefetch.kernels.grouped_mlp.ref import reference

if TYPE_CHECKING:
    from forefetch.kernels.grouped_mlp.cpu import WholeCalls

__all__ = [
    "Evaluation",
    "Evaluator",
    "Pairs",
    "SlotWeights",
    "WholeCalls",
    "evaluation",
    "grouped_mlp",
    "prepare",
    "reference",
    "takes_bfloat16",
    "whole_calls",
]


class Evaluator(Protocol):
    """One call, in one wave or several: `run` each expert once, then `combine`."""

    def run(self, groups: Sequence[int], slots: Sequence[int]) -> None:
        """Computes the pairs of `pairs.experts[group]` for each group, with the expert that sits in the slot beside it."""

    def combine(self, out: Tensor) -> None:
        """out [N, H] = each row's weighted sum over its pairs."""


def evaluation(x: Tensor, pairs: Pairs, weights: SlotWeights) -> Evaluator:
    """One call's evaluation by the fastest way there is. ValueError when x does not fit the weights."""
    if x.is_cpu and compiled.available():
        from forefetch.kernels.grouped_mlp.cpu import CompiledEvaluation, fits

        if fits(x, weights):
            return CompiledEvaluation(x, pairs, weights)
    return Evaluation(x, pairs, weights)


def whole_calls(weights: SlotWeights, dtype: torch.dtype) -> WholeCalls | None:
    """What answers calls with rows of `dtype` at once, where experts keep their slots; None if nothing can."""
    empty = torch.zeros(0, weights.hidden, dtype=dtype, device=weights.w13.device)
    if not empty.is_cpu or not compiled.available():
        return None
    from forefetch.kernels.grouped_mlp.cpu import WholeCalls, fits

    return WholeCalls(weights) if fits(empty, weights) else None


def prepare(weights: SlotWeights, dtype: torch.dtype) -> None:
    """Does now what a first call with rows of `dtype` would have to wait for."""
    empty = torch.zeros(0, weights.hidden, dtype=dtype, device=weights.w13.device)
    if empty.is_cpu and compiled.available():
        from forefetch.kernels.grouped_mlp.cpu import fits
        from forefetch.kernels.grouped_mlp.cpu import prepare as compile_now

        if fits(empty, weights):
            compile_now(weights)


def takes_bfloat16(dtype: torch.dtype, device: torch.device) -> bool:
    """Whether rows of `dtype` can be multiplied with bfloat16 weights, as if these had been widened before."""
    return device.type == "cpu" and dtype == torch.float32 and compiled.available()


def grouped_mlp(x: Tensor, weights: SlotWeights, pairs: Pairs, out: Tensor) -> None:
    """Writes all of out [N, H] from x [N, H] and the experts that sit in the slots of their number.

    x is of the weights' type and device; out may be of others. ValueError for shapes that do not fit. Indices are not checked.
    """
    call = evaluation(x, pairs, weights)
    call.run(range(len(pairs.experts)), pairs.experts)
    call.combine(out)
