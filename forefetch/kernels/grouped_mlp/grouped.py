"""The grouped MLP, expert by expert: a matrix product each for all of its pairs, then a sum per row.

Every pair's place in the buffers follows from the call alone, and nothing computes across pairs. So a pair's result has the
same bits whichever slot its expert sits in and however the experts are split into waves.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

# Elementwise operations on fewer elements than this run on one thread. More could be split within a row, and where a thread's
# part ends without filling a vector, another exp is used, whose last bit may differ.
_SERIAL = 32_768


class SlotWeights:
    """Slot pool: w13 [S, 2I, H] (gate rows, then up rows) and w2 [S, H, I], with the views of each slot made once."""

    def __init__(self, w13: Tensor, w2: Tensor) -> None:
        """ValueError when the shapes do not belong together."""
        slots, hidden, width = w2.shape
        if w13.shape != (slots, 2 * width, hidden) or w13.dtype != w2.dtype:
            raise ValueError(f"w13 {tuple(w13.shape)} {w13.dtype} does not fit w2 {tuple(w2.shape)} {w2.dtype}")
        self.w13, self.w2, self.hidden, self.width = w13, w2, hidden, width
        self.w13_t = [matrix.t() for matrix in w13.unbind()]  # [H, 2I] each
        self.w2_t = [matrix.t() for matrix in w2.unbind()]  # [I, H] each


@dataclass(frozen=True, slots=True)
class Pairs:
    """A call's pairs in two orders: by expert for the products, by row for the sum. Tensors are on the weights' device."""

    experts: list[int]  # those with pairs, ascending
    counts: list[int]  # pairs of each
    row: Tensor  # [P] by expert: the row of x
    place: Tensor  # [P] int64, by row: the place among the pairs sorted by expert
    weight: Tensor  # [P] float32, by row
    first: Tensor  # [N] int64: where each row's pairs begin in `place`


class Evaluation:
    """One call, in one wave or several: `run` each expert once, then `combine`."""

    def __init__(self, x: Tensor, pairs: Pairs, weights: SlotWeights) -> None:
        """x [N, H]. ValueError when it does not fit the weights."""
        if x.shape[1:] != (weights.hidden,) or x.dtype != weights.w13.dtype:
            raise ValueError(f"x {tuple(x.shape)} {x.dtype} does not fit experts of {weights.hidden} {weights.w13.dtype}")
        self._pairs, self._weights = pairs, weights
        total, counts = len(pairs.row), pairs.counts
        self._hidden = x.new_empty(total, 2 * weights.width)  # gate | up
        self._active = x.new_empty(total, weights.width)
        self._result = x.new_empty(total, weights.hidden)
        buffers = x.index_select(0, pairs.row), self._hidden, self._active, self._result
        self._x_of, self._hidden_of, self._active_of, self._result_of = (each.split_with_sizes(counts) for each in buffers)

    def run(self, groups: Sequence[int], slots: Sequence[int]) -> None:
        """Computes the pairs of `pairs.experts[group]` for each group, with the expert that sits in the slot beside it."""
        weights = self._weights
        for group, slot in zip(groups, slots, strict=True):
            torch.mm(self._x_of[group], weights.w13_t[slot], out=self._hidden_of[group])
        if len(groups) == len(self._pairs.experts):
            self._activate(self._hidden, self._active)
        else:
            for group in groups:
                self._activate(self._hidden_of[group], self._active_of[group])
        for group, slot in zip(groups, slots, strict=True):
            torch.mm(self._active_of[group], weights.w2_t[slot], out=self._result_of[group])

    def _activate(self, hidden: Tensor, active: Tensor) -> None:
        """active = silu(gate) * up, in pieces that stay on one thread."""
        if active.is_cuda or active.numel() < _SERIAL or len(active) == 1:
            gate, up = hidden.chunk(2, dim=1)
            torch.mul(functional.silu(gate), up, out=active)
            return
        rows = max(1, (_SERIAL - 1) // self._weights.width)
        for begin in range(0, len(active), rows):
            self._activate(hidden[begin : begin + rows], active[begin : begin + rows])

    def combine(self, out: Tensor) -> None:
        """out [N, H] = each row's weighted sum over its pairs, in float32, in a fixed order; rows without pairs become zero."""
        pairs = self._pairs
        if not pairs.experts:
            out.zero_()
            return
        # Of torch's sums by index the one that adds in order: embedding_bag(table, places, first places, scale, mode 0 = sum).
        out.copy_(torch.embedding_bag(self._result.float(), pairs.place, pairs.first, False, 0, False, pairs.weight, False)[0])
