"""Prompt chunks over sealed pages: what they write (`enter_chunks`) and what they see (`prefill_sealed`), planned on the
device, so that a captured graph can replay both.

A chunk's queries see the pages that are sealed for their positions (`KvFormat.sealed_pages`, or as many as a cached prefix
brought), the first tokens from the sink block, and float16 tokens: those before the chunk from the request's tail, the chunk's
own from the rows of the step. The tail holds the positions from the first that was not sealed there up to the chunk. Rows lie
in the memory of the tails, behind those of the requests (`Rows`), so that a page's tokens are slots of one tensor wherever they
are.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from forefetch.kernels.attention.chunks import BLOCK, ChunkPlan, fill_blocks
from forefetch.kernels.attention.sealed import Rows, SealedKv
from forefetch.kernels.kv_codec import seal
from forefetch.kernels.kv_codec.formats import KvFormat


def plan_chunks(chunks: list[tuple[int, int, int, int, int]], pages: list[list[int]]) -> ChunkPlan:
    """The plan, on the host, of chunks as `ChunkPlan.chunks` has them, and the pages of each."""
    blocks = torch.zeros((sum(-(-count // BLOCK) for *_, count in chunks), 4), dtype=torch.int32)
    fill_blocks(blocks, [(first, count, start) for first, start, _, _, count in chunks])
    tables = torch.zeros((len(chunks), max(map(len, pages), default=1)), dtype=torch.int32)
    for row, numbers in zip(tables, pages, strict=True):
        row[: len(numbers)] = torch.tensor(numbers, dtype=torch.int32)
    return ChunkPlan(blocks, tables, torch.tensor(chunks, dtype=torch.int32).view(-1, 5))


def enter_chunks(kv: SealedKv, rows: Rows, plan: ChunkPlan, format: KvFormat, most: int) -> None:
    """Rows of the plan's chunks, which are in place, become sinks and pages wherever their queries see them as such.

    `most`: pages that the chunks can fill at most. Nothing is read on the host when pages are on a GPU."""
    if kv.pages.is_cuda:
        from forefetch.kernels.attention import triton_sealed_chunks
        from forefetch.kernels.kv_codec import sealing

        triton_sealed_chunks.put_sinks(rows, plan, format)
        if most:
            sealing.seal_chunks(rows.tails, kv.pages, plan.chunks, plan.tables, rows.lanes, most, format)
        return
    for chunk in _chunks(rows, plan, format):
        if (count := min(chunk.end, format.sinks) - chunk.start) > 0:
            rows.sinks[:, :, chunk.lane, chunk.start : chunk.start + count] = chunk.own[:, :, :count]
        for index in range(chunk.before, chunk.after):
            span = slice((index - chunk.before) * format.page, (index - chunk.before + 1) * format.page)
            k, v = chunk.fresh[:, :, span]
            kv.pages[:, chunk.pages[index]] = seal(k, v, format, skip=0 if index else format.sinks)


def prefill_sealed(q: Tensor, rows: Rows, kv: SealedKv, plan: ChunkPlan, format: KvFormat, scale: float) -> Tensor:
    """q [C, Hq, D] -> [C, Hq, D]; causal. Rows in no chunk come out as anything.

    Pages that a query reads sealed must be sealed. Nothing is read on the host when q is on a GPU."""
    if q.is_cuda:
        from forefetch.kernels.attention.triton_sealed_chunks import prefill_sealed_chunks

        return prefill_sealed_chunks(q, rows.own[0], rows.own[1], kv, plan, format, scale)
    from forefetch.kernels.attention.sealed_cpu import prefill_sealed_cpu

    out = torch.zeros_like(q)
    for chunk in _chunks(rows, plan, format):
        span, pages = slice(chunk.first, chunk.first + chunk.end - chunk.start), chunk.pages[: chunk.after].long().to(q.device)
        k, v = chunk.fresh
        out[span] = prefill_sealed_cpu(q[span], k, v, pages, kv, chunk.lane, chunk.start, format, scale, loaded=chunk.loaded)
    return out


@dataclass(frozen=True, slots=True)
class _Chunk:
    """A chunk as the host sees it. `own`: its rows [2, Hkv, count, D]; `fresh`: those behind the request's tail; `pages` [P].

    `before`, `after`: how many pages are sealed at its start and at its end."""

    first: int
    start: int
    end: int
    lane: int
    loaded: int
    before: int
    after: int
    pages: Tensor
    own: Tensor
    fresh: Tensor


def _chunks(rows: Rows, plan: ChunkPlan, format: KvFormat) -> Iterator[_Chunk]:
    for (first, start, lane, loaded, count), pages in zip(plan.chunks.tolist(), plan.tables, strict=True):
        if not count:
            continue
        before, after = (max(format.sealed_pages(position), loaded) for position in (start, start + count))
        own = rows.own[:, :, first : first + count]
        fresh = torch.cat((rows.tails[:, :, lane, : start - before * format.page], own), 2)
        yield _Chunk(first, start, start + count, lane, loaded, before, after, pages, own, fresh)
