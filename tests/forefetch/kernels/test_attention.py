from __future__ import annotations

import pytest
import torch
from paged_pools import AWKWARD, PAGE, Pool, assert_exact, make_pool, queries
from torch import Tensor

from forefetch.kernels import attention
from forefetch.kernels.attention import cpu, ref


def decode_truth(q: Tensor, pool: Pool, lengths: list[int], scale: float) -> Tensor:
    return ref.decode(q.double(), pool.k.double(), pool.v.double(), pool.table, lengths, scale)


@pytest.mark.parametrize("scattered", [False, True])
@pytest.mark.parametrize("ratio", [1, 4, 7, 8])
@pytest.mark.parametrize("dim", [24, 64, 80, 96, 128])
def test_decode_of_a_ragged_batch(dim: int, ratio: int, scattered: bool) -> None:
    pool = make_pool(AWKWARD, 2, dim, scattered=scattered)
    q, scale = queries(len(AWKWARD), 2 * ratio, dim), dim**-0.5
    truth = decode_truth(q, pool, AWKWARD, scale)
    assert_exact(attention.decode(q, pool.k, pool.v, pool.table, AWKWARD, scale), q, pool, truth, scale)
    assert_exact(ref.decode(q, pool.k, pool.v, pool.table, AWKWARD, scale), q, pool, truth, scale)


@pytest.mark.parametrize("length", AWKWARD)
def test_decode_of_one_row_and_of_equal_rows(length: int) -> None:
    for rows in (1, 3):
        pool = make_pool([length] * rows, 3, 32, scattered=True)
        q = queries(rows, 6, 32)
        got = attention.decode(q, pool.k, pool.v, pool.table, [length] * rows, 0.2)
        assert_exact(got, q, pool, decode_truth(q, pool, [length] * rows, 0.2), 0.2)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision(dtype: torch.dtype) -> None:
    pool = make_pool(AWKWARD, 2, 64, scattered=True, dtype=dtype)
    q = queries(len(AWKWARD), 8, 64, dtype)
    got = attention.decode(q, pool.k, pool.v, pool.table, AWKWARD, 0.125)
    assert got.dtype == dtype
    assert_exact(got, q, pool, decode_truth(q, pool, AWKWARD, 0.125), 0.125)


def test_a_pool_of_a_narrower_type_is_converted() -> None:
    pool = make_pool(AWKWARD, 2, 64, scattered=False, dtype=torch.float16)
    q = queries(len(AWKWARD), 8, 64)
    got = attention.decode(q, pool.k, pool.v, pool.table, AWKWARD, 0.125)
    assert_exact(got, q, pool, decode_truth(q, pool, AWKWARD, 0.125), 0.125)
    chunk = attention.prefill(q[:4], pool.k, pool.v, pool.pages[5], 97 - 4, 0.125)
    truth = ref.prefill(q[:4].double(), pool.k.double(), pool.v.double(), pool.pages[5], 97 - 4, 0.125)
    assert_exact(chunk, q[:4], pool, truth, 0.125)


@pytest.mark.parametrize("scattered", [False, True])
@pytest.mark.parametrize(("start", "chunk"), [(0, 1), (0, 33), (0, 16), (7, 9), (15, 1), (16, 40), (31, 2), (5, 300), (0, 300)])
@pytest.mark.parametrize(("kv_heads", "heads", "dim"), [(2, 8, 64), (1, 7, 24), (3, 3, 80), (2, 16, 128)])
def test_prefill(start: int, chunk: int, kv_heads: int, heads: int, dim: int, scattered: bool) -> None:
    pool = make_pool([start + chunk], kv_heads, dim, scattered=scattered)
    q, scale = queries(chunk, heads, dim), dim**-0.5
    truth = ref.prefill(q.double(), pool.k.double(), pool.v.double(), pool.pages[0], start, scale)
    spare = [*pool.pages[0], 0, 0]  # pages reserved for the answer
    for op in (attention.prefill, ref.prefill):
        got = op(q, pool.k, pool.v, spare, start, scale)
        assert got.shape == q.shape
        assert_exact(got, q, pool, truth, scale)


def test_prefill_in_chunks_equals_decode_one_by_one() -> None:
    pool = make_pool([40], 2, 32, scattered=True)
    q = queries(40, 8, 32)
    whole = attention.prefill(q, pool.k, pool.v, pool.pages[0], 0, 0.2)
    chunks = [attention.prefill(q[a:b], pool.k, pool.v, pool.pages[0], a, 0.2) for a, b in ((0, 13), (13, 14), (14, 40))]
    steps = [attention.decode(q[i : i + 1], pool.k, pool.v, pool.table, [i + 1], 0.2) for i in range(40)]
    truth = ref.prefill(q.double(), pool.k.double(), pool.v.double(), pool.pages[0], 0, 0.2)
    for got in (whole, torch.cat(chunks), torch.cat(steps)):
        assert_exact(got, q, pool, truth, 0.2)


def test_a_row_does_not_depend_on_its_batch() -> None:
    """Other rows full of NaN must not leak, and the answer stays within rounding of the row alone."""
    pool = make_pool(AWKWARD, 2, 64, scattered=False)
    q = queries(len(AWKWARD), 8, 64)
    alone = torch.cat(
        [
            attention.decode(q[i : i + 1], pool.k, pool.v, pool.table[i : i + 1], AWKWARD[i : i + 1], 0.125)
            for i in range(len(AWKWARD))
        ]
    )
    for poisoned in range(len(AWKWARD)):
        bad = q.clone()
        bad[poisoned] = torch.nan
        got = attention.decode(bad, pool.k, pool.v, pool.table, AWKWARD, 0.125)
        others = [row for row in range(len(AWKWARD)) if row != poisoned]
        assert bool(got[poisoned].isnan().all())
        assert_exact(got[others], q, pool, alone[others].double(), 0.125)


def test_one_plan_serves_many_layers_and_strided_queries() -> None:
    pools = [make_pool(AWKWARD, 2, 64, scattered=True), make_pool(AWKWARD, 2, 64, scattered=True)]
    pools[1].k.mul_(0.5)
    fused = torch.randn(len(AWKWARD), 12, 64, generator=torch.Generator().manual_seed(3))  # Q, K and V of one projection
    q = fused[:, :8]
    plan = attention.plan_decode(pools[0].table, AWKWARD, PAGE, q.device, q.dtype)
    for pool in pools:
        got = attention.decode_planned(q, pool.k, pool.v, plan, 0.125)
        assert_exact(got, q, pool, decode_truth(q, pool, AWKWARD, 0.125), 0.125)


def test_short_rows_are_packed_and_consecutive_pages_are_views() -> None:
    pool = make_pool(AWKWARD, 2, 64, scattered=False)
    plan = attention.plan_decode(pool.table, AWKWARD, PAGE, torch.device("cpu"), torch.float32)
    assert plan.rows.tolist() == [row for row, length in enumerate(AWKWARD) if length <= cpu.PACK_UP_TO]
    assert [(row, length) for row, _, length in plan.single] == [(5, 97), (6, 150)]
    assert all(isinstance(pages, slice) for _, pages, _ in plan.single)
    view = cpu._read(pool.k, plan.single[0][1], 97, torch.float32)
    assert view.untyped_storage().data_ptr() == pool.k.untyped_storage().data_ptr()


def wrong_length(q: Tensor, pool: Pool, scale: float) -> Tensor:
    return attention.decode(q, pool.k, pool.v, pool.table, [max(1, length - 1) for length in AWKWARD], scale)


def wrong_head(q: Tensor, pool: Pool, scale: float) -> Tensor:
    return attention.decode(q, pool.k.flip(0), pool.v.flip(0), pool.table, AWKWARD, scale)


def wrong_scale(q: Tensor, pool: Pool, scale: float) -> Tensor:
    return attention.decode(q, pool.k, pool.v, pool.table, AWKWARD, scale * 1.001)


def wrong_page_order(q: Tensor, pool: Pool, scale: float) -> Tensor:
    swapped = Pool(pool.k, pool.v, [[*pages[1:2], *pages[:1], *pages[2:]] for pages in pool.pages])
    return attention.decode(q, pool.k, pool.v, swapped.table, AWKWARD, scale)


@pytest.mark.parametrize("broken", [wrong_length, wrong_head, wrong_scale, wrong_page_order])
def test_the_tolerance_catches_broken_kernels(broken: object) -> None:
    pool = make_pool(AWKWARD, 2, 64, scattered=True)
    q = queries(len(AWKWARD), 8, 64)
    truth = decode_truth(q, pool, AWKWARD, 0.125)
    assert callable(broken)
    got = broken(q, pool, 0.125).nan_to_num(1e9)
    with pytest.raises(AssertionError, match="> bound"):
        assert_exact(got, q, pool, truth, 0.125)


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore:Synchronization debug mode")
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("scattered", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("kv_heads", "heads", "dim"), [(2, 8, 64), (1, 7, 24), (4, 4, 80), (2, 16, 128)])
def test_on_cuda_without_a_synchronisation(kv_heads: int, heads: int, dim: int, dtype: torch.dtype, scattered: bool) -> None:
    pool = make_pool(AWKWARD, kv_heads, dim, scattered=scattered, dtype=dtype)
    q, scale, rows = queries(len(AWKWARD), heads, dim, dtype), dim**-0.5, slice(0, 8)
    there = Pool(pool.k.cuda(), pool.v.cuda(), pool.pages)
    q_there = q.cuda()
    torch.cuda.synchronize()
    try:
        torch.cuda.set_sync_debug_mode("error")
        plan = attention.plan_decode(pool.table, AWKWARD, PAGE, q_there.device, dtype)
        decoded = attention.decode_planned(q_there, there.k, there.v, plan, scale)
        chunk = attention.prefill(q_there[rows], there.k, there.v, pool.pages[6], 150 - 8, scale)
        first = attention.prefill(q_there[rows], there.k, there.v, pool.pages[6], 0, scale)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert_exact(decoded.cpu(), q, pool, decode_truth(q, pool, AWKWARD, scale), scale)
    for got, start in ((chunk, 150 - 8), (first, 0)):
        truth = ref.prefill(q[rows].double(), pool.k.double(), pool.v.double(), pool.pages[6], start, scale)
        assert_exact(got.cpu(), q, pool, truth, scale)
