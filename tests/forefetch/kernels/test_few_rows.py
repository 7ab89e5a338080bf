"""Products of few rows against float64, in the interpreter here and on a GPU."""

from __future__ import annotations

import pytest
import torch

from forefetch.kernels.few_rows import few_rows, logits, shared, triton

ON_GPU = pytest.param("cuda", marks=[pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")])


def drawn(device: str, dtype: torch.dtype, *shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape))).to(device, dtype)


@pytest.mark.parametrize("device", ["cpu", ON_GPU])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("rows", "inner", "outer"), [(1, 1024, 64), (1, 4096, 64), (5, 4096, 128), (17, 4096, 64)])
def test_shares_add_up_to_the_product(device: str, dtype: torch.dtype, rows: int, inner: int, outer: int) -> None:
    x, weight = drawn(device, dtype, rows, inner), drawn(device, dtype, inner, outer)
    plan = triton.plan(rows, inner, outer)
    assert plan is not None
    shares = triton.product(x, weight, plan)
    assert shares.shape == (plan.shares, rows, outer)
    exact = x.double() @ weight.double()
    # Products of two 16-bit values are exact in float32; sums of K of them round K times by half a unit with random signs.
    error = (shares.sum(0).double() - exact).norm() / exact.norm()
    assert error < inner**0.5 * 2**-24
    assert torch.equal(triton.product(x, weight, plan), shares)


@pytest.mark.parametrize("device", ["cpu", ON_GPU])
@pytest.mark.parametrize("rows", [1, 3, 16, 33])
def test_a_gates_logits(device: str, rows: int) -> None:
    x, weight = drawn(device, torch.bfloat16, rows, 1024), drawn(device, torch.bfloat16, 32, 1024)
    plan = triton.gate_plan(rows, 32, 1024)
    assert plan is not None
    exact = x.double() @ weight.double().T
    got = triton.gate(x, weight, plan)
    assert got.dtype == torch.bfloat16
    # One rounding to bfloat16, which the interpreter does by cutting off.
    assert ((got.double() - exact).abs() <= 2**-7 * exact.abs() + 1e-4 * exact.abs().max()).all()


@pytest.mark.parametrize("device", ["cpu", ON_GPU])
def test_a_broken_row_stays_alone(device: str) -> None:
    x, weight = drawn(device, torch.bfloat16, 3, 1024), drawn(device, torch.bfloat16, 1024, 64)
    for plan in (triton.Plan(2, 32, 64, 2), triton.Plan(2, 32, 512, 0, rows=4)):
        clean = triton.product(x, weight, plan).sum(0)
        broken = x.clone()
        broken[1] = torch.nan
        dirty = triton.product(broken, weight, plan).sum(0)
        assert dirty[1].isnan().all()
        assert torch.equal(dirty[[0, 2]], clean[[0, 2]])


def test_what_has_no_kernel_is_a_plain_product() -> None:
    x, weight = drawn("cpu", torch.float32, 2, 48), drawn("cpu", torch.float32, 48, 24)
    assert torch.equal(shared(few_rows(x, weight), x.dtype), x @ weight)
    turned = weight.T.contiguous()
    assert torch.equal(logits(x, turned), torch.nn.functional.linear(x, turned))
    assert triton.plan(65, 2048, 64) is None
    assert triton.plan(2, 96, 64) is None
    with pytest.raises(ValueError, match="do not fit"):
        triton.product(x, weight.double(), triton.Plan(1, 8, 16, 2))
