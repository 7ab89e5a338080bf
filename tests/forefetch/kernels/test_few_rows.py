"""Products of few rows against float64, in the interpreter here and on a GPU."""

from __future__ import annotations

import pytest
import torch

from forefetch.kernels.few_rows import Rounded, few_rows, logits, plans, shared, times, triton
from forefetch.kernels.few_rows.plans import Plan

ON_GPU = pytest.param("cuda", marks=[pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")])


def drawn(device: str, dtype: torch.dtype, *shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape))).to(device, dtype)


@pytest.mark.parametrize("device", ["cpu", ON_GPU])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("rows", "inner", "outer"), [(1, 1024, 64), (1, 4096, 64), (5, 4096, 128), (17, 4096, 64)])
def test_shares_add_up_to_the_product(device: str, dtype: torch.dtype, rows: int, inner: int, outer: int) -> None:
    x, weight = drawn(device, dtype, rows, inner), drawn(device, dtype, inner, outer)
    plan = plans.plain(rows, inner, outer)
    assert plan is not None
    shares = triton.product(x, weight, plan)
    assert shares.shape == (plan.shares, rows, outer)
    exact = x.double() @ weight.double()
    # Products of two 16-bit values are exact in float32; sums of K of them round K times by half a unit with random signs.
    error = (shares.sum(0).double() - exact).norm() / exact.norm()
    assert error < inner**0.5 * 2**-24
    assert torch.equal(triton.product(x, weight, plan), shares)


@pytest.mark.parametrize("device", ["cpu", ON_GPU])
@pytest.mark.parametrize(("rows", "inner"), [(1, 1024), (3, 1024), (16, 1024), (33, 1024), (33, 2048)])
def test_a_gates_logits(device: str, rows: int, inner: int) -> None:
    x, weight = drawn(device, torch.bfloat16, rows, inner), drawn(device, torch.bfloat16, 32, inner)
    plan = plans.gate(rows, 32, inner)
    assert plan is not None
    exact = x.double() @ weight.double().T
    got = triton.gate(x, weight, plan)
    assert got.dtype == torch.bfloat16
    # One rounding to bfloat16, which the interpreter does by cutting off.
    assert ((got.double() - exact).abs() <= 2**-7 * exact.abs() + 1e-4 * exact.abs().max()).all()


@pytest.mark.parametrize("device", ["cpu", ON_GPU])
def test_a_broken_row_stays_alone(device: str) -> None:
    x, weight = drawn(device, torch.bfloat16, 3, 1024), drawn(device, torch.bfloat16, 1024, 64)
    for plan in (Plan("steps", 2, 32, 64, 2), Plan("whole", 2, 32, 512, rows=4), Plan("split", 2, 16, 128, rows=16)):
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
    assert plans.plain(65, 2048, 64) is None
    assert plans.plain(2, 96, 64) is None
    assert plans.undivided(2, 80, 64) is None
    with pytest.raises(ValueError, match="do not fit"):
        triton.product(x, weight.double(), Plan("steps", 1, 8, 16, 2))
    with pytest.raises(ValueError, match="do not fit"):
        triton.product(x.bfloat16(), Rounded.of(turned[:, :40]), Plan("steps", 1, 8, 16, 2))


def test_codes_are_the_nearest_of_their_row() -> None:
    weight = drawn("cpu", torch.float32, 7, 33)
    weight[3] = 0.0
    rounded = Rounded.of(weight[:2], weight[2:])
    assert rounded.shape == (33, 7)
    assert rounded.codes.abs().amax(1).tolist() == [127, 127, 127, 0, 127, 127, 127]
    # Half a code, and the roundings of the quotient and of the scale.
    limit = rounded.scales[:, None] * (0.5 + 127 * 2**-22)
    assert ((rounded.dense(torch.float32).T - weight).abs() <= limit).all()
    assert torch.equal(Rounded.of(rounded.dense(torch.float32).T).codes, rounded.codes)


FORMS = [
    (1, 96, 40, Plan("whole", 3, 16, 32, rows=1)),
    (3, 128, 40, Plan("whole", 1, 8, 128, rows=2)),
    (5, 128, 40, Plan("split", 2, 16, 16, rows=8)),
    (17, 96, 40, Plan("steps", 3, 32, 32, 3)),
    (70, 96, 33, Plan("steps", 1, 16, 32, 2, rows=16)),
]


@pytest.mark.parametrize("device", ["cpu", ON_GPU])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("rows", "inner", "outer", "plan"), FORMS)
def test_codes_times_rows(
    device: str, dtype: torch.dtype, rows: int, inner: int, outer: int, plan: Plan, monkeypatch: pytest.MonkeyPatch
) -> None:
    x = drawn(device, dtype, rows, inner)
    weight = Rounded.of(drawn(device, dtype, outer, x.shape[1]))
    empty = torch.empty
    monkeypatch.setattr(torch, "empty", lambda *args, **options: empty(*args, **options).fill_(torch.nan))
    got = triton.product(x, weight, plan)
    assert torch.equal(triton.product(x, weight, plan), got)
    whole = got.double().sum(0) if got.ndim == 3 else got.double()
    exact = x.double() @ (weight.codes.double() * weight.scales.double()[:, None]).T
    assert got.dtype == (torch.float32 if plan.shares > 1 else dtype)
    # Products of a 16-bit value and a code are exact in float32, of float32 they round once: sums round K + 1 times by half a
    # unit. A product in one share is rounded to x's type, which the interpreter does by cutting off.
    unit = 2 * torch.finfo(got.dtype).eps if plan.shares == 1 else 0.0
    size = x.double().abs() @ (weight.codes.double().abs() * weight.scales.double()[:, None]).T
    assert ((whole - exact).abs() <= unit * exact.abs() + (inner + 2) * 2**-24 * size).all()


@pytest.mark.parametrize("device", ["cpu", ON_GPU])
def test_rounded_products_of_every_number_of_rows(device: str) -> None:
    """As a trunk asks for them: through the plans on a GPU, multiplied out on a CPU."""
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    for inner, outer in ((64, 48), (1024, 1088), (4096, 1024), (72, 40)):
        weight = Rounded.of(drawn(device, dtype, outer, inner))
        for rows in (1, 2, 33, 65, 513):
            x = drawn(device, dtype, rows, inner)
            exact = x.double() @ (weight.codes.double() * weight.scales.double()[:, None]).T
            for got in (times(x, weight), shared(few_rows(x, weight), dtype)):
                assert got.dtype == dtype
                # The weight multiplied out, and the product, each rounded to the type; sums round K times by half a unit.
                unit = 2 * torch.finfo(dtype).eps + inner**0.5 * 2**-24
                assert (got.double() - exact).norm() <= unit * exact.norm()
