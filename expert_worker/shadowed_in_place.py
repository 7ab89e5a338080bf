"""`--miss shadow` on a GPU: an expert that is in no slot when a layer needs it is evaluated from a copy of it in fewer bits, on
the device, instead of over PCIe. An approximation, as `shadowed.py` says.

A layer is two grouped products, one over what is in slots and one over shadows, whatever is where: so a step can be recorded.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from expert_worker.in_place import InPlaceExperts
from expert_worker.packed import packed_format
from forefetch.kernels import residency
from forefetch.kernels.grouped_mlp.moe import moe
from forefetch.kernels.grouped_mlp.scratch import MoeScratch
from forefetch.rounding import SHADOW
from forefetch.weights import Checkpoint


class ShadowedInPlace(InPlaceExperts):
    """`InPlaceExperts` that never read host memory in a layer, nor wait for a copy. Memory: the shadows beside the slots."""

    shadows = True

    def __init__(self, *args: Any, dtype: torch.dtype, max_rows: int, **place: Any) -> None:
        """See InPlaceExperts."""
        self._dtype = dtype
        super().__init__(*args, dtype=dtype, max_rows=max_rows, **place)
        self.state.waits = False
        spec = self.spec
        shape = (max_rows, spec.top_k, spec.num_experts, spec.hidden_size, spec.expert_width)
        self._shadow_scratch = MoeScratch(*shape, self._shadow_format, device=self._device, dtype=dtype)
        self._shadow_scratch.fault = self._scratch.fault  # one check for both
        self._shadow_out = torch.empty_like(self._out)
        self._here, self._absent = (torch.empty_like(self._chosen[0]) for _ in range(2))

    def _hold(self, checkpoint: Checkpoint, on_progress: Callable[[int, int], None]) -> None:
        super()._hold(checkpoint, on_progress)
        self._shadow_format = packed_format(self.spec, SHADOW, self._dtype, self._device)
        self._shadows, self._shadow_of = self._packed(checkpoint, self._shadow_format)

    @property
    def weight_bytes(self) -> int:
        """Bytes of weights in slots, in host memory and of shadows."""
        return super().weight_bytes + self._shadows.numel()

    def _products(self, place: int, x: Tensor, ids: Tensor, weights: Tensor, out: Tensor, scratch: MoeScratch) -> None:
        rows = len(x)
        here, absent, beside = self._here[:rows], self._absent[:rows], self._shadow_out[:rows]
        residency.split(self.state, ids, here, absent)
        super()._products(place, x, here, weights, out, scratch)
        moe(x, absent, weights, self._shadows, self._shadow_of[place], beside, self._shadow_scratch)
        out += beside
