"""K and V of running requests as sealed pages: a few bits per element, decoded inside attention.

What a request holds per layer and KV head (`forefetch/kernels/attention/sealed.py` is the exact rule):

    pages    blobs in the pool, one per full page older than the format's `recent` tokens; the bytes that the KV service gets
    tail     float16, the tokens that no page holds yet, at most page + recent
    sinks    float16, its first tokens, which attention never reads from page 0

Which tokens a query reads sealed depends on its position alone (`KvFormat.sealed_pages`), and on how many pages a cached
prefix brought; never on chunks, batches or replays. A step is all or nothing: running it writes sinks, tail places at its own
positions and whole pages, all of which a replay writes again; only `commit` moves a tail, and it runs once a step can no longer
fail. A request's tail and sinks are its `lane`, a number below the largest batch that the scheduler gives out.

Layers that are exempt keep float16 pages in a cache of their own, under the same page numbers.
What a step does with it: `sealed_step.py`. Letters: L sealed layers, S sinks, R rows of a step; the others as everywhere.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection, Sequence
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from forefetch.device import upload
from forefetch.kernels.attention import ChunkPlan, Rows, plan_chunks
from forefetch.kernels.attention.sealed import SealedKv, SealedPlan
from forefetch.kernels.attention.sealed_plan import Placed, place_sealed
from forefetch.kernels.kv_codec import KvFormat, move_tails, seal_tails
from forefetch.spec import ModelSpec
from kv_service.client import Pool
from router_service.batch import PrefillRows, StepBatch
from router_service.cache import KvCache, Place, no_place, room
from router_service.pages import SCRATCH
from router_service.sealed_step import SealedStep

HALF = torch.float16


class SealedCache:
    """`pages` pages and `lanes` lanes; steps have at most `max_rows` rows."""

    def __init__(
        self,
        spec: ModelSpec,
        format: KvFormat,
        *,
        exempt: Collection[int] = (),
        pages: int,
        lanes: int,
        max_rows: int,
        device: torch.device,
    ) -> None:
        self.format, self.page_size, self.dtype, self.lanes = format, format.page, HALF, lanes
        self.place = {layer: i for i, layer in enumerate(i for i in range(spec.layers) if i not in exempt)}
        self.exempt = {layer: i for i, layer in enumerate(sorted(exempt))}
        rest = replace(spec, layers=len(self.exempt))
        self.exact = KvCache(rest, pages=pages, page_size=format.page, dtype=HALF, device=device)
        heads, dim, layers = spec.kv_heads, spec.head_dim, len(self.place)
        self.pages = torch.zeros((layers, heads, pages, format.blob_bytes), dtype=torch.uint8, device=device)
        # One lane more than requests: idle rows of padded steps write there. Prompt rows lie behind it until commit.
        entries = lanes + 1 + _row_entries(format, max_rows)
        self._tails = torch.zeros((layers, 2, heads, entries, format.tail_tokens, dim), dtype=HALF, device=device)
        self._sinks = torch.zeros((layers, 2, heads, entries, format.sinks, dim), dtype=HALF, device=device)
        self.tails, self.sinks = self._tails[:, :, :, : lanes + 1], self._sinks[:, :, :, : lanes + 1]
        self.rows = self._tails[:, :, :, lanes + 1 :].flatten(3, 4)
        self.block_bytes = self.page_bytes(spec, format, exempt)
        self.pool: Pool | None = None
        self.most_block_bytes = self.block_bytes + self.sinks[:, :, :, 0].nbytes
        self._void: Tensor | None = None
        self._nothing = torch.tensor([lanes, SCRATCH, 0], dtype=torch.int32, device=device)
        self._loaded: set[int] = set()  # first pages whose sinks no lane has taken yet
        self._first: OrderedDict[int, Tensor] = (
            OrderedDict()
        )  # page -> sinks [L, 2, Hkv, S, D] of the request that begins there
        if device.type == "cuda":  # kernels are compiled now, not when the first page is due
            self._launch([(lanes, SCRATCH, False)])

    @staticmethod
    def page_bytes(spec: ModelSpec, format: KvFormat, exempt: Collection[int]) -> int:
        """Bytes of one block: a page of every layer and head, K and V. A request's first block has its sinks behind them."""
        plain = 2 * format.page * spec.head_dim * HALF.itemsize
        return spec.kv_heads * (len(exempt) * plain + (spec.layers - len(exempt)) * format.blob_bytes)

    @staticmethod
    def lane_bytes(spec: ModelSpec, format: KvFormat, exempt: Collection[int]) -> int:
        """Bytes of one request's tail and sinks, and of the copies of sinks that the KV service is sent."""
        tokens = format.tail_tokens + (1 + COPIES) * format.sinks
        return tokens * (spec.layers - len(exempt)) * spec.kv_heads * 2 * spec.head_dim * HALF.itemsize

    @staticmethod
    def rows_bytes(spec: ModelSpec, format: KvFormat, exempt: Collection[int], max_rows: int) -> int:
        """Bytes that the rows of the largest step take until they are committed."""
        tokens = _row_entries(format, max_rows) * (format.tail_tokens + format.sinks)
        return tokens * (spec.layers - len(exempt)) * spec.kv_heads * 2 * spec.head_dim * HALF.itemsize

    def layer(self, place: int) -> SealedKv:
        """One sealed layer as kernels take it."""
        tails, sinks = self._tails[place], self._sinks[place]
        return SealedKv(self.pages[place], tails[0], tails[1], sinks[0], sinks[1])

    def layer_rows(self, place: int) -> Rows:
        """The same memory, a step's prompt rows in it."""
        return Rows(self._tails[place], self._sinks[place], self.lanes + 1)

    def sealed(self, position: int, loaded: int) -> int:
        """How many pages a query at `position` reads sealed, if the request's first `loaded` pages were."""
        return max(self.format.sealed_pages(position), loaded)

    # ---- a step ----

    def step(self, batch: StepBatch, dtype: torch.dtype, scale: float) -> SealedStep:
        """The attention of a step's rows."""
        exact = self.exact.step(batch, dtype, scale) if self.exempt else None
        self.prepare(batch)
        chunks, most = self._chunks(batch)
        plan, places, positions = self._paged_plan(batch) if batch.paged is not None else self._listed_plan(batch)
        early = None if self.recordable(batch) else positions < self.format.sinks
        return SealedStep(self, batch, plan, places, positions, early, chunks, most, exact, scale)

    def prepare(self, batch: StepBatch) -> None:
        """The first chunk behind a cached prefix brings the sinks that came with it into its lane."""
        for rows in batch.prefills:
            page = rows.pages[0]
            if rows.loaded and page in self._loaded and rows.start == rows.loaded * self.page_size:
                self.sinks[:, :, :, rows.lane] = self._first[page].to(self.sinks.device)

    def recordable(self, batch: StepBatch) -> bool:
        """Unless a decode row still writes sinks."""
        return min(batch.lengths, default=self.format.sinks + 1) > self.format.sinks

    def _listed_plan(self, batch: StepBatch) -> Placed:
        """What decode rows read and write, from the host's lists."""
        device, positions = self.pages.device, [length - 1 for length in batch.lengths]
        sealed = [self.sealed(at, loaded) for at, loaded in zip(positions, batch.loaded, strict=True)]
        numbers = torch.tensor([sealed, batch.lengths, batch.lanes, positions], dtype=torch.int32).to(device)
        plan = SealedPlan(batch.page_table.int().to(device), numbers[0], numbers[1], numbers[2])
        places = numbers[2] * self.format.tail_tokens + numbers[3] - numbers[0] * self.page_size
        return Placed(plan, places.long(), numbers[3])

    def _paged_plan(self, batch: StepBatch) -> Placed:
        """The same worked out on the device: nothing depends on the host. Idle rows have a lane of their own."""
        assert batch.paged is not None
        assert batch.held is not None
        rows = batch.decodes + (batch.layout[1] if batch.chunked is not None else 0)
        return place_sealed(batch.paged.table, batch.paged.lengths, batch.held, self.format, self.lanes, rows)

    def _chunks(self, batch: StepBatch) -> tuple[ChunkPlan | None, int]:
        """Prompt rows as kernels take them, and how many pages they fill at most."""
        if batch.chunked is not None:
            return batch.chunked, batch.layout[1] // self.page_size + len(batch.chunked.chunks)
        if not batch.prefills:
            return None, 0
        plan = plan_chunks([rows.place(batch.decodes) for rows in batch.prefills], [rows.pages for rows in batch.prefills])
        filled = sum(self.sealed(r.start + r.count, r.loaded) - self.sealed(r.start, r.loaded) for r in batch.prefills)
        return ChunkPlan(*(part.to(self.pages.device) for part in (plan.blocks, plan.tables, plan.chunks))), filled

    def commit(self, batch: StepBatch) -> None:
        """The step's rows are final: pages that became old enough are sealed, tails move on."""
        due = []
        for row, length in enumerate(batch.lengths):
            loaded = batch.loaded[row]
            before, after = self.sealed(length - 1, loaded), self.sealed(length, loaded)
            if after > before:
                due.append((batch.lanes[row], int(batch.page_table[row, before]), before))
        if due:
            self._seal_tails(due)
        for rows in batch.prefills:
            self._commit_chunk(rows, batch.decodes)

    def heed(self, void: Tensor) -> None:
        """While `void`, int32 [1] on the device, is not 0, no commit of decode rows seals a page or moves a tail."""
        self._void = void

    def _seal_tails(self, due: list[tuple[int, int, int]]) -> None:
        """(lane, page number, its index in the request): each lane's tail begins with a full page."""
        self._launch([(lane, page, index == 0) for lane, page, index in due])
        for lane, page, index in due:
            self._remember(page, None if index else self.sinks[:, :, :, lane])

    def _launch(self, due: list[tuple[int, int, bool]]) -> None:
        """(lane, page number, whether it is a request's first), without waiting for the device: the step that is launched next
        must not be held up."""
        table = [(lane, page, self.format.sinks * first) for lane, page, first in due]
        there = upload(torch.tensor(table, dtype=torch.int32), self.pages.device)
        if self._void is not None:
            there = torch.where(self._void != 0, self._nothing, there)
        seal_tails(self.tails, self.pages, there, self.format)
        move_tails(self.tails, there, self.format)

    def _commit_chunk(self, rows: PrefillRows, decodes: int) -> None:
        """What of the tail and the chunk no page holds becomes the tail."""
        end, first = rows.start + rows.count, rows.first - decodes
        before, after = self.sealed(rows.start, rows.loaded), self.sealed(end, rows.loaded)
        tail, low, edge = self.tails[:, :, :, rows.lane], before * self.page_size, after * self.page_size
        held = max(0, rows.start - max(low, edge))  # of the old tail, what stays
        if held and edge > low:
            tail[:, :, :, :held] = tail[:, :, :, edge - low : edge - low + held].clone()
        own = self.rows[:, :, :, first + max(0, edge - rows.start) : first + rows.count]
        tail[:, :, :, end - edge - own.shape[3] : end - edge] = own
        for index in range(before, after):
            self._remember(rows.pages[index], self.sinks[:, :, :, rows.lane] if index == 0 else None)
        if rows.loaded:
            self._loaded.discard(rows.pages[0])

    def _remember(self, page: int, sinks: Tensor | None) -> None:
        """Sinks of the request whose first page this is; None: it is not a first page."""
        self._first.pop(page, None)
        if sinks is not None and self.format.sinks:
            self._first[page] = sinks.clone()  # on the device: its bytes are fetched by whoever wants them
            while len(self._first) > COPIES * self.lanes:
                self._first.popitem(last=False)

    # ---- blocks ----

    def read_block(self, page: int, place: Place = no_place) -> memoryview:
        """The bytes of a sealed block: blobs [L, Hkv], then exempt layers as KvCache has them, then, if it is a request's first
        block, its sinks [L, K V, Hkv, S, D]. Any thread."""
        parts = [self.pages[:, :, page].contiguous().cpu().numpy().ravel()]
        if self.exempt:
            parts.append(np.frombuffer(self.exact.read_block(page), np.uint8))
        if (sinks := self._first.get(page)) is not None:
            parts.append(sinks.cpu().numpy().ravel().view(np.uint8))
        data, told = room(sum(part.nbytes for part in parts), place)
        np.concatenate(parts, out=data)
        return told

    def write_block(self, page: int, data: bytes | memoryview) -> None:
        """The inverse of `read_block`. Any thread; nobody reads the page meanwhile. ValueError: not the length of a block."""
        blobs = self.pages[:, :, page]
        sinks = self.sinks[:, :, :, 0]
        extra = sinks.numel() * HALF.itemsize
        if len(data) not in (self.block_bytes, self.block_bytes + extra):
            raise ValueError(f"a block has {self.block_bytes} bytes, a first one {extra} more, not {len(data)}")
        raw = torch.frombuffer(bytearray(data), dtype=torch.uint8)
        with torch.inference_mode():
            blobs.copy_(raw[: blobs.numel()].view(blobs.shape))
        if self.exempt:
            self.exact.write_block(page, data[blobs.numel() : self.block_bytes])
        first = raw[self.block_bytes :]
        self._remember(page, first.view(HALF).view(sinks.shape) if len(first) else None)
        if len(first):
            self._loaded.add(page)

    # ---- tails of sessions ----

    def tail_start(self, computed: int, loaded: int) -> int:
        """Where the tokens begin that no block holds, of a request with so many positions computed and pages loaded."""
        return self.sealed(computed, loaded) * self.page_size

    def read_tail(self, pages: Sequence[int], lane: int, start: int, end: int) -> Tensor:
        """A request's tail [L, K V, Hkv, end - start, D] and sinks, then what exempt layers have of these positions: a copy,
        flat, uint8, on the device."""
        parts = [self.tails[:, :, :, lane, : end - start], self.sinks[:, :, :, lane]]
        flat = [part.reshape(-1).view(torch.uint8) for part in parts]
        return torch.cat([*flat, self.exact.read_tail(pages, lane, start, end).to(self.pages.device)])

    def write_tail(self, pages: Sequence[int], lane: int, start: int, end: int, data: bytes) -> None:
        """The inverse of `read_tail`, between two steps. ValueError: not the bytes of so many positions."""
        tail, sinks = self.tails[:, :, :, lane, : end - start], self.sinks[:, :, :, lane]
        sizes = [tail.numel() * HALF.itemsize, sinks.numel() * HALF.itemsize]
        exact = (end - start) * self.exact.block_bytes // self.page_size
        if len(data) != sum(sizes) + exact:
            raise ValueError(f"{end - start} positions do not take {len(data)} bytes")
        raw = torch.frombuffer(bytearray(data), dtype=torch.uint8)
        tail.copy_(raw[: sizes[0]].view(HALF).view(tail.shape))
        sinks.copy_(raw[sizes[0] : sum(sizes)].view(HALF).view(sinks.shape))
        if self.exempt:
            self.exact.write_tail(pages, lane, start, end, data[sum(sizes) :])
        self._loaded.discard(pages[0])  # its sinks are there


COPIES = 2
"""Sinks kept per lane for the KV service: of the request that runs there, and of one whose pages are still being copied."""


def _row_entries(format: KvFormat, max_rows: int) -> int:
    """Tails' worth of memory that so many rows take."""
    return -(-max_rows // format.tail_tokens)
