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
Letters: L sealed layers, T tokens of a page, S sinks, R rows of a step; the others as everywhere.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from forefetch.kernels.attention import decode_sealed, prefill_sealed
from forefetch.kernels.attention.sealed import SealedKv, SealedPlan
from forefetch.kernels.kv_codec import KvFormat, seal
from forefetch.kernels.kv_codec.formats import SATURATION
from forefetch.kernels.qkv import HeadNorms, enter
from forefetch.spec import ModelSpec
from router_service.batch import PrefillRows, StepBatch
from router_service.cache import DenseStep, KvCache
from router_service.pages import SCRATCH

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
        # One lane more than requests: idle rows of padded steps write there.
        self.tails = torch.zeros((layers, 2, heads, lanes + 1, format.tail_tokens, dim), dtype=HALF, device=device)
        self.sinks = torch.zeros((layers, 2, heads, lanes + 1, format.sinks, dim), dtype=HALF, device=device)
        self.rows = torch.zeros((layers, 2, heads, max_rows, dim), dtype=HALF, device=device)
        self.block_bytes = self.page_bytes(spec, format, exempt)
        self._void: Tensor | None = None
        self._loaded: set[int] = set()  # first pages whose sinks no lane has taken yet
        self._first: OrderedDict[int, Tensor] = (
            OrderedDict()
        )  # page -> sinks [L, 2, Hkv, S, D] of the request that begins there

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
    def row_bytes(spec: ModelSpec, exempt: Collection[int]) -> int:
        """Bytes that one row of the largest step takes until it is committed."""
        return (spec.layers - len(exempt)) * spec.kv_heads * 2 * spec.head_dim * HALF.itemsize

    def layer(self, place: int) -> SealedKv:
        """One sealed layer as kernels take it."""
        tails, sinks = self.tails[place], self.sinks[place]
        return SealedKv(self.pages[place], tails[0], tails[1], sinks[0], sinks[1])

    def sealed(self, position: int, loaded: int) -> int:
        """How many pages a query at `position` reads sealed, if the request's first `loaded` pages were."""
        return max(self.format.sealed_pages(position), loaded)

    # ---- a step ----

    def step(self, batch: StepBatch, dtype: torch.dtype, scale: float) -> SealedStep:
        """The attention of a step's rows."""
        exact = self.exact.step(batch, dtype, scale) if self.exempt else None
        if batch.paged is not None and not batch.prefills:
            return self._device_step(batch, exact, scale)
        for rows in batch.prefills:
            self._take_sinks(rows)
        device, positions = self.pages.device, [length - 1 for length in batch.lengths]
        sealed = [self.sealed(at, loaded) for at, loaded in zip(positions, batch.loaded, strict=True)]
        offsets = [at - count * self.page_size for at, count in zip(positions, sealed, strict=True)]
        numbers = torch.tensor([sealed, batch.lengths, batch.lanes, offsets, positions], dtype=torch.int32).to(device)
        plan = SealedPlan(batch.page_table.int().to(device), numbers[0], numbers[1], numbers[2])
        places = (numbers[2] * self.format.tail_tokens + numbers[3]).long()
        early = numbers[4] < self.format.sinks if min(positions, default=self.format.sinks) < self.format.sinks else None
        return SealedStep(self, batch, plan, places, numbers[4].long(), early, exact, scale)

    def _device_step(self, batch: StepBatch, exact: DenseStep | None, scale: float) -> SealedStep:
        """A step of decode rows alone, whose places are worked out on the device: nothing depends on the host."""
        assert batch.paged is not None
        assert batch.held is not None
        lengths, format = batch.paged.lengths, self.format
        positions = (lengths - 1).clamp_min(0)
        sealed = torch.maximum((positions - format.recent).clamp_min(0) // format.page, batch.held[1])
        lanes = torch.where(lengths > 0, batch.held[0], self.lanes)
        places = (lanes * format.tail_tokens + positions - sealed * format.page).long()
        plan = SealedPlan(batch.paged.table, sealed, lengths.clamp_min(1), lanes)
        early = positions < format.sinks if not self.recordable(batch) else None
        return SealedStep(self, batch, plan, places, positions.long(), early, exact, scale)

    def recordable(self, batch: StepBatch) -> bool:
        """Unless a row still writes sinks."""
        return min(batch.lengths, default=self.format.sinks + 1) > self.format.sinks

    def _take_sinks(self, rows: PrefillRows) -> None:
        """The first chunk behind a cached prefix brings the sinks that came with it into its lane."""
        page = rows.pages[0]
        if rows.loaded and page in self._loaded and rows.start == rows.loaded * self.page_size:
            self.sinks[:, :, :, rows.lane] = self._first[page].to(self.sinks.device)

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
            self._commit_chunk(rows)

    def heed(self, void: Tensor) -> None:
        """While `void`, int32 [1] on the device, is not 0, no commit of decode rows seals a page or moves a tail."""
        self._void = void

    def _unless_void(self, numbers: Tensor, otherwise: int) -> Tensor:
        return numbers if self._void is None else numbers.masked_fill(self._void != 0, otherwise)

    def _seal_tails(self, due: list[tuple[int, int, int]]) -> None:
        """(lane, page number, its index in the request): each lane's tail begins with a full page."""
        size, recent = self.page_size, self.format.recent
        for first in (False, True):
            some = [(lane, page) for lane, page, index in due if (index == 0) == first]
            if some:
                chosen, numbers = self._there(list(zip(*some, strict=True)))
                k, v = (self.tails[:, kind][:, :, chosen, :size].flatten(0, 2) for kind in (0, 1))
                blobs = seal(k, v, self.format, skip=self.format.sinks if first else 0)
                self.pages[:, :, self._unless_void(numbers, SCRATCH)] = blobs.view(*self.pages.shape[:2], len(some), -1)
            for lane, page in some:
                self._remember(page, self.sinks[:, :, :, lane] if first else None)
        if recent:
            lanes = self._unless_void(self._there([[lane for lane, _, _ in due]])[0], self.lanes)
            self.tails[..., lanes, :recent, :] = self.tails[..., lanes, size : size + recent, :]

    def _there(self, numbers: Sequence[Sequence[int]]) -> Tensor:
        """Indices on the device, without waiting for it: the step that is launched next must not be held up."""
        there = torch.tensor(numbers, dtype=torch.int64, pin_memory=self.pages.is_cuda)
        return there.to(self.pages.device, non_blocking=True)

    def _commit_chunk(self, rows: PrefillRows) -> None:
        end = rows.start + rows.count
        before, after = self.sealed(rows.start, rows.loaded), self.sealed(end, rows.loaded)
        low, held = before * self.page_size, rows.start - before * self.page_size
        new = self.rows[:, :, :, rows.first : rows.first + rows.count]
        fresh = torch.cat((self.tails[:, :, :, rows.lane, :held], new), 3)[:, :, :, after * self.page_size - low :]
        self.tails[:, :, :, rows.lane, : fresh.shape[3]] = fresh
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

    def read_block(self, page: int) -> bytes:
        """The bytes of a sealed block: blobs [L, Hkv], then exempt layers as KvCache has them, then, if it is a request's first
        block, its sinks [L, K V, Hkv, S, D]. Any thread."""
        parts = [
            self.pages[:, :, page].contiguous().cpu().numpy().tobytes(),
            self.exact.read_block(page) if self.exempt else b"",
        ]
        if (sinks := self._first.get(page)) is not None:
            parts.append(sinks.cpu().numpy().tobytes())
        return b"".join(parts)

    def write_block(self, page: int, data: bytes) -> None:
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


@dataclass(frozen=True, slots=True)
class SealedStep:
    """What the layers of one step share. `places`: where decode rows go in the flattened tails; `early`: which are sinks."""

    cache: SealedCache
    batch: StepBatch
    plan: SealedPlan
    places: Tensor  # [decodes] int64
    positions: Tensor  # [decodes] int64
    early: Tensor | None  # [decodes] bool; None: none
    exact: DenseStep | None
    scale: float

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """q [R, Hq, D], k, v [R, Hkv, D] -> [R, Hq, D]. All rows are written first, so that a chunk sees itself."""
        place = self.cache.place.get(layer)
        if place is None:
            assert self.exact is not None
            return self.exact(self.cache.exempt[layer], q, k, v)
        new = torch.stack((k, v)).clamp_(-SATURATION, SATURATION).to(HALF).transpose(1, 2)  # [2, Hkv, R, D]
        out, n = torch.zeros_like(q), self.batch.decodes
        kv = self.cache.layer(place)
        if n:
            self._write(place, new[:, :, :n])
            out[:n] = decode_sealed(q[:n], kv, self.plan, self.cache.format, self.scale)
        for rows in self.batch.prefills:
            span = slice(rows.first, rows.first + rows.count)
            out[span] = self._chunk(place, kv, rows, q[span], new[:, :, span])
        return out

    def decode(self, layer: int, qkv: Tensor, cos: Tensor, sin: Tensor, norms: HeadNorms | None) -> Tensor:
        """The QKV product's rows [B, (Hq + 2 Hkv) D] of decode rows that write no sinks -> [B, Hq, D], without the host."""
        place = self.cache.place.get(layer)
        if place is None:
            assert self.exact is not None
            return self.exact.decode(self.cache.exempt[layer], qkv, cos, sin, norms)
        kv = self.cache.layer(place)
        tails = kv.tail_k.flatten(1, 2), kv.tail_v.flatten(1, 2)
        q = enter(qkv, cos, sin, norms, self.places, *tails, limit=SATURATION)
        return decode_sealed(q, kv, self.plan, self.cache.format, self.scale)

    def _write(self, place: int, new: Tensor) -> None:
        """Decode rows [2, Hkv, n, D] into their tails, and the first tokens of a sequence into its sinks."""
        self.cache.tails[place].flatten(2, 3).index_copy_(2, self.places, new)
        if self.early is not None and self.cache.format.sinks:
            lanes = self.plan.tail[self.early].long()
            self.cache.sinks[place][:, :, lanes, self.positions[self.early]] = new[:, :, self.early]

    def _chunk(self, place: int, kv: SealedKv, rows: PrefillRows, q: Tensor, new: Tensor) -> Tensor:
        """A chunk of one request: its rows kept for `commit`, its pages sealed, its queries answered."""
        cache, format = self.cache, self.cache.format
        cache.rows[place][:, :, rows.first : rows.first + rows.count] = new
        if (count := min(rows.start + rows.count, format.sinks) - rows.start) > 0:
            cache.sinks[place][:, :, rows.lane, rows.start : rows.start + count] = new[:, :, :count]
        before = cache.sealed(rows.start, rows.loaded)
        after = cache.sealed(rows.start + rows.count, rows.loaded)
        held = rows.start - before * format.page
        k, v = torch.cat((cache.tails[place][:, :, rows.lane, :held], new), 2)
        for index in range(before, after):
            span = slice((index - before) * format.page, (index - before + 1) * format.page)
            kv.pages[:, rows.pages[index]] = seal(k[:, span], v[:, span], format, skip=0 if index else format.sinks)
        pages = torch.tensor(rows.pages[:after], dtype=torch.long, device=q.device)
        return prefill_sealed(q, k, v, pages, kv, rows.lane, rows.start, format, self.scale, loaded=rows.loaded)
