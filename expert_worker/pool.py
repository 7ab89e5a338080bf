"""The slots' memory on the device, and how an expert gets from host memory into one.

A slot holds an expert in the compute type, laid out as formats.py does for that type in natural order. So an expert stored in
that type is one plain copy, and others are unpacked on the way.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

import torch
from torch import Tensor

from expert_worker.host import Host
from forefetch.kernels.grouped_mlp import SlotWeights, prepare
from forefetch.kernels.grouped_mlp.formats import ExpertFormat, Kind, blob_bytes, unpack

CHUNK = 2 * 2**20  # bytes of one copy to a GPU: short enough that a demand never waits long behind a prefetch


def plain(dtype: torch.dtype) -> ExpertFormat:
    """The format that holds weights of `dtype` as they are."""
    return ExpertFormat(cast(Kind, str(dtype).removeprefix("torch.")))


class Pool:
    """`memory` uint8 [slots, stride]; `weights` views it as matrices."""

    def __init__(self, slots: int, hidden: int, width: int, dtype: torch.dtype, device: torch.device) -> None:
        self.format, self.dtype, self.hidden, self.width = plain(dtype), dtype, hidden, width
        self.stride = blob_bytes(hidden, width, self.format)
        self.memory = torch.empty(slots, self.stride, dtype=torch.uint8, device=device)
        elements = self.memory.view(dtype)
        half = 2 * width * hidden
        w13 = elements[:, :half].view(slots, hidden, 2 * width).transpose(1, 2)
        w2 = elements[:, half : half + width * hidden].view(slots, width, hidden).transpose(1, 2)
        self.weights = SlotWeights(w13, w2)
        self._elements = [row[: half + width * hidden] for row in elements.unbind()]  # of each slot; made once, they cost time
        self._staging: Tensor | None = None  # on a GPU: where a packed expert arrives before it is unpacked

    def prepare(self, dtype: torch.dtype) -> None:
        """What evaluates rows of `dtype` from these slots is ready when this returns."""
        prepare(self.weights, dtype)

    def put(self, slot: int, w13: Tensor, w2: Tensor) -> None:
        """Fills a slot from matrices of any float type, on any device."""
        self.weights.w13[slot].copy_(w13)
        self.weights.w2[slot].copy_(w2)

    def fill(self, slot: int, blob: Tensor, format: ExpertFormat) -> None:
        """Fills a slot from a packed expert in host memory. On a GPU this only launches, on the current stream."""
        if format == self.format:
            self._bring(self.memory[slot], blob)
            return
        if not format.quantised and not self.memory.is_cuda:  # the same order, another type: one operation, without the GIL
            to = self._elements[slot]
            to.copy_(blob.view(getattr(torch, format.kind))[: to.numel()])
            return
        if self.memory.is_cuda:
            if self._staging is None:
                self._staging = torch.empty(len(blob), dtype=torch.uint8, device=self.memory.device)
            self._bring(self._staging, blob)
            blob = self._staging
        unpack(blob, self.hidden, self.width, format, self.dtype, (self.weights.w13[slot], self.weights.w2[slot]))

    def _bring(self, to: Tensor, blob: Tensor) -> None:
        if to.is_cuda:
            for start in range(0, len(blob), CHUNK):
                to[start : start + CHUNK].copy_(blob[start : start + CHUNK], non_blocking=True)
        else:
            to.copy_(blob)

    def differs(self, slot: int, host: Host, number: int) -> bool:
        """Whether a slot does not hold exactly what host memory says: the debug check of copies."""
        expected = unpack(host.blob(number), self.hidden, self.width, host.format, self.dtype)
        held: Sequence[Tensor] = self.weights.w13[slot], self.weights.w2[slot]
        return not all(torch.equal(a.cpu(), b) for a, b in zip(held, expected, strict=True))
