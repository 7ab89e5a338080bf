"""A step's rows as tensors: built on the host from the plan, moved to the device in one copy.

Buffers are static, one set for the largest step, and a step uses views of a bucketed length: the addresses that a captured
graph would replay from stay the same from step to step. Rows beyond the plan's tokens are padding: token 0 at position 0,
written to the scratch page, sent to no worker.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import torch

from forefetch.kernels.attention import ChunkPlan, PagedPlan
from forefetch.kernels.staged import LINES, bring
from router_service.pages import SCRATCH
from router_service.scheduler import Chunk, Plan

Held = tuple[list[int], list[int], list[int]]
"""Of each decode row: positions it may attend to, lane, loaded pages."""


@dataclass(frozen=True)
class PrefillRows:
    """Rows first .. first + count hold consecutive prompt positions from `start` of a request with `pages`.

    `lane`: the request's number among the running ones. `loaded`: how many of its first pages came from a cache."""

    first: int
    count: int
    start: int
    pages: list[int]
    lane: int = 0
    loaded: int = 0

    def place(self, decodes: int) -> tuple[int, int, int, int, int]:
        """Its row of `ChunkPlan.chunks`, rows counted from behind the step's `decodes`."""
        return self.first - decodes, self.start, self.lane, self.loaded, self.count


@dataclass(frozen=True)
class StepBatch:
    """T rows (padded to a bucket): `decodes` rows of one token each, then the chunks of prompts."""

    step: int
    tokens: int  # real rows; the rest is padding
    decodes: int
    token_ids: torch.Tensor  # [T] int64
    positions: torch.Tensor  # [T] int64
    slots: torch.Tensor  # [T] int64: page * page_size + offset
    page_table: torch.Tensor  # [decodes, pages] int64, on the host: attention plans with it
    lengths: list[int]  # per decode row: positions it may attend to
    prefills: tuple[PrefillRows, ...]
    logit_rows: torch.Tensor  # [S] int64: rows that choose a token
    trace: bytes = b""  # span context of a sampled step, as frames carry it
    paged: PagedPlan | None = None  # the decode rows' pages and lengths on the device, for kernels that read them there
    chunked: ChunkPlan | None = None  # the same for prompt rows; decode rows are padded then, and prompt rows come behind
    picks: torch.Tensor | None = None  # [S] which of `logit_rows` choose a token, if not all of them do
    lanes: list[int] = field(default_factory=list)  # per decode row, see PrefillRows
    loaded: list[int] = field(default_factory=list)
    held: torch.Tensor | None = None  # [2, decodes] int32 beside `paged`: lanes and loaded pages, on the device

    @property
    def layout(self) -> tuple[int, int]:
        """Decode rows and prompt rows, padding included."""
        return self.decodes, len(self.token_ids) - self.decodes

    def part(self, first: int, count: int) -> StepBatch:
        """Rows first .. first + count of a step that only decodes, as a step. Real rows come first in each, as in the whole."""
        rows, decodes = slice(first, first + count), max(0, min(count, self.decodes - first))
        return replace(
            self,
            tokens=max(0, min(count, self.tokens - first)),
            decodes=decodes,
            token_ids=self.token_ids[rows],
            positions=self.positions[rows],
            slots=self.slots[rows],
            page_table=self.page_table[rows],
            lengths=self.lengths[rows],
            lanes=self.lanes[rows],
            loaded=self.loaded[rows],
            paged=None if self.paged is None else PagedPlan(self.paged.table[rows], self.paged.lengths[rows]),
            held=None if self.held is None else self.held[:, rows],
        )

    def without(self, rows: Collection[int]) -> StepBatch:
        """What `Cache.commit` sees of the step without some of its decode rows."""
        kept = [row for row in range(len(self.lengths)) if row not in rows]
        lists = ([part[row] for row in kept] for part in (self.lengths, self.lanes, self.loaded))
        lengths, lanes, loaded = lists
        return replace(self, lengths=lengths, lanes=lanes, loaded=loaded, page_table=self.page_table[kept])


@dataclass(frozen=True)
class Staging:
    """One set of host memory that steps are put together in. `rows`: `kernels.staged.LINES`. `told`: what the step chooses."""

    rows: torch.Tensor  # [8, T] int64
    table: torch.Tensor  # [B, pages] int32: the pages of decode rows, brought when they changed
    chunks: torch.Tensor  # int32, flat: of fixed layouts
    told: torch.Tensor  # [B] int64


class StepBuffers:
    """Static staging and device buffers. `buckets`: ascending row counts that steps are padded to; empty: no padding.

    `paged`: decode rows' pages and lengths go to the device too, where idle rows of a padded step have length 0. Staging is
    double: a step may be filled while the one before is still being copied; the device's buffers follow the stream.
    """

    def __init__(
        self,
        *,
        max_tokens: int,
        max_batch: int,
        max_pages: int,
        page_size: int,
        device: torch.device,
        buckets: Sequence[int],
        paged: bool = False,
        chunk_words: int = 0,
    ) -> None:
        self.page_size = page_size
        self.buckets = (*(b for b in buckets if b < max_tokens), max_tokens) if buckets else ()
        max_batch = self.max_batch = next((b for b in self.buckets if b >= max_batch), max_batch)  # as it is padded
        pinned = device.type == "cuda"
        self._paged, width = paged, max(max_tokens, max_batch)
        self._stagings = [
            Staging(
                torch.zeros((len(LINES), width), dtype=torch.int64, pin_memory=pinned),
                torch.zeros((max_batch if paged else 0, max_pages), dtype=torch.int32, pin_memory=pinned),
                torch.zeros(chunk_words, dtype=torch.int32, pin_memory=pinned),
                torch.zeros(max_batch, dtype=torch.int64, pin_memory=pinned),
            )
            for _ in range(2)
        ]
        self._staging = self._stagings[0]
        self._table = torch.zeros((max_batch, max_pages), dtype=torch.int64)
        self._rows = torch.zeros((4, width), dtype=torch.int64, device=device)
        self._placed = torch.zeros((3, max_batch if paged else 0), dtype=torch.int32, device=device)
        self._there = torch.zeros_like(self._staging.table, device=device)
        self._chunks = torch.zeros_like(self._staging.chunks, device=device)
        self.chosen = torch.zeros(max_batch, dtype=torch.int64, device=device)
        """What the last launched step chooses, in the order of its choices; `fill` reads it for ids that are owed."""
        self._tabled: list[tuple[int, ...]] = [()] * max_batch  # whose pages each row of the table holds
        self._stale = False  # the device's table is behind

    @property
    def landing(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Where the choice of the step that was filled last goes: `chosen`, and host memory that is its own until the next step
        but one is filled."""
        return self.chosen, self._staging.told

    def fill(self, step: int, plan: Plan, trace: bytes = b"") -> StepBatch:
        """The plan as tensors; they are valid until the next fill."""
        rows = self._turn()
        held = self._place_decodes(plan)
        at, prefills, logit_rows = len(plan.decodes), [], list(range(len(plan.decodes)))
        for chunk in plan.prefills:
            end = at + chunk.count
            self._place(rows[:, at:end], chunk)
            prefills.append(chunk_rows(at, chunk))
            if chunk.samples:
                logit_rows.append(end - 1)
            at = end
        padded = next((b for b in self.buckets if b >= at), at)
        rows[:3, at:padded] = 0
        rows[2, at:padded] = SCRATCH * self.page_size
        rows[3, : len(logit_rows)] = logit_rows
        batch = self._batch(step, plan, at, padded, tuple(prefills), len(logit_rows), held)
        if self._paged:
            batch = self._paged_rows(batch, len(batch.lengths) if prefills else padded)
        return replace(batch, trace=trace) if trace else batch

    def _turn(self) -> np.ndarray:
        """The other staging's rows."""
        self._staging = self._stagings[self._staging is self._stagings[0]]
        return self._staging.rows.numpy()

    def _paged_rows(self, batch: StepBatch, count: int) -> StepBatch:
        """The step with `count` decode rows, idle ones behind the real, whose places are read on the device."""
        if self._stale:
            self._stale = False
            self._staging.table.copy_(self._table)
            self._there.copy_(self._staging.table, non_blocking=True)
        placed = self._placed[:, :count]
        return replace(batch, decodes=count, paged=PagedPlan(self._there[:count], placed[0]), held=placed[1:])

    def _place_decodes(self, plan: Plan) -> Held:
        """Fills all lines of the decode rows, and the table where a row has another request than before. An id that is only
        known to the device, or not even there yet, is named by its source."""
        size, decodes = self.page_size, plan.decodes
        ids, sources = [], []
        for row, chunk in enumerate(decodes):
            request, pages = chunk.request, chunk.request.pages
            if self._tabled[row] is not pages:
                self._table.numpy()[row, : len(pages)] = pages
                self._tabled[row], self._stale = pages, True
            known = chunk.start < len(request.tokens)
            ids.append(request.tokens[chunk.start] if known else 0)
            sources.append(-1 if known else request.source)
        slots = [chunk.request.pages[chunk.start // size] * size + chunk.start % size for chunk in decodes]
        rows, n, held = self._staging.rows.numpy(), len(decodes), _held(plan)
        rows[:3, :n] = ids, [chunk.start for chunk in decodes], slots
        rows[4:, :n] = sources, *held
        rows[4, n:], rows[5:, n:] = -1, 0
        return held

    def _place(self, rows: np.ndarray, chunk: Chunk) -> None:
        """Fills ids, positions and slots of a prompt's chunk."""
        positions = np.arange(chunk.start, chunk.end)
        rows[0], rows[1] = chunk.request.tokens[chunk.start : chunk.end], positions
        pages = np.asarray(chunk.request.pages)
        rows[2] = pages[positions // self.page_size] * self.page_size + positions % self.page_size

    def _batch(
        self, step: int, plan: Plan, tokens: int, padded: int, prefills: tuple[PrefillRows, ...], sampled: int, held: Held
    ) -> StepBatch:
        """The staged rows on the device, ids that are owed taken from what the last step chose."""
        decodes = len(plan.decodes)
        lengths, lanes, loaded = held
        width = -(-max(lengths, default=1) // self.page_size)
        bring(self._staging.rows, self.chosen, self._rows, self._placed, max(padded, sampled))
        return StepBatch(
            step=step,
            tokens=tokens,
            decodes=decodes,
            token_ids=self._rows[0, :padded],
            positions=self._rows[1, :padded],
            slots=self._rows[2, :padded],
            page_table=self._table[:decodes, :width],
            lengths=lengths,
            prefills=prefills,
            logit_rows=self._rows[3, :sampled],
            lanes=lanes,
            loaded=loaded,
        )


def _held(plan: Plan) -> Held:
    requests = [chunk.request for chunk in plan.decodes]
    lengths = [chunk.start + 1 for chunk in plan.decodes]
    return lengths, [request.lane for request in requests], [request.loaded_blocks for request in requests]


def chunk_rows(first: int, chunk: Chunk) -> PrefillRows:
    """A chunk whose rows begin at `first`."""
    request = chunk.request
    return PrefillRows(first, chunk.count, chunk.start, list(request.pages), request.lane, request.loaded_blocks)
