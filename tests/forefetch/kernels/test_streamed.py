"""A head's product with codes in fragment order: the kernel in the Gluon interpreter and on a GPU."""

from __future__ import annotations

import pytest
import torch
from gluon_interpreter import Interpreter
from torch import Tensor

from forefetch.kernels.few_rows import Rounded, plans, streamed, times
from forefetch.kernels.few_rows.held import rows_of_a_program
from forefetch.kernels.few_rows.plans import StreamedPlan
from tests.forefetch.kernels.test_held import drawn, exact


def interpreted(x: Tensor, weight: Rounded, plan: StreamedPlan, eager: bool) -> Tensor:
    """`streamed.product`, from memory that holds NaN."""
    (rows, inner), outer = x.shape, weight.shape[1]
    out = torch.full((rows, outer), torch.nan, dtype=x.dtype)
    height = rows_of_a_program(rows)
    grid = -(-outer // (16 * streamed.WARPS * plan.tiles)), -(-rows // height)
    layouts = [height if name == "M" else streamed.WARPS if name == "WARPS" else None for name in streamed._layouts(height)]
    sizes = inner, outer, min(plan.ring, inner // 128), plan.tiles, False
    Interpreter(eager).run(
        streamed._streamed, grid, x, weight.codes.view(torch.int32), weight.scales, out, rows, *sizes, *layouts
    )
    return out


def check(found: Tensor, x: Tensor, weight: Rounded) -> None:
    """As for products in shares (`test_held`), and a last rounding to bfloat16."""
    wanted = exact(x, weight)
    size = x.double().abs() @ (weight.codes.double().abs() * weight.scales.double()[:, None]).T
    assert ((found.double() - wanted).abs() <= 2**-21 * size + 2**-8 * wanted.abs()).all()


@pytest.mark.parametrize("eager", [True, False])
@pytest.mark.parametrize(
    ("rows", "inner", "outer", "plan"), [(3, 640, 320, StreamedPlan(2, 3)), (67, 256, 64, StreamedPlan(2, 4))]
)
def test_the_kernel_interpreted(rows: int, inner: int, outer: int, plan: StreamedPlan, eager: bool) -> None:
    x, weight = drawn(rows, inner, outer)
    x[rows // 2] = torch.nan
    found = interpreted(x, weight.arranged(), plan, eager)
    bad = torch.arange(rows) == rows // 2
    assert found[bad].isnan().all(), "a broken row stays alone"
    check(found[~bad], x[~bad], weight)


def test_what_the_kernel_does_not_read() -> None:
    x, weight = drawn(2, 512, 64)
    for rows, other in ((x.float(), weight.arranged()), (x, weight), (x[:, :256].contiguous(), weight.arranged())):
        with pytest.raises(ValueError, match="do not fit"):
            streamed.product(rows, other, StreamedPlan(2))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
@pytest.mark.parametrize("rows", [1, 16, 33, 64, 65])
def test_heads_on_a_gpu(rows: int) -> None:
    """More columns than a whole number of programs, and memory that held NaN."""
    x, weight = drawn(rows, 1024, plans.LEAST_STREAMED + 320)
    kept = weight.arranged()
    kept = Rounded(kept.codes.cuda(), kept.scales.cuda(), True)
    assert plans.streamed(rows, *weight.shape) is not None
    there = x.cuda()
    first = times(there, kept)
    check(first.cpu(), x, weight)
    assert torch.equal(first, times(there, kept))
