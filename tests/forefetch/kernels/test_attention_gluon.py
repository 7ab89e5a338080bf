"""The Hopper kernel over sealed pages against float64. It exists on a GPU alone: run with `pytest -m gpu`."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from sealed_scenes import Scene, expected_error, make_scene, relative, truth
from torch import Tensor

from forefetch.kernels.kv_codec import NAMES, KvFormat

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
SCALE = 128**-0.5
# Within the sinks, around the first pages' edges and those of what is recent, many pages, an idle row.
LENGTHS = [1, 15, 16, 17, 127, 128, 192, 193, 255, 256, 257, 320, 321, 1000, 0, 2049]


def make(name: str, **options: int) -> KvFormat:
    return KvFormat(name, thirds=32 if name == "mixed" else 0, **options)


def queries(rows: int, heads: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.randn(rows, heads, 128, generator=torch.Generator().manual_seed(5)).to(dtype)


def run(q: Tensor, scene: Scene, programs: int, scale: float = SCALE, apart: int = 0, flat: bool = False) -> Tensor:
    """`programs` of each stream or, if `flat`, in all. Poisoned output and scratch."""
    from forefetch.kernels.attention import gluon
    from forefetch.kernels.attention.triton import Scratch

    on_device, q = scene.to("cuda"), q.cuda()
    cut, kv_heads = gluon.Cut(programs, apart, gluon.FLAT if flat else None), len(scene.kv.pages)
    made = gluon.plan_scratch(cut, len(q) + 1, kv_heads, q.shape[1] // kv_heads, q.device)  # for a larger batch
    scratch, out = Scratch(made.partial.fill_(torch.nan), made.stats.fill_(torch.nan)), torch.full_like(q, torch.nan)
    return gluon.decode_sealed(q, on_device.kv, on_device.plan, scene.format, scale, out, cut, scratch).cpu()


@pytest.mark.parametrize("group", [1, 4, 7, 8])
@pytest.mark.parametrize("name", NAMES)
def test_ragged_batch(name: str, group: int) -> None:
    scene = make_scene(make(name), LENGTHS)
    q = queries(len(LENGTHS), 2 * group)
    expected, bound = truth(q, scene, SCALE), expected_error(q, scene, SCALE)
    cuts = [(1, 0, False), (3, 0, False), (7, 0, False), (3, 1, False), (10, 3, False)]
    for programs, apart, flat in cuts + [(32, 0, True), (97, 0, True)] * (group == 8):
        got = run(q, scene, programs, apart=apart, flat=flat)
        assert bool((got[LENGTHS.index(0)] == 0).all())
        assert relative(got, expected) < bound
        for row, length in enumerate(LENGTHS):
            if length:
                assert relative(got[row], expected[row]) < 2 * bound, f"row of {length}"


@pytest.mark.parametrize(
    ("name", "outliers", "sinks", "recent"),
    [
        ("e2m0", 0, 0, 0),
        ("asym3", 2, 127, 64),
        ("fp4", 0, 1, 130),
        ("mixed", 4, 16, 1),
        ("fp4", 4, 16, 1),
        ("e2m0", 2, 127, 64),
    ],
)
@pytest.mark.parametrize("heads", [8, 16])
def test_parameters(name: str, outliers: int, sinks: int, recent: int, heads: int) -> None:
    scene = make_scene(make(name, outliers=outliers, sinks=sinks, recent=recent), [1, 130, 258, 700])
    q = queries(4, heads, torch.float16)
    assert relative(run(q, scene, 2), truth(q, scene, SCALE)) < expected_error(q, scene, SCALE)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("strength", [0.1, 4.0, 16.0])
@pytest.mark.parametrize("heads", [8, 16])
def test_flat_and_peaked_attention(strength: float, name: str, heads: int) -> None:
    """One token over a long flat rest, and scores that differ by hundreds."""
    scene = make_scene(make(name), [1500, 700])
    q = queries(2, heads) * strength
    assert relative(run(q, scene, 3), truth(q, scene, SCALE)) < expected_error(q, scene, SCALE)


def test_the_same_bits_every_time() -> None:
    scene, q = make_scene(KvFormat("e2m0"), LENGTHS), queries(len(LENGTHS), 16)
    assert torch.equal(run(q, scene, 3), run(q, scene, 3))


def test_a_captured_graph_follows_lengths_and_tables() -> None:
    """Captured on a short batch, replayed on a longer one: nothing of the plan is read on the host."""
    from forefetch.kernels.attention import gluon

    scene, q = make_scene(KvFormat("e2m0"), LENGTHS), queries(len(LENGTHS), 8)
    on_device, query = scene.to("cuda"), q.cuda()
    plan = dataclasses.replace(
        on_device.plan, sealed=torch.zeros_like(on_device.plan.sealed), lengths=torch.zeros_like(on_device.plan.lengths)
    )
    gluon.decode_sealed(query, on_device.kv, plan, scene.format, SCALE)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = gluon.decode_sealed(query, on_device.kv, plan, scene.format, SCALE)
    graph.replay()
    assert bool((out == 0).all())
    plan.sealed.copy_(on_device.plan.sealed)
    plan.lengths.copy_(on_device.plan.lengths)
    graph.replay()
    assert relative(out.cpu(), truth(q, scene, SCALE)) < expected_error(q, scene, SCALE)


def test_the_tolerance_catches_broken_kernels() -> None:
    scene, q = make_scene(KvFormat("e2m0"), [200, 300]), queries(2, 8)
    expected, bound = truth(q, scene, SCALE), expected_error(q, scene, SCALE)
    plan, kv = scene.plan, scene.kv
    wrong = {
        "scale": run(q, scene, 2, SCALE * 1.05),
        "sinks": run(q, dataclasses.replace(scene, kv=dataclasses.replace(kv, sink_v=kv.sink_v.flip(3))), 2),
        "last tokens": run(q, dataclasses.replace(scene, plan=dataclasses.replace(plan, lengths=plan.lengths - 8)), 2),
        "head": run(q, dataclasses.replace(scene, kv=dataclasses.replace(kv, pages=kv.pages.flip(0))), 2),
    }
    for name, got in wrong.items():
        assert relative(got, expected) > bound, name
