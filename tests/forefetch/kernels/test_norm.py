"""Residual and norm against float64, in the interpreter here and on a GPU."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from forefetch.kernels.grouped_mlp.unsummed import Unsummed
from forefetch.kernels.norm import ref, triton

ON_GPU = pytest.param("cuda", marks=[pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")])
SHAPES = [(1, 32), (3, 96), (5, 2048), (2, 2880)]


def exact(total: Tensor, weight: Tensor, eps: float) -> Tensor:
    """The norm in float64."""
    wide = total.double()
    return wide * (wide.square().mean(-1, keepdim=True) + eps).rsqrt() * weight.double()


@pytest.mark.parametrize("device", ["cpu", ON_GPU])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("alpha", [None, 1.0, 0.22])
@pytest.mark.parametrize("shape", SHAPES)
def test_kernel_and_definition_agree_with_float64(
    device: str, dtype: torch.dtype, alpha: float | None, shape: tuple[int, int]
) -> None:
    draw = torch.Generator().manual_seed(0)
    x, y, weight = (torch.randn(s, generator=draw).to(device, dtype) for s in (shape, shape, shape[1:]))
    added = None if alpha is None else y
    total = x.double() if added is None else x.double() + (alpha or 1.0) * y.double()
    # The sum is rounded twice (the product, then the sum), each by half a unit of its size. The norm is rounded once to dtype,
    # and in float32 the sum of squares adds up to sqrt(H) roundings of a random sign: 4 units cover both.
    unit, size = torch.finfo(dtype).eps, x.double().abs() + y.double().abs()
    for run in (triton.add_rms_norm, ref.add_rms_norm):
        s, n = run(x, added, weight, 1e-6, alpha or 1.0)
        assert ((s.double() - total).abs() <= unit * size).all()
        normed = exact(s, weight, 1e-6)
        scale = normed.abs().amax(-1, keepdim=True)
        assert ((n.double() - normed).abs() <= 4 * unit * scale).all()


@pytest.mark.parametrize("device", ["cpu", ON_GPU])
def test_a_bad_row_stays_alone(device: str) -> None:
    x = torch.randn(4, 96).to(device)
    weight = torch.ones(96, device=device)
    clean = triton.add_rms_norm(x, x, weight, 1e-6, 1.0)[1].clone()
    x[2] = torch.nan
    dirty = triton.add_rms_norm(x, x, weight, 1e-6, 1.0)[1]
    assert dirty[2].isnan().all()
    assert torch.equal(dirty[[0, 1, 3]], clean[[0, 1, 3]])


@pytest.mark.parametrize("device", ["cpu", ON_GPU])
def test_rows_of_a_wider_tensor(device: str) -> None:
    wide = torch.randn(3, 200).to(device)
    weight = torch.rand(96, device=device)
    there = triton.add_rms_norm(wide[:, :96], None, weight, 1e-6, 1.0)[1]
    assert torch.equal(there, triton.add_rms_norm(wide[:, :96].contiguous(), None, weight, 1e-6, 1.0)[1])
    with pytest.raises(ValueError, match="no row"):
        triton.add_rms_norm(wide.t(), None, weight, 1e-6, 1.0)


@pytest.mark.parametrize("device", ["cpu", ON_GPU])
def test_shares_are_added_up_first(device: str) -> None:
    draw = torch.Generator().manual_seed(1)
    x, y, weight = (torch.randn(s, generator=draw).to(device) for s in ((3, 96), (4, 3, 96), (96,)))
    for run in (triton.add_rms_norm, ref.add_rms_norm):
        s, n = run(x, y, weight, 1e-6, 0.5)
        plain, normed = run(x, y.sum(0), weight, 1e-6, 0.5)
        torch.testing.assert_close(s, plain)
        torch.testing.assert_close(n, normed)
    with pytest.raises(ValueError, match="rows"):
        triton.add_rms_norm(x, y[:, :2], weight, 1e-6, 1.0)


@pytest.mark.parametrize("device", ["cpu", ON_GPU])
def test_the_pairs_of_a_token_are_added_up_first(device: str) -> None:
    draw = torch.Generator().manual_seed(2)
    x, y, by, weight = (torch.randn(s, generator=draw).to(device) for s in ((3, 96), (12, 96), (12,), (96,)))
    live = torch.tensor([1, 1, 0, 1] * 3, dtype=torch.int32, device=device)
    y[2], by[6] = torch.nan, torch.nan  # of pairs that count nothing
    summed = (torch.where(live != 0, by, 0.0)[:, None] * y.nan_to_num()).view(3, 4, 96).sum(1)
    for run in (triton.add_rms_norm, ref.add_rms_norm):
        counters = torch.ones(8, dtype=torch.int32, device=device), torch.ones(16, dtype=torch.int32, device=device)
        s, n = run(x, Unsummed(y, by, live, counters), weight, 1e-6, 0.5)
        plain, normed = run(x, summed, weight, 1e-6, 0.5)
        torch.testing.assert_close(s, plain)
        torch.testing.assert_close(n, normed)
        assert not any(counter.any() for counter in counters)
    with pytest.raises(ValueError, match="pairs"):
        triton.add_rms_norm(x, Unsummed(y[:11], by, live, counters), weight, 1e-6, 1.0)


@pytest.mark.parametrize("device", ["cpu", ON_GPU])
@pytest.mark.parametrize("hidden", [96, 2048, 4096])
def test_a_row_is_the_same_bits_in_whatever_form_it_comes(device: str, hidden: int) -> None:
    """Added up, as a share, or as pairs: so that experts behind lanes, which come added up, leave what experts beside leave."""
    draw = torch.Generator().manual_seed(3)
    x, y, weight = (torch.randn(s, generator=draw).to(device, torch.bfloat16) for s in ((7, hidden), (7, hidden), (hidden,)))
    one, live = torch.ones(7, device=device), torch.ones(7, dtype=torch.int32, device=device)
    counters = torch.ones(8, dtype=torch.int32, device=device), torch.ones(16, dtype=torch.int32, device=device)
    expected = triton.add_rms_norm(x, y, weight, 1e-6, 1.0)
    for form in (y.float()[None], Unsummed(y.float(), one, live, counters)):
        found = triton.add_rms_norm(x, form, weight, 1e-6, 1.0)
        assert all(torch.equal(*both) for both in zip(found, expected, strict=True))
