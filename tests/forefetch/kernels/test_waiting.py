"""Products with weights that wait in shared memory: the kernel in the Gluon interpreter and on a GPU."""

from __future__ import annotations

import pytest
import torch
from gluon_interpreter import Interpreter
from torch import Tensor

from forefetch.kernels.few_rows import held, waiting
from forefetch.kernels.few_rows.plans import WaitingPlan


def drawn(rows: int, inner: int, outer: int, dtype: torch.dtype = torch.bfloat16) -> tuple[Tensor, Tensor]:
    draw = torch.Generator().manual_seed(rows + inner + outer)
    return torch.randn(rows, inner, generator=draw).to(dtype), torch.randn(inner, outer, generator=draw).to(dtype)


def interpreted(x: Tensor, weight: Tensor, plan: WaitingPlan, eager: bool) -> Tensor:
    """`waiting.product`, from memory that holds NaN."""
    (rows, inner), outer = x.shape, weight.shape[1]
    out = torch.full((inner // plan.each, rows, outer), torch.nan)
    height = held.rows_of_a_program(rows)
    grid = outer // (16 * plan.warps), inner // plan.each, -(-rows // height)
    named = {"M": height, "DEPTH": plan.depth, "COLUMNS": 16 * plan.warps}
    layouts = [named.get(name) for name in waiting._layouts(height, plan.warps, plan.depth)]
    ring = min(plan.ring, plan.each // plan.depth)
    Interpreter(eager).run(waiting._waiting, grid, x, weight, out, rows, inner, outer, plan.each, ring, False, *layouts)
    return out


@pytest.mark.parametrize("eager", [True, False])
@pytest.mark.parametrize(
    ("rows", "plan"),
    [(1, WaitingPlan(256, 4, 2)), (11, WaitingPlan(512, 8, 2)), (67, WaitingPlan(512, 4, 3)), (40, WaitingPlan(256, 4, 1, 64))],
)
def test_the_kernel_interpreted(rows: int, plan: WaitingPlan, eager: bool) -> None:
    x, weight = drawn(rows, 512, 128)
    x[rows // 2] = torch.nan
    shares = interpreted(x, weight, plan, eager)
    bad = torch.arange(rows) == rows // 2
    assert shares[:, bad].isnan().all(), "a broken row stays alone, and its sums are no numbers"
    x = x[~bad]
    # Products of two bfloat16 are exact in float32; a share's sum of up to 512 of them rounds.
    size = x.double().abs() @ weight.double().abs()
    assert ((shares[:, ~bad].double().sum(0) - x.double() @ weight.double()).abs() <= 2**-20 * size).all()


def test_what_the_kernel_does_not_read() -> None:
    x, weight = drawn(2, 512, 64)
    for rows, other in ((x.float(), weight.float()), (x, weight.half()), (x[:, ::2], weight[::2]), (x, weight.t())):
        with pytest.raises(ValueError, match="do not fit"):
            waiting.product(rows, other, WaitingPlan(256, 4, 2))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    "plan", [WaitingPlan(256, 4, 2), WaitingPlan(512, 4, 2), WaitingPlan(512, 8, 2), WaitingPlan(256, 4, 1, 64)], ids=str
)
def test_on_a_gpu(plan: WaitingPlan, dtype: torch.dtype) -> None:
    for rows in (2, 9, 33, 64, 65):
        x, weight = drawn(rows, 2048, 640, dtype)
        wanted = x.double() @ weight.double()
        shares = waiting.product(x.cuda(), weight.cuda(), plan)
        error = (shares.double().sum(0).cpu() - wanted).norm() / wanted.norm()
        assert error < 2048**0.5 * 2**-23
        assert torch.equal(waiting.product(x.cuda(), weight.cuda(), plan), shares)
