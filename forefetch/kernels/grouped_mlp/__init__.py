"""Routed experts' MLP over (row, expert) pairs: out[row] = sum over the row's pairs of weight * w2 @ (silu(gate) * up).

`ref.py` is the definition, a float32 loop over pairs; `grouped.py` computes it expert by expert. Letters: N rows, H hidden,
P pairs, I expert width, S slots. The same expert may be named twice for one row; both count.
"""

from __future__ import annotations

from torch import Tensor

from forefetch.kernels.grouped_mlp.grouped import Evaluation, Pairs, SlotWeights
from forefetch.kernels.grouped_mlp.ref import reference

__all__ = ["Evaluation", "Pairs", "SlotWeights", "grouped_mlp", "reference"]


def grouped_mlp(x: Tensor, weights: SlotWeights, pair_row: Tensor, pair_slot: Tensor, pair_weight: Tensor, out: Tensor) -> None:
    """Writes out [N, H], all of it, from x [N, H]; both in the weights' dtype, on their device, or out on another one.

    pair_row [P] and pair_slot [P] int32, pair_weight [P] float32 lie on the host: no synchronisation is needed to launch.
    ValueError for shapes that do not fit. Indices are not checked.
    """
    pairs = Pairs(pair_row, pair_slot, pair_weight, len(x), x.device)
    evaluation = Evaluation(x, pairs, weights)
    evaluation.run(range(len(pairs.experts)), pairs.experts)
    evaluation.combine(out)
