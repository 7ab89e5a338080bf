"""Steps in few fixed layouts, so that each can be recorded once: decode rows and then prompt rows, each padded to a bucket.

Where a row's keys lie is read on the device, from tables at addresses that never change. Plans that fit no layout (too many
chunks, too many rows) are filled as any step is.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

import torch

from forefetch.device import upload
from forefetch.kernels.attention import ChunkPlan, fill_blocks
from forefetch.kernels.attention.chunks import BLOCK
from router_service.batch import PrefillRows, StepBatch, StepBuffers, chunk_rows
from router_service.pages import SCRATCH
from router_service.scheduler import Plan

CHUNKS = 8  # prompts that a recorded step may work on


class LayoutBuffers(StepBuffers):
    """StepBuffers whose steps have one of `layouts`. `chunk_rows`: ascending numbers of prompt rows that are padded to."""

    def __init__(
        self,
        *,
        max_tokens: int,
        max_batch: int,
        max_pages: int,
        page_size: int,
        device: torch.device,
        buckets: Sequence[int],
        chunk_rows: Sequence[int],
    ) -> None:
        """`buckets` are those of decode rows; more than max_batch rows are not recorded."""
        sizes = {"max_batch": max_batch, "max_pages": max_pages, "page_size": page_size}
        room = max_tokens + max(buckets)
        self._most_blocks = max(chunk_rows, default=0) // BLOCK + CHUNKS
        words = 4 * self._most_blocks + CHUNKS * (5 + max_pages)
        super().__init__(max_tokens=room, **sizes, device=device, buckets=buckets, paged=True, chunk_words=words)
        self.decode_rows = tuple(rows for rows in self.buckets if rows <= self.max_batch)
        self.chunk_rows = tuple(chunk_rows)

    def layouts(self) -> Iterator[tuple[int, int]]:
        """(decode rows, prompt rows), those that take most memory first."""
        for prompt in (*reversed(self.chunk_rows), 0):
            for decodes in reversed(self.decode_rows):
                yield decodes, prompt

    def unrecorded(self) -> None:
        """Nobody will record steps: prompt rows are padded to nothing."""
        self.chunk_rows = ()

    def fill(self, step: int, plan: Plan, trace: bytes = b"") -> StepBatch:
        """The plan as tensors, valid until the next fill."""
        count = sum(chunk.count for chunk in plan.prefills)
        prompt = next((rows for rows in self.chunk_rows if rows >= count), 0)
        decodes = next((rows for rows in self.decode_rows if rows >= len(plan.decodes)), 0)
        if not plan.prefills or not prompt or not decodes or len(plan.prefills) > CHUNKS:
            return super().fill(step, plan, trace)
        return replace(self._mixed(step, plan, decodes, prompt), trace=trace)

    def idle(self, decodes: int, prompt: int) -> StepBatch:
        """A step of a layout that does nothing: what is recorded."""
        return self._mixed(0, Plan((), ()), decodes, prompt)

    def _mixed(self, step: int, plan: Plan, decodes: int, prompt: int) -> StepBatch:
        """A plan in a layout that it fits."""
        rows = self._turn()
        total, at = decodes + prompt, decodes
        rows[:3, :total] = 0
        rows[2, :total] = SCRATCH * self.page_size
        rows[3, : decodes + CHUNKS] = 0
        rows[3, :decodes] = range(decodes)
        held = self._place_decodes(plan)
        prefills, picks = [], list(range(len(plan.decodes)))
        for index, chunk in enumerate(plan.prefills):
            self._place(rows[:, at : at + chunk.count], chunk)
            prefills.append(chunk_rows(at, chunk))
            at += chunk.count
            rows[3, decodes + index] = at - 1
            if chunk.samples:
                picks.append(decodes + index)
        chosen = decodes + (CHUNKS if prompt else 0)
        batch = self._batch(step, plan, at, total, tuple(prefills), chosen, held)
        chunked = self._chunk_plan(prefills, decodes, prompt) if prompt else None
        return replace(self._paged_rows(batch, decodes), chunked=chunked, picks=self._picks(picks))

    def _chunk_plan(self, prefills: Sequence[PrefillRows], decodes: int, prompt: int) -> ChunkPlan:
        """Blocks and pages of the chunks on the device; rows are counted from the first prompt row."""
        host, width = self._staging.chunks, self._table.shape[1]
        blocks, first = prompt // BLOCK + CHUNKS, 4 * self._most_blocks
        behind = first + 5 * CHUNKS
        whose, table = host[first:behind].view(CHUNKS, 5), host[behind:].view(CHUNKS, width)
        whose.zero_()
        for index, chunk in enumerate(prefills):
            table[index, : len(chunk.pages)] = torch.tensor(chunk.pages, dtype=torch.int32)
            whose[index] = torch.tensor(chunk.place(decodes), dtype=torch.int32)
        cut = [(chunk.first - decodes, chunk.count, chunk.start) for chunk in prefills]
        if not fill_blocks(host[: 4 * blocks].view(-1, 4), cut):
            raise AssertionError("a chunk has at most one block that is not full")
        self._chunks.copy_(host, non_blocking=True)
        there = self._chunks
        return ChunkPlan(
            there[: 4 * blocks].view(-1, 4), there[behind:].view(CHUNKS, width), there[first:behind].view(CHUNKS, 5)
        )

    def _picks(self, picks: list[int]) -> torch.Tensor:
        return upload(torch.tensor(picks, dtype=torch.int64), self._rows.device)
