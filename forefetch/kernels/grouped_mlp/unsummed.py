"""What the routed experts of a layer leave for a kernel that adds a token's rows up while it reads them."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, slots=True)
class Unsummed:
    """A layer's pairs, T * K of them in the tokens' order: rows [T * K, H] float32, weights float32 and live int32 [T * K] (0:
    a pair that adds nothing, whose row and weight may be anything). Whoever adds them up leaves both counters at zero."""

    rows: Tensor
    weights: Tensor
    live: Tensor
    counters: tuple[Tensor, Tensor]  # int32, each of a power of two
