"""Sealing on a GPU gives the reference's bytes; in the interpreter where there is no GPU."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from forefetch.kernels.kv_codec import KvFormat, ref, triton_seal

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def awkward(format: KvFormat) -> tuple[Tensor, Tensor]:
    """Strong channels; a page with a constant channel, zeros and equal rows; one beyond float16's range, with tiny values."""
    generator = torch.Generator().manual_seed(3)
    k, v = torch.randn(2, 3, format.page, format.head_dim, generator=generator)
    k *= 3 * torch.rand(format.head_dim, generator=generator)
    k[0, :, 1] = 0.0
    k[1, :, 3] = 100.0
    v[1, 2] = 0.0
    k[2] *= 1e5
    v[2, 5] = 1e-30
    return k, v


@pytest.mark.parametrize(("name", "dim", "page", "outliers"), [("e2m0", 48, 32, 2), ("asym2", 32, 96, 0), ("asym3", 64, 32, 1)])
def test_the_same_bytes(name: str, dim: int, page: int, outliers: int) -> None:
    format = KvFormat(name, dim, page=page, outliers=outliers, sinks=5)
    k, v = awkward(format)
    weight = torch.rand(3, dim, generator=torch.Generator().manual_seed(4))
    for skip, some in ((0, None), (5, weight)):
        expected = ref.seal(k, v, format, skip=skip, weight=some)
        there = None if some is None else some.to(DEVICE)
        got = triton_seal.seal(k.to(DEVICE), v.to(DEVICE), format, skip=skip, weight=there)
        assert torch.equal(got.cpu(), expected)


@pytest.mark.gpu
@pytest.mark.skipif(DEVICE == "cpu", reason="needs a CUDA device")
@pytest.mark.parametrize("name", ["e2m0", "asym2", "asym3"])
def test_many_pages_of_the_usual_shape(name: str) -> None:
    format = KvFormat(name)
    k, v = torch.randn(2, 256, 128, 128, generator=torch.Generator().manual_seed(5)).half()
    expected = ref.seal(k, v, format, skip=16)
    assert torch.equal(triton_seal.seal(k.cuda(), v.cuda(), format, skip=16).cpu(), expected)


def test_nothing_to_seal_and_what_is_refused() -> None:
    format = KvFormat("e2m0", 32, page=32)
    assert triton_seal.seal(torch.zeros(0, 32, 32), torch.zeros(0, 32, 32), format).shape == (0, format.blob_bytes)
    with pytest.raises(ValueError, match="cannot seal"):
        triton_seal.seal(torch.zeros(1, 32, 16), torch.zeros(1, 32, 32), format)
    with pytest.raises(ValueError, match="cannot seal"):
        triton_seal.seal(torch.zeros(1, 32, 32), torch.zeros(1, 32, 32), KvFormat("fp4", 32, page=32))
