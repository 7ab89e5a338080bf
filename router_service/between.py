"""Foresight for compiled steps: what `forefetch/kernels/compiled/between.py` needs, and when it may have the slots.

Nobody but the engine's thread calls; a helper of the crew does the work.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
import torch

from forefetch.kernels.compiled import between, layer, visit
from forefetch.kernels.compiled.linear import FLOAT32, Packed, padded
from router_service.hints import Hints
from router_service.lookahead.foresight import Foresight, possible
from router_service.lookahead.heads import Lookahead
from router_service.trunk import Trunk

if TYPE_CHECKING:
    from expert_worker.client import WholeExperts

Longs = npt.NDArray[np.int64]


def foresight_of(trunk: Trunk, hints: Hints | None) -> Foresight | None:
    """What was trained for the checkpoint, if hints are on and it fits."""
    source = hints.heads if hints is not None else None
    return source.foresight if isinstance(source, Lookahead) and possible(trunk) else None


class Between:
    """`seen` is what a compiled step is handed; without a foresight nothing is ever expected."""

    def __init__(self, trunk: Trunk, rows: int, foresight: Foresight | None) -> None:
        spec, self._foresight = trunk.spec, foresight
        hidden, experts, count = spec.hidden_size, spec.num_experts, rows if foresight else 0
        outputs = len(spec.moe_layers) * experts
        self._packed = Packed.of(foresight.weight.bfloat16()) if foresight else None
        self._offset = foresight.offset.float().contiguous() if foresight else torch.zeros(0)
        self.seen = between.Seen(
            any=foresight is not None,
            weight=self._packed.memory.data_ptr() if self._packed else 0,
            kind=self._packed.kind if self._packed else FLOAT32,
            offset=self._offset.data_ptr(),
            embedding=trunk.embedding.data_ptr(),
            vocabulary=len(trunk.embedding),
            ones=np.ones(hidden, np.float32),
            tokens=np.zeros(count, np.int64),
            behind=np.zeros((count, hidden), np.float32),
            inputs=np.zeros((count, 2 * hidden), np.float32),
            chances=np.zeros((count, padded(outputs)), np.float32),
            worth=np.zeros(outputs if foresight else 0),
            order=np.zeros(outputs if foresight else 0, np.int64),
            named=np.zeros(len(spec.moe_layers), np.int64),
            task=np.zeros(between.NUMBERS, np.int64),
        )

    @property
    def any(self) -> bool:
        """There is a foresight."""
        return self._foresight is not None

    def expect(
        self, tokens: Sequence[int], buffers: layer.Buffers, whole: WholeExperts, moving: visit.Moving, board: Longs
    ) -> None:
        """The step in `buffers`, of as many rows, chose `tokens`; -1: none. Returns at once."""
        if whole.lend():
            self.seen.tokens[: len(tokens)] = tokens
            seen = self.seen.task, self.seen.behind
            between.expect(*seen, buffers.x, len(tokens), moving.jobs.numbers, board)  # type: ignore[no-untyped-call]

    def abandon(self, whole: WholeExperts, moving: visit.Moving) -> None:
        """The next step is none of `buffers`: it finds everything still."""
        between.abandon(self.seen, moving)  # type: ignore[no-untyped-call]
        whole.take_back()
