"""The fused entry against its definition in float64; in the interpreter where there is no GPU."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from forefetch.kernels.entry import ref
from forefetch.kernels.entry import triton as kernels
from forefetch.kernels.qkv import HeadNorms

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
HIDDEN, HEADS, KV_HEADS, DIM, PLACES = 256, 3, 1, 32, 40


def inputs(rows: int, dtype: torch.dtype, normed: bool) -> list[object]:
    generator = torch.Generator().manual_seed(rows)

    def random(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator).to(dtype)

    angle = torch.rand(rows, 1, DIM // 2, generator=generator).repeat(1, 1, 2) * 6
    weight = random(HIDDEN, (HEADS + 2 * KV_HEADS) * DIM) / 16
    norms = HeadNorms(random(DIM), random(DIM), 1e-6) if normed else None
    slots = torch.randperm(PLACES, generator=generator)[:rows]
    return [random(rows, HIDDEN), random(HIDDEN), 1e-5, weight, (angle.cos().to(dtype), angle.sin().to(dtype)), norms, slots]


def moved(value: object, device: str, dtype: torch.dtype | None = None) -> object:
    """Everything to a device, and floating point to another type."""
    if isinstance(value, Tensor):
        return value.to(device, dtype if value.is_floating_point() else None)
    if isinstance(value, HeadNorms):
        return HeadNorms(moved(value.q, device, dtype), moved(value.k, device, dtype), value.eps)  # type: ignore[arg-type]
    return tuple(moved(part, device, dtype) for part in value) if isinstance(value, tuple) else value


def caches(device: str, dtype: torch.dtype) -> list[Tensor]:
    return [torch.full((KV_HEADS, PLACES, DIM), torch.nan, dtype=dtype, device=device) for _ in range(2)]


@pytest.mark.parametrize(("rows", "shares", "normed", "dtype"), [
    (1, 2, True, torch.float32), (5, 4, False, torch.float32), (17, 1, True, torch.bfloat16),
])  # fmt: skip
def test_against_float64(rows: int, shares: int, normed: bool, dtype: torch.dtype) -> None:
    """float32: sums of H products, relative error under (H + 8) units. bfloat16: the normed row and the result are rounded once
    each; independent roundings of 256 products add up to less than two of them."""
    given = inputs(rows, dtype, normed)
    truth = caches("cpu", torch.float64)
    expected = ref.enter_layer(*(moved(value, "cpu", torch.float64) for value in given), *truth)  # type: ignore[arg-type]
    own = caches(DEVICE, dtype)
    scratch = kernels.plan_scratch(rows, HEADS + 2 * KV_HEADS, DIM, shares, DEVICE)
    scratch.partial.fill_(torch.nan)
    bound = 4 * (HIDDEN + 8) * 2**-24 if dtype == torch.float32 else 4 * 2**-9
    for _ in range(2):  # the second launch finds the counters as the first left them
        q = kernels.enter_layer(*(moved(value, DEVICE) for value in given), *own, scratch)  # type: ignore[arg-type]
        for got, want in ((q, expected), *zip(own, truth, strict=True)):
            assert torch.equal(got.cpu().isnan(), want.isnan())
            error = (got.cpu().double() - want).nan_to_num(0).abs().max() / want.nan_to_num(0).abs().max()
            assert float(error) < bound
    assert not scratch.arrived.any()


def test_misfits_are_refused() -> None:
    given = inputs(2, torch.float32, True)
    with pytest.raises(ValueError, match="do not fit"):
        kernels.enter_layer(*given, *caches("cpu", torch.float32), kernels.plan_scratch(2, 4, DIM, 1, "cpu"))  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="multiple"):
        kernels.enter_layer(*given, *caches("cpu", torch.float32), kernels.plan_scratch(2, 5, DIM, 3, "cpu"))  # type: ignore[arg-type]
