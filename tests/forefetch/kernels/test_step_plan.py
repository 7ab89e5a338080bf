"""What a step works out once for all layers, each in one launch: in the interpreter here and on a GPU, as defined."""

from __future__ import annotations

import pytest
import torch

from forefetch.kernels.attention.sealed_plan import place_sealed_ref
from forefetch.kernels.attention.triton_sealed_plan import place_sealed
from forefetch.kernels.grouped_mlp import counting
from forefetch.kernels.grouped_mlp.tally import tally
from forefetch.kernels.kv_codec import KvFormat
from forefetch.kernels.qkv import ref, rope

ON_GPU = pytest.param("cuda", marks=[pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")])


@pytest.mark.parametrize("device", ["cpu", ON_GPU])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("half", [4, 40])
def test_rotation_tables(device: str, dtype: torch.dtype, half: int) -> None:
    """cos and sin of the same float32 angle by two libraries: each within an ulp of 1, and one more where dtype rounds."""
    positions = torch.tensor([0, 1, 77, 40_000], device=device)
    frequencies = (1.0 / 10_000 ** (torch.arange(half) / half)).to(device)
    for found, expected in zip(
        rope.tables(positions, frequencies, 1.3, dtype), ref.tables(positions, frequencies, 1.3, dtype), strict=True
    ):
        assert found.shape == expected.shape == (4, 1, 2 * half)
        assert found.dtype == expected.dtype == dtype
        torch.testing.assert_close(found, expected, rtol=0, atol=4 * 1.3 * torch.finfo(dtype).eps)


@pytest.mark.parametrize("device", ["cpu", ON_GPU])
@pytest.mark.parametrize(("decodes", "rows"), [(1, 1), (5, 5), (5, 69), (70, 70), (0, 64)])
def test_places_over_sealed_pages(device: str, decodes: int, rows: int) -> None:
    format, draw = KvFormat("e2m0", page=32, recent=9, sinks=4), torch.Generator().manual_seed(rows)
    lengths = torch.randint(0, 400, (decodes,), generator=draw, dtype=torch.int32)
    lengths[: decodes // 2 : 2] = 0  # idle
    held = torch.randint(0, 4, (2, decodes + 3), generator=draw, dtype=torch.int32)[:, :decodes]
    table = torch.zeros(decodes, 14, dtype=torch.int32)
    expected = place_sealed_ref(table, lengths, held, format, 6, rows)
    found = place_sealed(*(part.to(device) for part in (table, lengths)), held.to(device), format, 6, rows)
    assert torch.equal(found.places.cpu(), expected.places)
    assert torch.equal(found.positions.cpu(), expected.positions)
    for name in ("sealed", "lengths", "tail"):
        assert torch.equal(getattr(found.plan, name).cpu(), getattr(expected.plan, name))
        assert getattr(found.plan, name).data_ptr() % 16 == 0  # kernels are compiled for aligned lists, at any batch


@pytest.mark.parametrize("device", ["cpu", ON_GPU])
def test_pairs_are_counted_by_layer_and_expert(device: str) -> None:
    layers, room, rows, top_k, experts = 3, 80, 70, 4, 9
    draw = torch.Generator().manual_seed(0)
    chosen = torch.randint(-1, experts, (layers, room, top_k), generator=draw, dtype=torch.int32)[:, :rows]
    idle = torch.rand(rows, 1, generator=draw) < 0.3
    expected = torch.randint(0, 5, (layers, experts + 1), generator=draw)
    found = expected.to(device, copy=True)
    for layer in range(layers):
        named = chosen[layer][~idle[:, 0]]
        expected[layer, :experts] += torch.bincount(named[named >= 0], minlength=experts)
    other = found.clone()
    counting.tally(found, chosen.to(device), idle.to(device))
    tally(other, chosen.to(device), idle.to(device))
    assert torch.equal(found.cpu(), expected)
    assert torch.equal(other.cpu(), expected)
