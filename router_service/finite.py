"""Prompt rows that are no numbers: a worker is broken, or a value overflowed.

A row that chooses a token shows it by its logits, and its request ends. A prompt's earlier chunks choose nothing, and their K
and V would be handed over meanwhile: whoever asked with the same prefix would get them, long after the worker is well again.
"""

from __future__ import annotations

import torch

from router_service.batch import StepBatch


class NotFinite(Exception):
    """Of a step that counts nothing. `chunks`: which of its prompts' chunks have such rows."""

    def __init__(self, chunks: list[int]) -> None:
        super().__init__(f"prompt chunks {chunks} of a step are no numbers")
        self.chunks = chunks


def check_prompts(x: torch.Tensor, batch: StepBatch) -> None:
    """Residuals x [T, H] behind all layers, which are finite only if all was that K and V were made of. Raises NotFinite.

    On a CPU alone: elsewhere the step would have to be waited for."""
    if not batch.prefills or x.device.type != "cpu":
        return
    bad = [i for i, rows in enumerate(batch.prefills) if not x[rows.first : rows.first + rows.count].isfinite().all()]
    if bad:
        raise NotFinite(bad)
