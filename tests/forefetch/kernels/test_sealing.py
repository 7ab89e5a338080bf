"""Sealing on a GPU gives the reference's bytes; in the interpreter where there is no GPU."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from forefetch.kernels.kv_codec import NAMES, KvFormat, ref, sealing
from forefetch.kernels.kv_codec.sealing.tails import move

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


SHAPES = [
    ("e2m0", 48, 32, 2),
    ("asym2", 32, 96, 0),
    ("asym3", 64, 32, 1),
    ("mixed", 32, 32, 1),
    ("fp4", 48, 32, 2),
]


@pytest.mark.parametrize(("name", "dim", "page", "outliers"), SHAPES)
def test_the_same_bytes(name: str, dim: int, page: int, outliers: int) -> None:
    format = KvFormat(name, dim, page=page, outliers=outliers, sinks=5, thirds=16 if name == "mixed" else 0)
    k, v = awkward(format)
    weight = torch.rand(3, dim, generator=torch.Generator().manual_seed(4))
    for skip, some in ((0, None), (5, weight))[name != "e2m0" :]:
        expected = ref.seal(k, v, format, skip=skip, weight=some)
        there = None if some is None else some.to(DEVICE)
        got = sealing.seal(k.to(DEVICE), v.to(DEVICE), format, skip=skip, weight=there)
        assert torch.equal(got.cpu(), expected)


@pytest.mark.parametrize("name", ["e2m0", "asym3", "fp4"])
def test_the_order_of_tensor_cores(name: str) -> None:
    format = KvFormat(name, 64, outliers=1)
    k, v = torch.randn(2, 1, 128, 64, generator=torch.Generator().manual_seed(6)).half()
    assert torch.equal(sealing.seal(k.to(DEVICE), v.to(DEVICE), format).cpu(), ref.seal(k, v, format))


@pytest.mark.gpu
@pytest.mark.skipif(DEVICE == "cpu", reason="needs a CUDA device")
@pytest.mark.parametrize("name", NAMES)
def test_many_pages_of_the_usual_shape(name: str) -> None:
    format = KvFormat(name, thirds=32 if name == "mixed" else 0)
    k, v = torch.randn(2, 256, 128, 128, generator=torch.Generator().manual_seed(5)).half()
    k *= 1 + 4 * torch.rand(128, generator=torch.Generator().manual_seed(7))
    expected = ref.seal(k, v, format, skip=16)
    assert torch.equal(sealing.seal(k.cuda(), v.cuda(), format, skip=16).cpu(), expected)


@pytest.mark.parametrize("recent", [9, 70])
def test_tails_are_sealed_where_they_lie_and_move_on(recent: int) -> None:
    """Some lanes of some layers, the first page of a request among them; everything else stays as it was."""
    format = KvFormat("e2m0", 32, page=32, sinks=3, recent=recent)
    tails = torch.randn(2, 2, 1, 5, format.tail_tokens, 32, generator=torch.Generator().manual_seed(8)).half()[:, :, :, :4]
    pages = torch.full((2, 1, 6, format.blob_bytes), 0xEE, dtype=torch.uint8)
    due = torch.tensor([[3, 1, 3], [0, 4, 0]], dtype=torch.int32)
    whole = torch.full((2, 2, 1, 5, format.tail_tokens, 32), torch.nan, dtype=torch.float16, device=DEVICE)
    there = whole[:, :, :, :4].copy_(tails), pages.to(DEVICE, copy=True), due.to(DEVICE)
    sealing.seal_tails(*there, format)
    move(there[0], there[2], format)
    for lane, page, skip in due.tolist():
        k, v = (tails[:, kind, :, lane, :32].flatten(0, 1) for kind in (0, 1))
        pages[:, :, page] = ref.seal(k, v, format, skip=skip).view(2, 1, -1)
    assert torch.equal(there[1].cpu(), pages)
    moved = tails.clone()
    moved[:, :, :, [3, 0], :recent] = tails[:, :, :, [3, 0], 32 : 32 + recent]
    assert torch.equal(there[0].cpu(), moved)


def test_nothing_to_seal_and_what_is_refused() -> None:
    format = KvFormat("e2m0", 32, page=32)
    assert sealing.seal(torch.zeros(0, 32, 32), torch.zeros(0, 32, 32), format).shape == (0, format.blob_bytes)
    with pytest.raises(ValueError, match="cannot seal"):
        sealing.seal(torch.zeros(1, 32, 16), torch.zeros(1, 32, 32), format)
    pages = torch.zeros(1, 1, 2, format.blob_bytes + 1, dtype=torch.uint8)
    with pytest.raises(ValueError, match="cannot seal"):
        sealing.seal_tails(torch.zeros(1, 2, 1, 1, 144, 32).half(), pages, torch.zeros(1, 3).int(), format)
