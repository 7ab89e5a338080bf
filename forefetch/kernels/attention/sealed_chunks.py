"""Attention of prompt chunks over sealed pages, read on the device so that a captured graph can replay it.

A chunk's queries see the pages that were sealed for their positions (`KvFormat.sealed_pages`, or as many as a cached prefix
brought), the first tokens from the sink block, and float16 tokens: those before the chunk from the request's tail, the chunk's
own from `k` and `v`. Rows are cut into blocks as in `chunks.py`, whose tables these extend.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from forefetch.kernels.attention.chunks import fill_blocks
from forefetch.kernels.attention.sealed import SealedKv
from forefetch.kernels.kv_codec.formats import KvFormat

# Chunks of a step on a GPU by one launch. Right in Triton's interpreter, but never run on a GPU yet, so it waits for a green
# `pytest -m gpu`, which tries it; until then a chunk is what plain operations make of it.
ONE_LAUNCH = False


@dataclass(frozen=True, slots=True)
class SealedChunkPlan:
    """All int32, on the pages' device.

    `blocks` [NB, 4]: first row of q, rows (0: idle), position of the first row, chunk. `chunks` [M, 4]: row of `k` and `v` from
    which the chunk's tokens lie there; the position of that row; entry among tails and sinks; pages a cached prefix brought.
    `tables` [M, P]: page numbers. The tail holds the positions from the first that was not sealed there up to the chunk.
    """

    blocks: Tensor
    chunks: Tensor
    tables: Tensor


def prefill_sealed(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    pages: Tensor,
    kv: SealedKv,
    tail: int,
    start: int,
    format: KvFormat,
    scale: float,
    loaded: int = 0,
) -> Tensor:
    """One chunk: q [C, Hq, D] at positions start .. start + C - 1 -> [C, Hq, D]; causal.

    k, v [Hkv, m, D] float16: the request's tokens that were not sealed before the chunk, and the chunk's own, up to its last.
    `pages` [p]: its page numbers; those that a query reads sealed must be sealed.
    """
    if not (q.is_cuda and ONE_LAUNCH):
        from forefetch.kernels.attention.sealed_cpu import prefill_sealed_cpu  # plain operations, on any device

        return prefill_sealed_cpu(q, k, v, pages, kv, tail, start, format, scale, loaded)
    from forefetch.kernels.attention.chunks import BLOCK
    from forefetch.kernels.attention.triton_sealed_chunks import prefill_sealed_chunks

    blocks = torch.zeros((-(-len(q) // BLOCK), 4), dtype=torch.int32)
    fill_blocks(blocks, [(0, len(q), start)])
    chunk = torch.tensor([[0, start + len(q) - k.shape[1], tail, loaded]], dtype=torch.int32)
    table = pages.int()[None] if len(pages) else torch.zeros((1, 1), dtype=torch.int32, device=q.device)
    plan = SealedChunkPlan(blocks.to(q.device), chunk.to(q.device), table)
    return prefill_sealed_chunks(q, k, v, kv, plan, format, scale)
