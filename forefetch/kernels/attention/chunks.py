"""Attention of prompt chunks whose places are read on the device, so that a captured graph can replay it.

Rows of a step's chunks are cut into blocks of at most BLOCK rows of one chunk. What a block is stands in a table on the
device: a launch of fixed size serves any mixture of chunks, and blocks without rows end at once.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

BLOCK = 64


@dataclass(frozen=True, slots=True)
class ChunkPlan:
    """All int32. blocks [NB, 4]: first row, rows (0: idle), position of the first row, chunk; tables [M, P]: pages of a chunk.

    chunks [M, 5], which only sealed pages need: first row, its position, the request's entry among tails and sinks, pages that
    a cached prefix brought, rows (0: idle)."""

    blocks: Tensor
    tables: Tensor
    chunks: Tensor


def prefill_chunks(q: Tensor, k_pool: Tensor, v_pool: Tensor, plan: ChunkPlan, scale: float) -> Tensor:
    """q [C, Hq, D] over pools [Hkv, pages, R, D] -> [C, Hq, D]; causal. Rows in no block come out as anything.

    K and V of the rows themselves must already be in the pool. Nothing is read on the host when q is on a GPU.
    """
    if q.is_cuda:
        from forefetch.kernels.attention import triton_chunks

        return triton_chunks.prefill_chunks(q, k_pool, v_pool, plan.blocks, plan.tables, scale, most_rows=BLOCK)
    from forefetch.kernels.attention.cpu import prefill

    out = torch.zeros_like(q)
    for first, count, start, row in plan.blocks.tolist():
        if count:
            span = slice(first, first + count)
            out[span] = prefill(q[span], k_pool, v_pool, plan.tables[row].tolist(), start, scale)
    return out


def fill_blocks(blocks: Tensor, chunks: list[tuple[int, int, int]]) -> bool:
    """Cuts chunks (first row, rows, position of the first) into `blocks` [NB, 4] on the host; False when they do not fit."""
    cut = [
        (first + at, min(BLOCK, count - at), start + at, row)
        for row, (first, count, start) in enumerate(chunks)
        for at in range(0, count, BLOCK)
    ]
    if len(cut) > len(blocks):
        return False
    blocks.zero_()
    if cut:
        blocks[: len(cut)] = torch.tensor(cut, dtype=torch.int32)
    return True
