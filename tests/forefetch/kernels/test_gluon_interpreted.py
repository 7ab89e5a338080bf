"""The whole Hopper kernel on a CPU, in an interpreter of its own (`gluon_interpreter.py`): every format, ragged batches, and
copies that arrive at once or as late as they may."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import pytest
import torch
from gluon_interpreter import Interpreter, Pointer, Value
from sealed_scenes import Scene, expected_error, make_scene, relative, truth
from torch import Tensor

from forefetch.kernels.attention import gluon
from forefetch.kernels.attention.gluon import cut, kernel
from forefetch.kernels.attention.gluon.kernel import split_sealed
from forefetch.kernels.attention.gluon.merge import merge_parts
from forefetch.kernels.kv_codec import KvFormat

SCALE = 128**-0.5


def decode(
    q: Tensor, scene: Scene, programs: int, eager: bool, impatient: bool = False, plan: gluon.Cut | None = None
) -> Tensor:
    """`gluon.decode_sealed` with `programs` of each stream, or cut by `plan`; the merge in float64 or, of all work cut as one
    line, the kernel's own. Scratch poisoned."""
    kv, table, format = scene.kv, scene.plan, scene.format
    rows, heads, _ = q.shape
    kv_heads, group = len(kv.pages), heads // len(kv.pages)
    streams = rows * kv_heads
    programs, apart, costs = plan or gluon.Cut(programs)
    scratch = gluon.plan_scratch(gluon.Cut(programs, apart, costs), rows, kv_heads, group, torch.device("cpu"))
    partial, stats = scratch.partial.fill_(torch.nan), scratch.stats.fill_(torch.nan)
    tables = torch.tensor([[level] * 32 for level in gluon.level_bytes(format)], dtype=torch.int32)
    arguments: list[Any] = [q, kv.pages.view(torch.int32), kv.pages.view(torch.float16), kv.pages]
    arguments += [table.page_table, table.sealed, table.lengths, table.tail, kv.tail_k, kv.tail_v, kv.sink_k, kv.sink_v]
    arguments += [partial, stats, SCALE * math.log2(math.e), tables, rows, apart, gluon.ONE, kv.pages.shape[1]]
    arguments += [kv.tail_k.shape[1], table.page_table.stride(0), q.stride(0), q.stride(1)]
    arguments += [kv_heads, group, kv.tail_k.shape[2], format, costs]
    Interpreter(eager, impatient).run(split_sealed, (programs, 1 if costs else streams), *arguments)
    if costs:
        out = torch.full(q.shape, torch.nan)
        arguments = [partial, stats, out, table.sealed, table.lengths, programs, rows, out.stride(0), out.stride(1)]
        Interpreter(True).run(merge_parts, (streams, group, 4), *arguments, kv_heads, group, format, costs, 2, 32, 1)
        return out
    top, total = stats.double().unbind(-1)
    used = total != 0
    weight = torch.where(used, torch.exp2(top - torch.where(used, top, -torch.inf).amax(-1, keepdim=True)), 0.0)
    sums = torch.where(used[..., None], partial.double(), 0.0) * weight[..., None]
    return sums.sum(2) / (total * weight).sum(-1).clamp_min(1e-300)[..., None]


class Counted:
    """What programs of a flat cut take, by `cut`'s functions."""

    def __init__(self, programs: int, format: KvFormat, kv_heads: int) -> None:
        self.programs, self.format, self.kv_heads = programs, format, kv_heads
        self.taken: dict[int, list[tuple[int, ...]]] = {}  # by stream
        self.parts: dict[int, list[int]] = {}

    def take(self, program: int, sealed: Tensor, lengths: Tensor) -> None:
        interpreter = Interpreter(True)
        interpreter.place, interpreter.grid = (program, 0), (self.programs, 1)
        call, at = interpreter.function, [Pointer([sealed, lengths], torch.tensor(number << 40)) for number in (0, 1)]
        rows, costs = Value(torch.tensor(len(lengths), dtype=torch.int32)), gluon.FLAT
        stream, at_unit, begin, end = call(kernel.first_stream)(*at, rows, self.kv_heads, self.format, costs)
        while at_unit < end:
            row = int(stream) // self.kv_heads
            pages, length = (Value(part[row]) for part in (sealed, lengths))
            before, units = call(cut.stream_units)(pages, length, self.format, costs)
            share = (begin - at_unit, end - at_unit, before, units, pages, length)
            self.taken.setdefault(int(stream), []).append(
                tuple(map(int, call(kernel.share_of_stream)(*share, self.format, costs)))
            )
            self.parts.setdefault(int(stream), []).append(program)
            at_unit, stream = at_unit + units, stream + 1

    def there_are(self, stream: int, sealed: Tensor, lengths: Tensor) -> tuple[int, int]:
        """Float16 tokens, in whole tiles, and pages of a stream."""
        pages, length = (Value(part[stream // self.kv_heads]) for part in (sealed, lengths))
        tokens = int(Interpreter(True).function(cut.half_spans)(pages, length, self.format)[2])
        return (tokens + 15) // 16 * 16, int(pages.data)


def make(name: str, **options: int) -> KvFormat:
    return KvFormat(name, thirds=32 if name == "mixed" else 0, **options)


CASES = [
    *(("e2m0", 4), ("e2m0", 8), ("asym2", 3), ("mixed", 8), ("mixed", 4), ("asym3", 7), ("asym3", 1)),
    *(("fp4", 8), ("fp4", 4)),
]


@pytest.mark.parametrize(("name", "group"), CASES)
def test_ragged_batch(name: str, group: int) -> None:
    """Rows without pages, with one, two, three and five: two programs each; stretches of all that end in the middle of rows; a
    page or some float16 tokens each."""
    lengths = [3, 200, 0, 400, 530, 790]
    scene = make_scene(make(name, outliers=1, recent=64), lengths, kv_heads=1)
    q = torch.randn(len(lengths), group, 128, generator=torch.Generator().manual_seed(5)).half()
    expected, bound = truth(q, scene, SCALE), expected_error(q, scene, SCALE)
    answers = [decode(q, scene, 2, eager) for eager in (False, True)]
    assert torch.equal(*answers)
    answers[1] = decode(q, scene, 0, True, plan=gluon.Cut(5, 2) if group % 2 else gluon.Cut(9, costs=gluon.FLAT))
    for answer in answers:
        assert bool((answer[2] == 0).all())
        for row, length in enumerate(lengths):
            if length:
                assert relative(answer[row], expected[row]) < 2 * bound, f"row of {length}"


@pytest.mark.parametrize("rows", [1, 3, 16, 64, 500])
@pytest.mark.parametrize("max_pages", [0, 1, 15, 63, 255, 1023])
def test_programs_of_a_plan(rows: int, max_pages: int) -> None:
    """One wave at most; no program of full rows without a page."""
    for name, group in (("e2m0", 4), ("e2m0", 8), ("fp4", 8)):
        fit = gluon.fit(make(name), group)
        plan = gluon.plan_cut(rows, 8, max_pages, 132, fit.programs, fit.flat)
        streams = 1 if plan.costs else rows * 8
        assert streams * plan.programs <= max(rows * 8, fit.programs * 132)
        assert plan.costs or 1 <= plan.programs - plan.apart <= max(1, max_pages)


@pytest.mark.parametrize(("rows", "programs"), [(3, 40), (200, 37), (1, 1), (70, 60)])
def test_every_token_is_somebodys(rows: int, programs: int) -> None:
    """Stretches of any lengths, by the kernel's own arithmetic: each tile and page once, parts as the merge finds them."""
    generator = torch.Generator().manual_seed(rows)
    lengths = torch.randint(0, 3000, (rows,), generator=generator, dtype=torch.int32)
    format = make("e2m0")
    sealed = torch.tensor([format.sealed_pages(max(0, int(length) - 1)) for length in lengths], dtype=torch.int32)
    seen = Counted(programs, format, 2)
    for program in range(programs):
        seen.take(program, sealed, lengths)
    for stream in range(rows * seen.kv_heads):
        tokens, pages = seen.there_are(stream, sealed, lengths)
        taken, parts = seen.taken[stream], seen.parts[stream]
        assert [0, *(end for _, end, _, _ in taken)] == [*(start for start, _, _, _ in taken), tokens]
        assert [0, *(end for _, _, _, end in taken)] == [*(start for _, _, start, _ in taken), pages]
        assert parts == list(range(parts[0], parts[-1] + 1))


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
