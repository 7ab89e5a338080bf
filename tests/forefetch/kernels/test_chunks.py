"""Prompt chunks whose places are read on the device: mixtures of chunks against float64, in the interpreter and on a GPU."""

from __future__ import annotations

import pytest
import torch
from paged_pools import Pool, assert_exact, make_pool, queries
from torch import Tensor

from forefetch.kernels.attention import ref, triton_chunks
from forefetch.kernels.attention.chunks import BLOCK, ChunkPlan, fill_blocks, prefill_chunks

ON_GPU = pytest.param("cuda", marks=[pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")])
MIXTURES = [
    [(0, 1)],
    [(0, BLOCK), (7, 1), (15, 17)],  # (start, rows) of each chunk
    [(100, BLOCK + 1), (0, 3)],
]


def plan_of(chunks: list[tuple[int, int]], pool: Pool, device: str) -> ChunkPlan:
    blocks, first, cut = torch.full((6, 4), 9, dtype=torch.int32), 0, []
    for start, rows in chunks:
        cut.append((first, rows, start))
        first += rows
    assert fill_blocks(blocks, cut)
    width = max(len(pages) for pages in pool.pages)
    tables = torch.tensor([[*pages, *[0] * (width - len(pages))] for pages in pool.pages], dtype=torch.int32)
    return ChunkPlan(blocks.to(device), tables.to(device), torch.empty(0, 5, dtype=torch.int32))  # which no kernel here reads


@pytest.mark.parametrize("device", ["cpu", ON_GPU])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("heads", "kv_heads", "dim"), [(4, 2, 32), (7, 1, 80)])
@pytest.mark.parametrize("chunks", MIXTURES)
def test_mixtures(chunks: list[tuple[int, int]], heads: int, kv_heads: int, dim: int, dtype: torch.dtype, device: str) -> None:
    pool = make_pool([start + rows for start, rows in chunks], kv_heads, dim, scattered=True, dtype=dtype)
    total, scale = sum(rows for _, rows in chunks), dim**-0.5
    q = queries(total + 2, heads, dim, dtype)  # two rows of padding
    plan = plan_of(chunks, pool, device)
    there = (q.to(device), pool.k.to(device), pool.v.to(device), plan.blocks, plan.tables)
    found = triton_chunks.prefill_chunks(*there, scale, most_rows=BLOCK).cpu()
    slow = prefill_chunks(q, pool.k, pool.v, plan_of(chunks, pool, "cpu"), scale)
    first = 0
    for (start, rows), pages in zip(chunks, pool.pages, strict=True):
        span = slice(first, first + rows)
        truth = ref.prefill(q[span].double(), pool.k.double(), pool.v.double(), pages, start, scale)
        for result in (found, slow):
            assert_exact(result[span], q[span], pool, truth, scale)
        first += rows


def test_too_many_blocks_do_not_fit() -> None:
    blocks = torch.zeros(2, 4, dtype=torch.int32)
    assert fill_blocks(blocks, [(0, 2 * BLOCK, 0)])
    assert not fill_blocks(blocks, [(0, 2 * BLOCK + 1, 0)])
    assert fill_blocks(blocks, [])
    assert blocks.sum() == 0


def test_wrong_types_are_refused() -> None:
    pool = make_pool([5], 1, 16, scattered=False)
    plan = plan_of([(0, 5)], pool, "cpu")

    def run(q: Tensor, plan: ChunkPlan) -> None:
        triton_chunks.prefill_chunks(q, pool.k, pool.v, plan.blocks, plan.tables, 1.0, most_rows=BLOCK)

    with pytest.raises(ValueError, match="do not fit"):
        run(queries(5, 2, 24), plan)
    with pytest.raises(ValueError, match="int32"):
        run(queries(5, 2, 16), ChunkPlan(plan.blocks.long(), plan.tables, plan.chunks))
