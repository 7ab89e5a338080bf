"""Products with codes held in registers: their order in memory, and the kernel in the Gluon interpreter and on a GPU."""

from __future__ import annotations

import pytest
import torch
from gluon_interpreter import Interpreter
from torch import Tensor

from forefetch.kernels.few_rows import Rounded, few_rows, held, opened, shared, times
from forefetch.kernels.few_rows.plans import HeldPlan

ON_GPU = pytest.param("cuda", marks=[pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")])


def drawn(rows: int, inner: int, outer: int) -> tuple[Tensor, Rounded]:
    draw = torch.Generator().manual_seed(rows + inner + outer)
    x = torch.randn(rows, inner, generator=draw).bfloat16()
    return x, Rounded.of(torch.randn(outer, inner, generator=draw))


def exact(x: Tensor, weight: Rounded) -> Tensor:
    return x.double() @ (weight.codes.double() * weight.scales.double()[:, None]).T


def interpreted(x: Tensor, weight: Rounded, plan: HeldPlan, eager: bool) -> Tensor:
    """`held.product`, from memory that holds NaN."""
    (rows, inner), outer = x.shape, weight.shape[1]
    out = torch.full((inner // plan.each, rows, outer), torch.nan)
    height = held.rows_of_a_program(rows)
    grid = outer // (16 * plan.warps), inner // plan.each, -(-rows // height)
    layouts = [height if name == "M" else plan.warps if name == "WARPS" else None for name in held.layouts(height, plan.warps)]
    words = weight.codes.view(torch.int32)
    Interpreter(eager).run(held._held, grid, x, words, weight.scales, out, rows, inner, outer, plan.each, False, *layouts)
    return out


def test_the_order_is_undone() -> None:
    weight = drawn(1, 96, 128)[1]
    arranged = weight.arranged()
    assert not torch.equal(arranged.codes, weight.codes)
    for dtype in (torch.float32, torch.bfloat16):
        assert torch.equal(arranged.dense(dtype), weight.dense(dtype))


@pytest.mark.parametrize("eager", [True, False])
@pytest.mark.parametrize(("rows", "plan"), [(1, HeldPlan(256, 4)), (11, HeldPlan(128, 8)), (67, HeldPlan(512, 8, 96))])
def test_the_kernel_interpreted(rows: int, plan: HeldPlan, eager: bool) -> None:
    x, weight = drawn(rows, 512, 128)
    x[rows // 2] = torch.nan
    shares = interpreted(x, weight.arranged(), plan, eager)
    bad = torch.arange(rows) == rows // 2
    assert shares[:, bad].isnan().all(), "a broken row stays alone, and its sums are no numbers"
    x, wanted = x[~bad], exact(x[~bad], weight)
    # Products of bfloat16 and a code are exact in float32; a share's sum, and then its scale, round by half a unit each.
    size = x.double().abs() @ (weight.codes.double().abs() * weight.scales.double()[:, None]).T
    assert ((shares[:, ~bad].double().sum(0) - wanted).abs() <= 2**-22 * size).all()


def test_what_the_kernel_does_not_read() -> None:
    x, weight = drawn(2, 512, 64)
    for rows, other in ((x.float(), weight.arranged()), (x, weight), (x[:, :256].contiguous(), weight.arranged())):
        with pytest.raises(ValueError, match="do not fit"):
            held.product(rows, other, HeldPlan(256, 4))


@pytest.mark.parametrize("device", ["cpu", ON_GPU])
@pytest.mark.parametrize(("inner", "outer", "fragments"), [(96, 128, True), (160, 64, True), (72, 40, False)])
def test_multiplied_out(device: str, inner: int, outer: int, fragments: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    _, weight = drawn(1, inner, outer)
    kept = weight.arranged() if fragments else weight
    kept = Rounded(kept.codes.to(device), kept.scales.to(device), fragments)
    empty = torch.empty
    monkeypatch.setattr(torch, "empty", lambda *args, **options: empty(*args, **options).fill_(torch.nan))
    for dtype in (torch.float32, torch.float16):
        assert torch.equal(opened.dense(kept, dtype).cpu(), weight.dense(dtype))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
@pytest.mark.parametrize(("inner", "outer"), [(512, 64), (2048, 640), (4096, 256)])
def test_on_a_gpu(inner: int, outer: int) -> None:
    for rows in (1, 2, 8, 9, 33, 64, 65, 200):
        x, weight = drawn(rows, inner, outer)
        wanted, kept = exact(x, weight), Rounded(weight.codes.cuda(), weight.scales.cuda()).arranged()
        shares = few_rows(x.cuda(), kept)
        if rows <= 64 and shares.ndim == 3:
            error = (shares.double().sum(0).cpu() - wanted).norm() / wanted.norm()
            assert error < inner**0.5 * 2**-23
            assert torch.equal(few_rows(x.cuda(), kept), shares)
        for got in (times(x.cuda(), kept), shared(shares, x.dtype)):
            # The product is rounded to bfloat16, beyond 64 rows the weight before as well.
            assert (got.double().cpu() - wanted).norm() <= 2**-7 * wanted.norm()
