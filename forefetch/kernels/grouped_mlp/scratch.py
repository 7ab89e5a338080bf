"""What the launches of one grouped MLP leave for one another, and into how many units its pairs can fall."""

from __future__ import annotations

import torch
import triton
from torch import Tensor

from forefetch.kernels.grouped_mlp.formats import ExpertFormat, blob_bytes
from forefetch.kernels.grouped_mlp.unsummed import Unsummed

DIRECT_TOKENS = 6  # up to here a unit of one pair is faster than finding out who shares an expert


def units(pairs: int, experts: int, size: int) -> int:
    """The most units that `pairs` can form in units of `size`: each expert has at most one that is not full."""
    return min(pairs, experts + pairs // size)


def unit_size(pairs: int, experts: int) -> int:
    """Pairs in a unit: about what an expert has, within what a tile can be."""
    return max(16, min(128, 1 << (-(-pairs // experts) - 1).bit_length()))


class MoeScratch:
    """What calls of `moe` share and write besides `out`: one object serves any layer and any number of tokens up to `tokens`.

    Calls that use one object must follow one another on a stream. Between calls the counters in it are zero; after a call was
    torn off half-way (a fault, a cancelled capture), `reset` makes them so.
    """

    def __init__(
        self,
        tokens: int,
        top_k: int,
        experts: int,
        hidden: int,
        width: int,
        format: ExpertFormat,
        *,
        device: torch.device | str,
        dtype: torch.dtype,
    ) -> None:
        """For x [T <= tokens, hidden] of `dtype`, each token with `top_k` of `experts`. ValueError: no kernel for these."""
        if hidden % 32 or width % 32:
            raise ValueError(f"experts of {hidden} x {width}: both must be multiples of 32")
        if format.order == "fragment" and dtype not in {torch.bfloat16, torch.float16}:
            raise ValueError(f"{format} multiplies in float16; x of {dtype} would lose more than it should")
        self.tokens, self.top_k, self.experts, self.hidden, self.width = tokens, top_k, experts, hidden, width
        self.format, self.dtype, self.blob_bytes = format, dtype, blob_bytes(hidden, width, format)
        pairs, fragment = tokens * top_k, format.order == "fragment"
        most = triton.next_power_of_2(units(pairs, experts, 8)) if fragment else 1

        def ints(size: int) -> Tensor:
            return torch.zeros(size, dtype=torch.int32, device=device)

        self.ids, self.weights = ints(pairs), torch.empty(pairs, dtype=torch.float32, device=device)
        self.counts, self.ready, self.fault = ints(triton.next_power_of_2(experts)), ints(most), ints(1)
        self.tickets, self.done = ints(1), ints(DIRECT_TOKENS * hidden // 32)
        self.live, self.table = ints(pairs), ints(experts * tokens + 128)  # a unit may be read whole where it is not full
        self.x_half = torch.empty(tokens * fragment, hidden, dtype=torch.float16, device=device)
        self.h = torch.empty(pairs, width, dtype=torch.float16 if fragment else dtype, device=device)
        self.y = torch.empty(pairs, hidden, dtype=torch.float32, device=device)

    def unsummed(self, tokens: int) -> Unsummed:
        """What the products of a call with so many tokens have left."""
        pairs = tokens * self.top_k
        return Unsummed(self.y[:pairs], self.weights[:pairs], self.live[:pairs], (self.counts, self.ready))

    def reset(self) -> None:
        """Zeroes the counters and the fault."""
        for counter in (self.counts, self.ready, self.tickets, self.done, self.fault):
            counter.zero_()

    def check(self) -> None:
        """RuntimeError if a call's programs waited for one another in vain; reads the device, so not inside a graph."""
        if int(self.fault):
            self.reset()
            raise RuntimeError("the expert kernel's programs waited for one another in vain; its results are wrong")
