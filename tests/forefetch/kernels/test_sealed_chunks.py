"""Prompt chunks over sealed pages, tails, sinks and their own rows: mixtures in one launch, in the interpreter and on a GPU."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from torch import Tensor

from forefetch.kernels.attention import triton_sealed_chunks
from forefetch.kernels.attention.chunks import BLOCK, ChunkPlan
from forefetch.kernels.attention.sealed import Rows, SealedKv
from forefetch.kernels.attention.sealed_chunks import enter_chunks, plan_chunks, prefill_sealed
from forefetch.kernels.attention.sealed_cpu import prefill_sealed_cpu
from forefetch.kernels.kv_codec import NAMES, KvFormat, seal, sealing

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
SCALE = 0.2


@dataclasses.dataclass
class Mixture:
    """Chunks of a step, everything that they should not read NaN; `exact` is what plain PyTorch in float32 answers."""

    format: KvFormat
    q: Tensor
    pages: Tensor
    rows: Rows
    plan: ChunkPlan
    exact: Tensor

    def on(self, device: str) -> Mixture:
        """The same there, a copy."""
        rows = Rows(self.rows.tails.to(device, copy=True), self.rows.sinks.to(device, copy=True), self.rows.lanes)
        plan = ChunkPlan(self.plan.blocks.to(device), self.plan.tables.to(device), self.plan.chunks.to(device))
        return dataclasses.replace(self, q=self.q.to(device), pages=self.pages.to(device, copy=True), rows=rows, plan=plan)

    @property
    def kv(self) -> SealedKv:
        return SealedKv(self.pages, *self.rows.tails, *self.rows.sinks)

    def run(self, splits: int = 1) -> Tensor:
        there = self.on(DEVICE)
        run = triton_sealed_chunks.prefill_sealed_chunks
        return run(there.q, *there.rows.own, there.kv, there.plan, self.format, SCALE, splits).cpu()

    def error(self, out: Tensor) -> float:
        n = len(self.exact)
        return float((out[:n].double() - self.exact).norm() / self.exact.norm())

    def before(self) -> Mixture:
        """As it was when the chunks' rows had just been written: their sinks and the pages that they fill hold anything."""
        there = self.on("cpu")
        for (_, start, lane, loaded, count), pages in zip(self.plan.chunks.tolist(), self.plan.tables, strict=True):
            first, behind = (max(self.format.sealed_pages(at), loaded) for at in (start, start + count))
            there.pages[:, pages[first:behind].long()] = 0xEE
            there.rows.sinks[:, :, lane, start : start + count] = torch.nan
        return there


def make(format: KvFormat, chunks: list[tuple[int, int, int]], group: int = 2, kv_heads: int = 2) -> Mixture:
    """Chunks (start, rows, pages that a cached prefix brought)."""
    generator, page, dim = torch.Generator().manual_seed(3), format.page, format.head_dim
    ends = [start + count for start, count, _ in chunks]
    # A chunk's end may fill a page that none of its queries reads sealed yet.
    most = [max(format.sealed_pages(end), loaded) for end, (_, _, loaded) in zip(ends, chunks, strict=True)]
    pages = torch.full((kv_heads, 1 + sum(most), format.blob_bytes), 0xFF, dtype=torch.uint8)
    total, lanes = sum(count for _, count, _ in chunks), len(chunks) + 1
    shape = 2, kv_heads, lanes + -(-(total + 3) // format.tail_tokens)
    tails = torch.full((*shape, format.tail_tokens, dim), torch.nan, dtype=torch.float16)
    rows = Rows(tails, torch.full((*shape, format.sinks, dim), torch.nan, dtype=torch.float16), lanes)
    q = torch.randn(total + 3, kv_heads * group, dim, generator=generator).half()
    tables = torch.full((len(chunks), 1 + max(most)), 2**30, dtype=torch.int32)
    free, entries, places, exact, first = torch.randperm(sum(most)) + 1, torch.randperm(len(chunks)), [], [], 0
    for index, (start, count, loaded) in enumerate(chunks):
        own, free = free[: most[index]], free[most[index] :]
        tables[index, : len(own)] = own
        lane, before = int(entries[index]), max(format.sealed_pages(start), loaded)
        whole = torch.randn(2, kv_heads, ends[index], dim, generator=generator)
        whole[0] = whole[0] * 2 + torch.randn(kv_heads, 1, dim, generator=generator)
        whole = whole.half()
        for number in range(most[index]):
            span = slice(number * page, (number + 1) * page)
            pages[:, own[number]] = seal(whole[0][:, span], whole[1][:, span], format, skip=0 if number else format.sinks)
        tails[:, :, lane, : start - before * page] = whole[:, :, before * page : start]
        rows.sinks[:, :, lane, : ends[index]] = whole[:, :, : format.sinks]
        rows.own[:, :, first : first + count] = whole[:, :, start:]
        kv, fresh = SealedKv(pages, *tails, *rows.sinks), whole[:, :, before * page :]
        answer = prefill_sealed_cpu(q[first : first + count].float(), *fresh, own, kv, lane, start, format, SCALE, loaded)
        exact.append(answer.double())
        places.append((first, start, lane, loaded, count))
        first += count
    plan = plan_chunks(places, [[] for _ in chunks])
    idle = torch.zeros((12 - len(plan.blocks), 4), dtype=torch.int32)
    return Mixture(format, q, pages, rows, ChunkPlan(torch.cat((plan.blocks, idle)), tables, plan.chunks), torch.cat(exact))


def small(name: str, dim: int = 32, **options: int) -> KvFormat:
    return KvFormat(name, dim, page=32, thirds=16 if name == "mixed" else 0, **({"sinks": 5, "recent": 9} | options))


# Float16 products: a unit roundoff of 2^-11 for each q k, p and v, scores of a few units; three times that and more.
BOUND = 8 * 2**-11


@pytest.mark.parametrize("name", NAMES)
def test_a_mixture_of_chunks(name: str) -> None:
    """A first chunk that seals pages on its way, one that goes on from a tail, a single row, one behind a cached prefix."""
    mixture = make(small(name), [(0, 77, 0), (50, 30, 0), (3, 1, 0), (64, 12, 2)])
    assert mixture.error(mixture.run(2 if name == "asym2" else 1)) < BOUND


@pytest.mark.parametrize(
    ("group", "dim", "sinks", "recent", "splits"), [(1, 48, 0, 0, 1), (7, 32, 31, 40, 3), (4, 32, 1, 3, 2)]
)
def test_other_shapes_and_parameters(group: int, dim: int, sinks: int, recent: int, splits: int) -> None:
    mixture = make(small("e2m0", dim, sinks=sinks, recent=recent), [(31, 34, 0), (0, 3, 0)], group, kv_heads=1)
    assert mixture.error(mixture.run(splits)) < BOUND


def test_pages_are_split_where_there_are_few_rows() -> None:
    assert [triton_sealed_chunks.plan_splits(rows, 16) for rows in (1, 64, 65, 256, 512, 1024)] == [8, 8, 4, 2, 1, 1]


@pytest.mark.gpu
@pytest.mark.skipif(DEVICE == "cpu", reason="needs a CUDA device")
@pytest.mark.parametrize("name", NAMES)
def test_pages_of_the_usual_shape(name: str) -> None:
    format = KvFormat(name, thirds=32 if name == "mixed" else 0)
    chunks = [(0, 300, 0), (240, 1, 0), (500, BLOCK + 1, 0), (256, 5, 2)]
    mixture = make(format, chunks, group=8)
    for splits in (1, 8):
        assert mixture.error(mixture.run(splits)) < BOUND


def test_the_tolerance_catches_broken_kernels() -> None:
    mixture = make(small("e2m0"), [(0, 44, 0), (50, 6, 0)], kv_heads=1)
    plan, chunks = mixture.plan, mixture.plan.chunks
    lane = torch.tensor([2])
    wrong = {
        "loaded": dataclasses.replace(plan, chunks=chunks + torch.tensor([0, 0, 0, 1, 0], dtype=torch.int32)),
        "lane": dataclasses.replace(plan, chunks=chunks.clone().index_copy_(1, lane, 1 - chunks[:, 2:3])),
        "position": dataclasses.replace(plan, blocks=plan.blocks - torch.tensor([0, 0, 1, 0], dtype=torch.int32)),
    }
    for what, other in wrong.items():
        found = mixture.error(dataclasses.replace(mixture, plan=other).run())
        assert not found <= BOUND, what
    mixture.rows.sinks[1] = mixture.rows.sinks[1].flip(2)
    assert not mixture.error(mixture.run()) <= BOUND


CHUNKS = [(0, 77, 0), (50, 30, 0), (3, 1, 0), (64, 12, 2), (30, 11, 0)]


def entered(before: Mixture) -> Mixture:
    """Behind the kernels that a recorded step runs."""
    there, format = before.on(DEVICE), before.format
    triton_sealed_chunks.put_sinks(there.rows, there.plan, format)
    most = sum(count // format.page + 1 for *_, count in before.plan.chunks.tolist())
    sealing.seal_chunks(there.rows.tails, there.pages, there.plan.chunks, there.plan.tables, there.rows.lanes, most, format)
    return there.on("cpu")


@pytest.mark.parametrize("name", ["e2m0", "fp4"])
def test_chunks_become_pages_and_sinks(name: str) -> None:
    """Where the page lies partly in the tail, where it is a first one, where nothing is full yet: the reference's bytes."""
    mixture = make(small(name), [(0, 45, 0)] if name == "fp4" else CHUNKS, kv_heads=1)
    before = mixture.before()
    for after in (entered(before), before):
        if after is before:
            enter_chunks(after.kv, after.rows, after.plan, after.format, most=9)
        assert torch.equal(after.pages, mixture.pages)
        assert torch.equal(after.rows.sinks.view(torch.int16), mixture.rows.sinks.view(torch.int16))


@pytest.mark.gpu
@pytest.mark.skipif(DEVICE == "cpu", reason="needs a CUDA device")
@pytest.mark.parametrize("name", NAMES)
def test_chunks_of_the_usual_shape_become_pages(name: str) -> None:
    mixture = make(KvFormat(name, thirds=32 if name == "mixed" else 0), [(0, 300, 0), (200, 200, 0), (500, 9, 3)])
    after = entered(mixture.before())
    assert torch.equal(after.pages, mixture.pages)
    assert torch.equal(after.rows.sinks.view(torch.int16), mixture.rows.sinks.view(torch.int16))
    there = mixture.on(DEVICE)
    assert mixture.error(prefill_sealed(there.q, there.rows, there.kv, there.plan, there.format, SCALE).cpu()) < BOUND


def test_on_a_cpu_chunks_are_answered_one_by_one() -> None:
    mixture = make(small("asym2"), CHUNKS)
    out = prefill_sealed(mixture.q.float(), mixture.rows, mixture.kv, mixture.plan, mixture.format, SCALE)
    assert mixture.error(out) < 1e-5


def test_misfits_are_refused() -> None:
    mixture = make(small("e2m0"), [(0, 3, 0)])
    run = triton_sealed_chunks.prefill_sealed_chunks
    rest, (k, v) = (mixture.kv, mixture.plan, mixture.format, SCALE), mixture.rows.own
    with pytest.raises(ValueError, match="do not fit"):
        run(mixture.q[..., :16], k, v, *rest)
    with pytest.raises(ValueError, match="float16"):
        run(mixture.q, k.float(), v.float(), *rest)
    plan = dataclasses.replace(mixture.plan, blocks=mixture.plan.blocks.long())
    with pytest.raises(ValueError, match="int32"):
        run(mixture.q, k, v, mixture.kv, plan, *rest[2:])
