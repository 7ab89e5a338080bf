"""Routed experts' MLP over (row, expert) pairs: out[row] = sum over the row's pairs of weight * w2 @ (silu(gate) * up).

`ref.py` is the definition, a float32 loop over pairs; `grouped.py` computes it expert by expert. `forefetch.pairs` sorts a
call's pairs. Letters: N rows, H hidden, P pairs, I expert width, S slots. One expert may be named twice for a row: both count.
"""

from __future__ import annotations

from torch import Tensor

from forefetch.kernels.grouped_mlp.grouped import Evaluation, Pairs, SlotWeights
from forefetch.kernels.grouped_mlp.ref import reference

__all__ = ["Evaluation", "Pairs", "SlotWeights", "grouped_mlp", "reference"]


def grouped_mlp(x: Tensor, weights: SlotWeights, pairs: Pairs, out: Tensor) -> None:
    """Writes all of out [N, H] from x [N, H] and the experts that sit in the slots of their number.

    x is of the weights' type and device; out may be of others. ValueError for shapes that do not fit. Indices are not checked.
    """
    evaluation = Evaluation(x, pairs, weights)
    evaluation.run(range(len(pairs.experts)), pairs.experts)
    evaluation.combine(out)
