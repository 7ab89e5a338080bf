"""What the grouped MLP means: one pair after the other, in float32 (or float64, to judge the others by)."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional


def reference(
    x: Tensor,
    w13: Tensor,
    w2: Tensor,
    pair_row: Tensor,
    pair_slot: Tensor,
    pair_weight: Tensor,
    dtype: torch.dtype = torch.float32,
) -> Tensor:
    """x [N, H], w13 [S, 2I, H] (gate rows, then up rows), w2 [S, H, I] -> [N, H] in `dtype`, rounded nowhere in between."""
    out = torch.zeros(x.shape, dtype=dtype, device=x.device)
    for row, slot, weight in zip(pair_row.tolist(), pair_slot.tolist(), pair_weight.tolist(), strict=True):
        gate, up = (w13[slot].to(dtype) @ x[row].to(dtype)).chunk(2)
        out[row] += weight * (w2[slot].to(dtype) @ (functional.silu(gate) * up))
    return out
