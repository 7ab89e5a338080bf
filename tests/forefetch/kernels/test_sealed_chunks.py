"""Prompt chunks over sealed pages, tails, sinks and their own rows: mixtures in one launch, in the interpreter and on a GPU."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from torch import Tensor

from forefetch.kernels.attention import sealed_chunks, triton_sealed_chunks
from forefetch.kernels.attention.chunks import BLOCK, fill_blocks
from forefetch.kernels.attention.sealed import SealedKv
from forefetch.kernels.attention.sealed_chunks import SealedChunkPlan, prefill_sealed
from forefetch.kernels.attention.sealed_cpu import prefill_sealed_cpu
from forefetch.kernels.kv_codec import NAMES, KvFormat, seal

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
SCALE = 0.2


@dataclasses.dataclass
class Mixture:
    """Chunks of a step, everything that they should not read NaN; `exact` is what plain PyTorch in float32 answers."""

    format: KvFormat
    q: Tensor
    k: Tensor
    v: Tensor
    kv: SealedKv
    plan: SealedChunkPlan
    exact: Tensor

    def run(self) -> Tensor:
        plan = SealedChunkPlan(*(getattr(self.plan, f.name).to(DEVICE) for f in dataclasses.fields(SealedChunkPlan)))
        kv = SealedKv(*(getattr(self.kv, f.name).to(DEVICE) for f in dataclasses.fields(SealedKv)))
        rows = (part.to(DEVICE) for part in (self.q, self.k, self.v))
        return triton_sealed_chunks.prefill_sealed_chunks(*rows, kv, plan, self.format, SCALE).cpu()

    def error(self, out: Tensor) -> float:
        n = len(self.exact)
        return float((out[:n].double() - self.exact).norm() / self.exact.norm())


def make(format: KvFormat, chunks: list[tuple[int, int, int]], group: int = 2, kv_heads: int = 2) -> Mixture:
    """Chunks (start, rows, pages that a cached prefix brought)."""
    generator, page, dim = torch.Generator().manual_seed(3), format.page, format.head_dim
    ends = [start + count for start, count, _ in chunks]
    most = [max(format.sealed_pages(end - 1), loaded) for end, (_, _, loaded) in zip(ends, chunks, strict=True)]
    pages = torch.full((kv_heads, 1 + sum(most), format.blob_bytes), 0xFF, dtype=torch.uint8)
    shape = kv_heads, len(chunks) + 1
    tails = torch.full((2, *shape, format.tail_tokens, dim), torch.nan, dtype=torch.float16)
    sinks = torch.full((2, *shape, format.sinks, dim), torch.nan, dtype=torch.float16)
    total = sum(count for _, count, _ in chunks)
    rows = torch.full((2, kv_heads, total + 3, dim), torch.nan, dtype=torch.float16)
    q = torch.randn(total + 3, kv_heads * group, dim, generator=generator).half()
    tables = torch.full((len(chunks), 1 + max(most)), 2**30, dtype=torch.int32)
    free, entries, cut, places, exact, first = torch.randperm(sum(most)) + 1, torch.randperm(len(chunks)), [], [], [], 0
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
        sinks[:, :, lane, : ends[index]] = whole[:, :, : format.sinks]
        rows[:, :, first : first + count] = whole[:, :, start:]
        kv = SealedKv(pages, tails[0], tails[1], sinks[0], sinks[1])
        fresh = whole[:, :, before * page :]
        answer = prefill_sealed_cpu(
            q[first : first + count].float(), fresh[0], fresh[1], own, kv, lane, start, format, SCALE, loaded
        )
        exact.append(answer.double())
        cut.append((first, count, start))
        places.append([first, start, lane, loaded])
        first += count
    blocks = torch.full((12, 4), 9, dtype=torch.int32)
    assert fill_blocks(blocks, cut)
    plan = SealedChunkPlan(blocks, torch.tensor(places, dtype=torch.int32), tables)
    return Mixture(format, q, rows[0], rows[1], kv, plan, torch.cat(exact))


def small(name: str, dim: int = 32, **options: int) -> KvFormat:
    return KvFormat(name, dim, page=32, thirds=16 if name == "mixed" else 0, **({"sinks": 5, "recent": 9} | options))


# Float16 products: a unit roundoff of 2^-11 for each q k, p and v, scores of a few units; three times that and more.
BOUND = 8 * 2**-11


@pytest.mark.parametrize("name", NAMES)
def test_a_mixture_of_chunks(name: str) -> None:
    """A first chunk that seals pages on its way, one that goes on from a tail, a single row, one behind a cached prefix."""
    mixture = make(small(name), [(0, 77, 0), (50, 30, 0), (3, 1, 0), (64, 12, 2)])
    assert mixture.error(mixture.run()) < BOUND


@pytest.mark.parametrize(("group", "dim", "sinks", "recent"), [(1, 48, 0, 0), (7, 32, 31, 40), (4, 32, 1, 3)])
def test_other_shapes_and_parameters(group: int, dim: int, sinks: int, recent: int) -> None:
    mixture = make(small("e2m0", dim, sinks=sinks, recent=recent), [(31, 34, 0), (0, 3, 0)], group, kv_heads=1)
    assert mixture.error(mixture.run()) < BOUND


@pytest.mark.gpu
@pytest.mark.skipif(DEVICE == "cpu", reason="needs a CUDA device")
@pytest.mark.parametrize("name", NAMES)
def test_pages_of_the_usual_shape(name: str) -> None:
    format = KvFormat(name, thirds=32 if name == "mixed" else 0)
    chunks = [(0, 300, 0), (240, 1, 0), (500, BLOCK + 1, 0), (256, 5, 2)]
    mixture = make(format, chunks, group=8)
    assert mixture.error(mixture.run()) < BOUND


def test_the_tolerance_catches_broken_kernels() -> None:
    mixture = make(small("e2m0"), [(0, 44, 0), (50, 6, 0)], kv_heads=1)
    kv, plan, chunks = mixture.kv, mixture.plan, mixture.plan.chunks
    wrong = {
        "loaded": dataclasses.replace(plan, chunks=chunks + torch.tensor([0, 0, 0, 1], dtype=torch.int32)),
        "lane": dataclasses.replace(
            plan, chunks=chunks.clone()[:, [0, 1, 2, 3]].index_copy_(1, torch.tensor([2]), 1 - chunks[:, 2:3])
        ),
        "position": dataclasses.replace(plan, blocks=plan.blocks - torch.tensor([0, 0, 1, 0], dtype=torch.int32)),
    }
    for what, other in wrong.items():
        found = mixture.error(dataclasses.replace(mixture, plan=other).run())
        assert not found <= BOUND, what
    sinks = dataclasses.replace(mixture, kv=dataclasses.replace(kv, sink_v=kv.sink_v.flip(3)))
    assert not sinks.error(sinks.run()) <= BOUND


@pytest.mark.gpu
@pytest.mark.skipif(DEVICE == "cpu", reason="needs a CUDA device")
def test_one_chunk_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """`prefill_sealed`, whose tokens come all in one piece."""
    monkeypatch.setattr(sealed_chunks, "ONE_LAUNCH", True)
    format = small("asym3")
    mixture = make(format, [(50, 30, 0)])
    kv = SealedKv(*(getattr(mixture.kv, f.name).cuda() for f in dataclasses.fields(SealedKv)))
    before, lane = format.sealed_pages(50) * 32, int(mixture.plan.chunks[0, 2])
    fresh = [
        torch.cat((tail[:, lane, : 50 - before], rows[:, :30].cuda()), 1)
        for tail, rows in ((kv.tail_k, mixture.k), (kv.tail_v, mixture.v))
    ]
    pages = mixture.plan.tables[0, : format.sealed_pages(79)].long().cuda()
    out = prefill_sealed(mixture.q[:30].cuda(), *fresh, pages, kv, lane, 50, format, SCALE)
    assert mixture.error(out.cpu()) < BOUND


def test_misfits_are_refused() -> None:
    mixture = make(small("e2m0"), [(0, 3, 0)])
    run = triton_sealed_chunks.prefill_sealed_chunks
    rest = mixture.kv, mixture.plan, mixture.format, SCALE
    with pytest.raises(ValueError, match="do not fit"):
        run(mixture.q[..., :16], mixture.k, mixture.v, *rest)
    with pytest.raises(ValueError, match="float16"):
        run(mixture.q, mixture.k.float(), mixture.v.float(), *rest)
    with pytest.raises(ValueError, match="int32"):
        run(
            mixture.q,
            mixture.k,
            mixture.v,
            mixture.kv,
            dataclasses.replace(mixture.plan, blocks=mixture.plan.blocks.long()),
            *rest[2:],
        )
