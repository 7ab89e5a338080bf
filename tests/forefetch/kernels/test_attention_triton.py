"""`decode_paged` against float64; in Triton's interpreter where there is no GPU."""

from __future__ import annotations

import pytest
import torch
from paged_pools import AWKWARD, PAGE, Pool, assert_exact, make_pool, queries
from torch import Tensor

from forefetch.kernels.attention import ref
from forefetch.kernels.attention import triton as kernels

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
LENGTHS = AWKWARD if DEVICE == "cuda" else [1, PAGE, PAGE + 1, 97]  # the interpreter takes a second for a thousand positions


def run(q: Tensor, pool: Pool, lengths: list[int], scale: float, splits: int = 3) -> Tensor:
    """Poisoned output and scratch; the table's unused entries point outside the pool."""
    rows, heads, dim = q.shape
    scratch = kernels.Scratch(
        torch.full((rows, heads, splits, dim), torch.nan, device=DEVICE),
        torch.full((rows, heads, splits, 2), torch.nan, device=DEVICE),
    )
    out = torch.full_like(q, torch.nan, device=DEVICE)
    on_device = [t.to(DEVICE) for t in (q, pool.k, pool.v, pool.table, torch.tensor(lengths, dtype=torch.int32))]
    return kernels.decode_paged(*on_device, scale, out, scratch).cpu()


def truth(q: Tensor, pool: Pool, lengths: list[int], scale: float) -> Tensor:
    return ref.decode(q.double(), pool.k.double(), pool.v.double(), pool.table, lengths, scale)


@pytest.mark.parametrize(("dim", "ratio", "splits"), [(24, 1, 1), (64, 20, 2), (80, 7, 3), (96, 4, 3), (128, 8, 5)])
def test_ragged_batch(dim: int, ratio: int, splits: int) -> None:
    pool = make_pool(LENGTHS, 2, dim, scattered=True)
    q, scale = queries(len(LENGTHS), 2 * ratio, dim), dim**-0.5
    assert_exact(run(q, pool, LENGTHS, scale, splits), q, pool, truth(q, pool, LENGTHS, scale), scale)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision(dtype: torch.dtype) -> None:
    pool = make_pool(LENGTHS, 2, 64, scattered=True, dtype=dtype)
    q = queries(len(LENGTHS), 8, 64, dtype)
    assert_exact(run(q, pool, LENGTHS, 0.125), q, pool, truth(q, pool, LENGTHS, 0.125), 0.125)


@pytest.mark.filterwarnings("ignore:All-NaN slice", "ignore:invalid value")  # the interpreter computes in NumPy
def test_strided_queries_an_empty_row_and_a_poisoned_one() -> None:
    """Q as a slice of a fused projection. A padded row (length 0) is zeros; a NaN row stays alone."""
    lengths = [33, 0, 70, 1]
    pool = make_pool([33, 1, 70, 1], 2, 64, scattered=True)
    q = queries(4, 12, 64)[:, :8]
    q[2] = torch.nan
    got = run(q, pool, lengths, 0.125)
    assert bool((got[1] == 0).all())
    assert bool(got[2].isnan().all())
    for row in (0, 3):
        expected = ref.decode(
            q[row : row + 1].double(),
            pool.k.double(),
            pool.v.double(),
            pool.table[row : row + 1],
            lengths[row : row + 1],
            0.125,
        )
        assert_exact(got[row : row + 1], q[row : row + 1], pool, expected, 0.125)


def test_the_tolerance_catches_broken_kernels() -> None:
    pool = make_pool(LENGTHS, 2, 64, scattered=True)
    q = queries(len(LENGTHS), 8, 64)
    expected = truth(q, pool, LENGTHS, 0.125)
    shorter = [max(1, length - 1) for length in LENGTHS]
    flipped = Pool(pool.k.flip(0), pool.v.flip(0), pool.pages)
    for wrong in (run(q, pool, shorter, 0.125), run(q, flipped, LENGTHS, 0.125), run(q, pool, LENGTHS, 0.1252)):
        with pytest.raises(AssertionError, match="bound"):
            assert_exact(wrong, q, pool, expected, 0.125)


def test_misfits_are_refused() -> None:
    pool = make_pool([PAGE], 2, 64, scattered=False)
    q, table, lengths = queries(1, 8, 64), pool.table, torch.tensor([PAGE], dtype=torch.int32)
    scratch, out = kernels.plan_scratch(1, 8, 2, 64, PAGE, "cpu"), torch.empty(1, 8, 64)
    with pytest.raises(ValueError, match="int32"):
        kernels.decode_paged(q, pool.k, pool.v, table.long(), lengths, 0.1, out, scratch)
    with pytest.raises(ValueError, match="do not fit"):
        kernels.decode_paged(q[:, :7], pool.k, pool.v, table, lengths, 0.1, out[:, :7], scratch)
    with pytest.raises(ValueError, match="too small"):
        kernels.decode_paged(
            queries(2, 8, 64), pool.k, pool.v, table.expand(2, -1), lengths.expand(2), 0.1, out.expand(2, -1, -1), scratch
        )
