"""The portable kernels over sealed pages: opening, and decode attention, in the interpreter where there is no GPU."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from sealed_scenes import Scene, expected_error, make_scene, relative, truth
from torch import Tensor

from forefetch.kernels.attention import sealed_triton
from forefetch.kernels.attention.triton import Scratch
from forefetch.kernels.kv_codec import NAMES, KvFormat, ref
from forefetch.kernels.kv_codec import triton as codec

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
LENGTHS = [4, 0, 42, 80]  # inside the sinks, an idle row, around a tail's edge, two pages
if DEVICE == "cuda":
    LENGTHS += [1, 31, 32, 33, 41, 200]


def small(name: str, dim: int = 32, page: int = 32) -> KvFormat:
    return KvFormat(name, dim, page=page, thirds=16 if name == "mixed" else 0, sinks=5, recent=9)


def queries(rows: int, heads: int, dim: int) -> Tensor:
    return torch.randn(rows, heads, dim, generator=torch.Generator().manual_seed(5)).half()


def run(q: Tensor, scene: Scene, splits: int, scale: float) -> Tensor:
    """Poisoned output and scratch."""
    there = scene.to(DEVICE)
    shape = (len(q), q.shape[1], splits)
    scratch = Scratch(
        torch.full((*shape, q.shape[2]), torch.nan, device=DEVICE), torch.full((*shape, 2), torch.nan, device=DEVICE)
    )
    out = torch.full_like(q, torch.nan, device=DEVICE)
    return sealed_triton.decode_sealed(q.to(DEVICE), there.kv, there.plan, scene.format, scale, out, scratch).cpu()


@pytest.mark.parametrize(("dim", "page"), [(48, 32), (64, 128)])
@pytest.mark.parametrize("name", NAMES)
def test_pages_open_to_the_same_bits(name: str, dim: int, page: int) -> None:
    format = small(name, dim, page)
    k, v = torch.randn(2, 2, page, dim, generator=torch.Generator().manual_seed(1)).mul_(3)
    blobs = ref.seal(k, v, format)
    for opened, expected in zip(codec.open_pages(blobs.to(DEVICE), format), ref.open_pages(blobs, format), strict=True):
        # One product and one sum in float32 on either side; a GPU may fuse them, which saves a rounding of the product.
        bound = 2**-24 * expected.abs().max() * 2 if DEVICE == "cuda" else 0.0
        assert float((opened.cpu() - expected).abs().max()) <= bound


@pytest.mark.parametrize(("group", "dim"), [(4, 32), (7, 48), (8, 32)])
@pytest.mark.parametrize("name", NAMES)
def test_ragged_batch(name: str, group: int, dim: int) -> None:
    if DEVICE == "cpu" and ((name == "e2m0") != (group == 7) or group == 8):
        pytest.skip("one shape per format is enough in the interpreter")
    scene, q = make_scene(small(name, dim), LENGTHS, kv_heads=1), queries(len(LENGTHS), group, dim)
    got, expected = run(q, scene, 3, 0.2), truth(q, scene, 0.2)
    assert bool((got[LENGTHS.index(0)] == 0).all())
    assert relative(got, expected) < expected_error(q, scene, 0.2)


def test_the_tolerance_catches_broken_kernels() -> None:
    scene, q = make_scene(small("e2m0"), [80, 49]), queries(2, 2, 32)
    expected, bound = truth(q, scene, 0.2), expected_error(q, scene, 0.2)
    kv, plan = scene.kv, scene.plan
    wrong = {
        "scale": run(q, scene, 2, 0.22),
        "sinks": run(q, dataclasses.replace(scene, kv=dataclasses.replace(kv, sink_v=kv.sink_v.flip(3))), 2, 0.2),
        "last token": run(q, dataclasses.replace(scene, plan=dataclasses.replace(plan, lengths=plan.lengths - 1)), 2, 0.2),
        "head": run(q, dataclasses.replace(scene, kv=dataclasses.replace(kv, pages=kv.pages.flip(0))), 2, 0.2),
    }
    for name, got in wrong.items():
        assert relative(got, expected) > bound, name


def test_misfits_are_refused() -> None:
    scene, q = make_scene(small("e2m0"), [40]), queries(1, 3, 32)
    with pytest.raises(ValueError, match="do not fit"):
        sealed_triton.decode_sealed(q, scene.kv, scene.plan, scene.format, 0.2)
    with pytest.raises(ValueError, match="contiguous uint8"):
        codec.open_pages(scene.kv.pages[0].half(), scene.format)
