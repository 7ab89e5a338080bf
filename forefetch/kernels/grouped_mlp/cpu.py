"""The grouped MLP on a CPU by compiled kernels: float32 rows, weights in float32 or in the bfloat16 they were stored in."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from forefetch.kernels.compiled.calls import NONSENSE, answer
from forefetch.kernels.compiled.experts import combine_call, evaluate_call
from forefetch.kernels.compiled.linear import BFLOAT16, FLOAT32
from forefetch.kernels.compiled.locks import compiling, threads
from forefetch.kernels.grouped_mlp.grouped import Pairs, SlotWeights

KINDS = {torch.float32: FLOAT32, torch.bfloat16: BFLOAT16}


def fits(x: Tensor, weights: SlotWeights) -> bool:
    """Whether these kernels take the call: matrices must lie as [H, 2I] and [I, H], row after row, as `Pool` keeps them."""
    w13, w2 = weights.w13, weights.w2
    if not x.is_cpu or x.dtype != torch.float32 or w13.dtype not in KINDS or min(w13.shape) == 0:
        return False
    natural = w13.stride()[1:] == (1, w13.shape[1]) and w2.stride()[1:] == (1, w2.shape[1])
    return natural and (len(w13) == 1 or w13.stride(0) == w2.stride(0))


def prepare(weights: SlotWeights) -> None:
    """Compiles what a call with these weights will need, or reads it from where it was kept."""
    nothing = torch.zeros(0, dtype=torch.int64)
    pairs = Pairs([], [], nothing, nothing, torch.zeros(0), nothing)
    with compiling():
        call = CompiledEvaluation(torch.zeros(0, weights.hidden), pairs, weights)
        call.run([], [])
        call.combine(torch.zeros(0, weights.hidden))


class CompiledEvaluation:
    """One call, in one wave or several, as `grouped.Evaluation`."""

    def __init__(self, x: Tensor, pairs: Pairs, weights: SlotWeights) -> None:
        """x [N, H]. ValueError when it does not fit the weights."""
        if x.shape[1:] != (weights.hidden,):
            raise ValueError(f"x {tuple(x.shape)} does not fit experts of {weights.hidden}")
        self._x, self._pairs, self._weights = x.contiguous().numpy(), pairs, weights
        total, w13, w2 = len(pairs.row), weights.w13, weights.w2
        self._rows = pairs.row.numpy().astype(np.int64)
        self._first = np.cumsum([0, *pairs.counts])
        self._count = np.arange(max(pairs.counts, default=0))
        size = w13.element_size()
        self._strides = np.array((w13.stride(0) * size, w2.data_ptr() - w13.data_ptr()))
        shapes = (total, 2 * weights.width), (total, weights.width), (total, weights.hidden)
        self._hidden, self._active, self._result = (np.empty(shape, dtype=np.float32) for shape in shapes)

    def run(self, groups: Sequence[int], slots: Sequence[int]) -> None:
        """Computes the pairs of `pairs.experts[group]` for each group, with the expert that sits in the slot beside it."""
        pool, kind = self._weights.w13.data_ptr(), KINDS[self._weights.w13.dtype]
        which = np.array(groups, dtype=np.int64), np.array(slots, dtype=np.int64)
        buffers = self._hidden, self._active, self._result, self._count
        with threads() as count:
            evaluate_call(self._x, self._rows, self._first, *which, pool, self._strides, kind, *buffers, count)

    def combine(self, out: Tensor) -> None:
        """out [N, H] = each row's weighted sum over its pairs, in a fixed order; rows without pairs become zero."""
        pairs = self._pairs
        sums = out if out.dtype == torch.float32 and out.is_cpu and out.is_contiguous() else torch.empty(out.shape)
        combine_call(self._result, pairs.place.numpy(), pairs.first.numpy(), pairs.weight.numpy(), sums.numpy())
        if sums is not out:
            out.copy_(sums)


class WholeCalls:
    """Calls whose experts all sit in slots for good, from their pairs to their rows at once: the same bits as one by one."""

    def __init__(self, weights: SlotWeights) -> None:
        """Compiles what calls will need, or reads it from where it was kept."""
        w13, w2 = weights.w13, weights.w2
        size = w13.element_size()
        strides = np.array((w13.stride(0) * size, w2.data_ptr() - w13.data_ptr()))
        self._weights = weights  # lie at these addresses
        self._at = w13.data_ptr(), strides, KINDS[w13.dtype], weights.width
        row, weight = np.zeros(0, np.int32), np.zeros(0, np.float32)
        nothing = torch.zeros(0, weights.hidden)
        with compiling():
            self.answer(nothing, (row, row, weight), np.full(2, -1, np.int32), np.zeros(0, np.int64), nothing)

    def answer(
        self,
        x: Tensor,
        pairs: tuple[npt.NDArray[np.int32], npt.NDArray[np.int32], npt.NDArray[np.float32]],
        number: npt.NDArray[np.int32],
        load: npt.NDArray[np.int64],
        out: Tensor,
    ) -> int:
        """See `compiled.calls.answer`: how many experts were needed; negative, and nothing was done, if that is not for it."""
        if (
            out.dtype != torch.float32
            or x.dtype != torch.float32
            or not (out.is_cpu and out.is_contiguous() and x.is_contiguous())
        ):
            return NONSENSE
        rows, sums = x.numpy(), out.numpy()
        if rows.shape[1] != self._weights.hidden or sums.shape != rows.shape:
            return NONSENSE
        row, expert, weight = map(np.ascontiguousarray, pairs)
        with threads() as count:
            found: int = answer(rows, row, expert, weight, number, load, *self._at, count, sums)
        return found
