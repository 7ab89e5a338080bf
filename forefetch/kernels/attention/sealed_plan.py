"""What a step's decode rows read and write over sealed pages, worked out where their lengths are.

Letters: N decode rows, R rows of the step. `triton_sealed_plan.py` is one launch of it.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from forefetch.kernels.attention.sealed import SealedPlan
from forefetch.kernels.kv_codec.formats import KvFormat


class Placed(NamedTuple):
    """`places` [R] int64: where rows go in the flattened tails, prompt rows behind all lanes. positions [N] int32."""

    plan: SealedPlan
    places: Tensor
    positions: Tensor


def place_sealed(table: Tensor, lengths: Tensor, held: Tensor, format: KvFormat, lanes: int, rows: int) -> Placed:
    """table [N, pages], lengths [N], held [2, N] (lanes, and how many first pages were sealed from the start), all int32.

    Idle rows have length 0 and write to the lane behind all `lanes`, the step's other rows, `rows` in all, behind that."""
    if lengths.is_cuda:
        from forefetch.kernels.attention.triton_sealed_plan import place_sealed as launched

        return launched(table, lengths, held, format, lanes, rows)
    return place_sealed_ref(table, lengths, held, format, lanes, rows)


def place_sealed_ref(table: Tensor, lengths: Tensor, held: Tensor, format: KvFormat, lanes: int, rows: int) -> Placed:
    """The definition."""
    positions = (lengths - 1).clamp_min(0)
    sealed = torch.maximum((positions - format.recent).clamp_min(0) // format.page, held[1])
    tail = torch.where(lengths > 0, held[0], lanes)
    places = (tail * format.tail_tokens + positions - sealed * format.page).long()
    own = (lanes + 1) * format.tail_tokens
    behind = torch.arange(own, own + rows - len(lengths), device=places.device)
    return Placed(SealedPlan(table, sealed, lengths.clamp_min(1), tail), torch.cat((places, behind)), positions)
