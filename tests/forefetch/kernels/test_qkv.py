"""Norm, rotation and cache write against float64, in the interpreter here and on a GPU."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from forefetch.kernels.qkv import HeadNorms, ref, triton

ON_GPU = pytest.param("cuda", marks=[pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")])
SHAPES = [(1, 1, 1, 8), (3, 8, 2, 128), (2, 7, 1, 80), (4, 4, 4, 64)]  # rows, query heads, KV heads, D
PLACES = 11


def case(shape: tuple[int, int, int, int], dtype: torch.dtype, device: str) -> tuple[Tensor, Tensor, Tensor, HeadNorms, Tensor]:
    """qkv, cos, sin, norms, slots."""
    rows, heads, kv_heads, dim = shape
    draw = torch.Generator().manual_seed(1)
    qkv = torch.randn(rows, (heads + 2 * kv_heads) * dim, generator=draw)
    angle = torch.rand(rows, 1, dim // 2, generator=draw) * 6
    angles = torch.cat((angle, angle), -1)
    norms = HeadNorms(*(torch.rand(dim, generator=draw).to(device, dtype) for _ in range(2)), 1e-6)
    slots = torch.randperm(PLACES, generator=draw)[:rows]
    return qkv.to(device, dtype), angles.cos().to(device, dtype), angles.sin().to(device, dtype), norms, slots.to(device)


def caches(shape: tuple[int, int, int, int], dtype: torch.dtype, device: str) -> tuple[Tensor, Tensor]:
    return tuple(torch.full((shape[2], PLACES, shape[3]), torch.nan, dtype=dtype, device=device) for _ in range(2))  # type: ignore[return-value]


def exact(qkv: Tensor, cos: Tensor, sin: Tensor, norms: HeadNorms | None, kv_heads: int, dim: int) -> tuple[Tensor, ...]:
    """q, k, v [T, heads, D] in float64."""
    heads = qkv.double().view(len(qkv), -1, dim)
    q, k, v = heads[:, : -2 * kv_heads], heads[:, -2 * kv_heads : -kv_heads], heads[:, -kv_heads:]
    if norms is not None:
        q, k = (
            x * (x.square().mean(-1, keepdim=True) + norms.eps).rsqrt() * w.double() for x, w in ((q, norms.q), (k, norms.k))
        )
    turned = [x * cos.double() + torch.cat((-x[..., dim // 2 :], x[..., : dim // 2]), -1) * sin.double() for x in (q, k)]
    return *turned, v


@pytest.mark.parametrize("device", ["cpu", ON_GPU])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("normed", [True, False])
@pytest.mark.parametrize("shape", SHAPES)
def test_both_agree_with_float64(shape: tuple[int, int, int, int], normed: bool, dtype: torch.dtype, device: str) -> None:
    qkv, cos, sin, norms, slots = case(shape, dtype, device)
    expected = exact(qkv, cos, sin, norms if normed else None, shape[2], shape[3])
    # The definition rounds the normed head, each product and the sum: four times half a unit of the head's largest value.
    unit = 2 * torch.finfo(dtype).eps
    for run in (triton.enter, ref.enter):
        k_cache, v_cache = caches(shape, dtype, device)
        q = run(qkv, cos, sin, norms if normed else None, slots, k_cache, v_cache)
        found = q, k_cache[:, slots].transpose(0, 1), v_cache[:, slots].transpose(0, 1)
        for there, wanted in zip(found, expected, strict=True):
            assert ((there.double() - wanted).abs() <= unit * wanted.abs().amax(-1, keepdim=True)).all()
        untouched = [place for place in range(PLACES) if place not in slots.tolist()]
        assert k_cache[:, untouched].isnan().all()
        assert v_cache[:, untouched].isnan().all()


@pytest.mark.parametrize("device", ["cpu", ON_GPU])
def test_a_narrow_cache_saturates_and_a_bad_row_stays_alone(device: str) -> None:
    shape = SHAPES[1]
    qkv, cos, sin, _, slots = case(shape, torch.float32, device)
    clean = triton.enter(qkv, cos, sin, None, slots, *caches(shape, torch.float32, device))
    qkv[1] *= 1e6
    qkv[2] = torch.nan
    k_cache, v_cache = caches(shape, torch.float16, device)
    q = triton.enter(qkv, cos, sin, None, slots, k_cache, v_cache)
    assert torch.equal(q[0], clean[0])
    assert v_cache[:, slots[1]].abs().max() == torch.finfo(torch.float16).max
    assert k_cache[:, slots[1]].isfinite().all()
    assert v_cache[:, slots[2]].isnan().all()


def test_shapes_that_do_not_fit_are_refused() -> None:
    qkv, cos, sin, _, slots = case(SHAPES[1], torch.float32, "cpu")
    with pytest.raises(ValueError, match="do not fit"):
        triton.enter(qkv[:, :-1].contiguous(), cos, sin, None, slots, *caches(SHAPES[1], torch.float32, "cpu"))
    with pytest.raises(ValueError, match="contiguous"):
        triton.enter(qkv.repeat(1, 2)[:, : qkv.shape[1]], cos, sin, None, slots, *caches(SHAPES[1], torch.float32, "cpu"))


@pytest.mark.parametrize("device", ["cpu", ON_GPU])
def test_shares_are_added_up_first(device: str) -> None:
    shape = SHAPES[1]
    qkv, cos, sin, norms, slots = case(shape, torch.float32, device)
    shares = torch.stack((qkv * 0.25, qkv * 0.5, qkv * 0.25))  # exact
    for run in (triton.enter, ref.enter):
        plain, summed = caches(shape, torch.float32, device), caches(shape, torch.float32, device)
        expected = run(qkv, cos, sin, norms, slots, *plain)
        torch.testing.assert_close(run(shares, cos, sin, norms, slots, *summed), expected)
        torch.testing.assert_close(summed[0][:, slots], plain[0][:, slots])
        torch.testing.assert_close(summed[1][:, slots], plain[1][:, slots])
