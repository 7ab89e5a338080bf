"""The whole Hopper kernel on a CPU, in an interpreter of its own (`gluon_interpreter.py`): every format, ragged batches, and
copies that arrive at once or as late as they may."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import pytest
import torch
from gluon_interpreter import Interpreter
from sealed_scenes import Scene, expected_error, make_scene, relative, truth
from torch import Tensor

from forefetch.kernels.attention import gluon
from forefetch.kernels.attention.gluon.kernel import split_sealed
from forefetch.kernels.kv_codec import KvFormat

SCALE = 128**-0.5


def decode(q: Tensor, scene: Scene, splits: int, eager: bool, impatient: bool = False, apart: int = 0) -> Tensor:
    """`gluon.decode_sealed` with the merge in float64; scratch poisoned."""
    kv, plan, format = scene.kv, scene.plan, scene.format
    rows, heads, _ = q.shape
    kv_heads, group = len(kv.pages), heads // len(kv.pages)
    partial, stats = torch.full((rows, heads, splits, 128), torch.nan), torch.full((rows, heads, splits, 2), torch.nan)
    tables = torch.tensor([[level] * 32 for level in gluon.level_bytes(format)], dtype=torch.int32)
    arguments: list[Any] = [q, kv.pages.view(torch.int32), kv.pages.view(torch.float16), kv.pages]
    arguments += [plan.page_table, plan.sealed, plan.lengths, plan.tail, kv.tail_k, kv.tail_v, kv.sink_k, kv.sink_v]
    arguments += [partial, stats, SCALE * math.log2(math.e), tables, apart, gluon.ONE, kv.pages.shape[1], kv.tail_k.shape[1]]
    arguments += [plan.page_table.stride(0), q.stride(0), q.stride(1)]
    arguments += [kv_heads, group, kv.tail_k.shape[2], format]
    Interpreter(eager, impatient).run(split_sealed, (splits, rows * kv_heads), *arguments)
    top, total = stats.double().unbind(-1)
    used = total != 0
    weight = torch.where(used, torch.exp2(top - torch.where(used, top, -torch.inf).amax(-1, keepdim=True)), 0.0)
    sums = torch.where(used[..., None], partial.double(), 0.0) * weight[..., None]
    return sums.sum(2) / (total * weight).sum(-1).clamp_min(1e-300)[..., None]


def make(name: str, **options: int) -> KvFormat:
    return KvFormat(name, thirds=32 if name == "mixed" else 0, **options)


CASES = [
    *(("e2m0", 4), ("e2m0", 8), ("asym2", 3), ("mixed", 8), ("mixed", 4), ("asym3", 7), ("asym3", 1)),
    *(("fp4", 8), ("fp4", 4)),
]


@pytest.mark.parametrize(("name", "group"), CASES)
def test_ragged_batch(name: str, group: int) -> None:
    """Rows without pages, with one, two, three and five, shared among two programs each; with up to four heads a third
    one takes the float16 tokens."""
    lengths = [3, 200, 0, 400, 530, 790]
    scene = make_scene(make(name, outliers=1, recent=64), lengths, kv_heads=1)
    q = torch.randn(len(lengths), group, 128, generator=torch.Generator().manual_seed(5)).half()
    expected, bound = truth(q, scene, SCALE), expected_error(q, scene, SCALE)
    apart = int(group <= 4)
    answers = [decode(q, scene, 2 + apart, eager, apart=apart) for eager in (False, True)]
    assert torch.equal(*answers)
    assert bool((answers[0][2] == 0).all())
    for row, length in enumerate(lengths):
        if length:
            assert relative(answers[0][row], expected[row]) < 2 * bound, f"row of {length}"


@pytest.mark.parametrize("rows", [1, 3, 16, 64, 500])
@pytest.mark.parametrize("max_pages", [0, 1, 15, 63, 255, 1023])
def test_every_program_of_a_plan_has_work(rows: int, max_pages: int) -> None:
    """One wave at most where work is long, no program without a page where rows are full."""
    for name, group in (("e2m0", 4), ("e2m0", 8), ("fp4", 8)):
        fit = gluon.fit(make(name), group)
        split = gluon.plan_split(rows, 8, max_pages, 132, fit.programs)
        assert 1 <= split.programs - split.apart <= max(1, max_pages)
        assert rows * 8 * split.programs <= max(rows * 8, fit.programs * 132)


@pytest.mark.parametrize("name", ["e2m0", "fp4"])
@pytest.mark.parametrize(("outliers", "sinks", "strength"), [(2, 127, 1.0), (0, 0, 16.0)])
def test_parameters(name: str, outliers: int, sinks: int, strength: float) -> None:
    scene = make_scene(make(name, outliers=outliers, sinks=sinks, recent=1), [450], kv_heads=1)
    q = torch.randn(1, 2, 128, generator=torch.Generator().manual_seed(5)).half() * strength
    answer = decode(q, scene, 1, False)
    assert relative(answer, truth(q, scene, SCALE)) < expected_error(q, scene, SCALE)


@pytest.mark.parametrize(("name", "group"), [("e2m0", 4), ("e2m0", 8), ("fp4", 8)])
def test_what_is_read_too_early_is_found(name: str, group: int) -> None:
    """Waits that leave one more group of copies under way; sinks that are not hidden; levels of another format."""
    scene = make_scene(make(name, recent=64), [620], kv_heads=1)
    q = torch.randn(1, group, 128, generator=torch.Generator().manual_seed(5)).half()
    expected, bound = truth(q, scene, SCALE), expected_error(q, scene, SCALE)
    assert not relative(decode(q, scene, 1, False, impatient=True), expected) <= bound
    sinks = dataclasses.replace(scene, format=dataclasses.replace(scene.format, sinks=0))
    assert not relative(decode(q, sinks, 1, False), expected) <= bound
    if name == "e2m0":
        other = dataclasses.replace(scene, format=dataclasses.replace(scene.format, name="asym2"))
        assert not relative(decode(q, other, 1, False), expected) <= bound
