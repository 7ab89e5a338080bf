"""The grouped MLP against its definition in float64, with a tolerance that follows from the arithmetic."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from forefetch.kernels import compiled
from forefetch.kernels.grouped_mlp import Evaluation, Pairs, SlotWeights, evaluation, grouped_mlp, reference
from forefetch.pairs import sort_pairs

GPU = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]
DEVICES = ["cpu", pytest.param("cuda", marks=GPU)]
DTYPES = [torch.float32, torch.bfloat16, torch.float16]


@dataclass
class Case:
    x: Tensor
    w13: Tensor
    w2: Tensor
    row: Tensor
    slot: Tensor
    weight: Tensor

    def run(self, out: Tensor | None = None) -> Tensor:
        out = torch.full_like(self.x, torch.nan) if out is None else out
        grouped_mlp(self.x, SlotWeights(self.w13, self.w2), self.sorted(), out)
        return out

    def sorted(self) -> Pairs:
        return sort_pairs(self.row.numpy(), self.slot.numpy(), self.weight, len(self.x), self.x.device)

    def exact(self) -> Tensor:
        return reference(self.x, self.w13, self.w2, self.row, self.slot, self.weight, torch.float64)

    def pairs(self, keep: Tensor) -> Case:
        return Case(self.x, self.w13, self.w2, self.row[keep], self.slot[keep], self.weight[keep])


def make(
    rows: int = 5, hidden: int = 24, width: int = 16, slots: int = 6, k: int = 2, dtype: torch.dtype = torch.float32, **to: Any
) -> Case:
    draw = torch.Generator().manual_seed(rows * 1000 + hidden + width + slots + k)

    def normal(*shape: int, scale: float) -> Tensor:
        return (torch.randn(shape, generator=draw) * scale).to(dtype=dtype, **to)

    slot = torch.stack([torch.randperm(slots, generator=draw)[:k] for _ in range(rows)]) if rows else torch.empty(0)
    return Case(
        normal(rows, hidden, scale=1.0),
        normal(slots, 2 * width, hidden, scale=hidden**-0.5),
        normal(slots, hidden, width, scale=width**-0.5),
        torch.arange(rows, dtype=torch.int32).repeat_interleave(k),
        slot.flatten().int(),
        torch.rand(rows * k, generator=draw),
    )


def bound(case: Case) -> Tensor:
    """How far a correct result may be from the exact one, [N, H] float64.

    Products sum n terms in float32: |error| <= n u |a| |b| with u = 2^-24 (any order; tensor cores included). Each stored
    intermediate is rounded to the type: r |value|. silu' is within [-0.1, 1.1], and silu's own evaluation costs a few u. These
    pass through the second product and the weighted sum in absolute value. Twice that, since second-order terms are dropped.
    """
    u, r = 2.0**-24, torch.finfo(case.x.dtype).eps / 2
    x, w13, w2 = case.x.double(), case.w13.double(), case.w2.double()
    hidden, width = x.shape[1], w2.shape[2]
    total, size = torch.zeros_like(x), torch.zeros_like(x)
    count = torch.bincount(case.row, minlength=len(x)).max() if len(case.row) else 0
    for row, slot, weight in zip(case.row.tolist(), case.slot.tolist(), case.weight.tolist(), strict=True):
        h = w13[slot] @ x[row]
        dh = (hidden * u) * (w13[slot].abs() @ x[row].abs()) + r * h.abs()
        (gate, up), (dgate, dup) = h.chunk(2), dh.chunk(2)
        active = functional.silu(gate) * up
        # silu is stored before the product, so two roundings; near its zero the error stays relative to |gate|.
        dactive = 1.1 * dgate * up.abs() + functional.silu(gate).abs() * dup + (2 * r + 8 * u) * gate.abs() * up.abs()
        y = w2[slot] @ active
        dy = w2[slot].abs() @ dactive + (width * u) * (w2[slot].abs() @ active.abs()) + r * y.abs()
        total[row] += weight * (dy + 2 * u * y.abs())
        size[row] += weight * y.abs()
    tiny = torch.finfo(case.x.dtype).tiny
    return 2 * (total + (count + 1) * u * size + r * size) + tiny


def error(case: Case, out: Tensor) -> float:
    """Worst error as a share of what is allowed; above 1 is wrong. NaN counts as infinite."""
    share = (out.double() - case.exact()).abs() / bound(case)
    return float(share.nan_to_num(nan=torch.inf).max()) if share.numel() else 0.0


SHAPES = [
    {},
    {"rows": 0},
    {"rows": 1},
    {"rows": 1, "slots": 1, "k": 1, "hidden": 1, "width": 1},
    {"rows": 7, "hidden": 31, "width": 17},
    {"rows": 3, "k": 6},
    {"rows": 64, "hidden": 65, "width": 33, "slots": 3, "k": 3},
    {"rows": 200, "hidden": 40, "width": 300, "slots": 5},
]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_equals_the_definition(shape: dict[str, int], dtype: torch.dtype, device: str) -> None:
    case = make(**shape, dtype=dtype, device=device)  # type: ignore[arg-type]
    out = case.run()
    assert error(case, out) <= 1
    assert torch.equal(case.run(), out)


@pytest.mark.skipif(not compiled.available(), reason="Numba is not installed")
@pytest.mark.parametrize("stored", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_compiled_equals_the_definition(shape: dict[str, int], stored: torch.dtype) -> None:
    case = make(**shape)
    kept = [part.transpose(1, 2).to(stored).contiguous().transpose(1, 2) for part in (case.w13, case.w2)]  # as slots keep them
    case.w13, case.w2 = (part.float() for part in kept)
    memory = torch.cat([part.transpose(1, 2).flatten(1) for part in kept], dim=1)  # one slot after the other
    half, (slots, columns, hidden) = kept[0][0].numel(), kept[0].shape
    w13, w2 = memory[:, :half].view(slots, hidden, columns), memory[:, half:].view(slots, columns // 2, hidden)
    weights, outs = SlotWeights(w13.transpose(1, 2), w2.transpose(1, 2)), []
    for out in (torch.full_like(case.x, torch.nan), torch.full(case.x.shape, torch.nan, dtype=torch.float64)):
        call = evaluation(case.x, case.sorted(), weights)
        assert type(call).__name__ == "CompiledEvaluation"
        for group, expert in reversed(list(enumerate(case.sorted().experts))):  # one wave each
            call.run([group], [expert])
        call.combine(out)
        outs.append(out)
    assert error(case, outs[0]) <= 1
    assert torch.equal(outs[0].double(), outs[1])
    whole = torch.full_like(case.x, torch.nan)
    grouped_mlp(case.x, weights, case.sorted(), whole)
    assert torch.equal(whole, outs[0])


@pytest.mark.parametrize("device", DEVICES)
def test_uneven_load_rows_without_pairs_and_repeated_experts(device: str) -> None:
    case = make(rows=9, slots=8, k=3, device=device)
    case.slot[: len(case.slot) // 2] = 4
    case = case.pairs((case.row != 2) & (case.row != 8))
    out = case.run()
    assert error(case, out) <= 1
    assert not out[[2, 8]].any()
    order = torch.randperm(len(case.row), generator=torch.Generator().manual_seed(0))
    shuffled = case.pairs(order)
    assert error(shuffled, shuffled.run()) <= 1


def test_out_may_have_another_type() -> None:
    case = make()
    out = case.run(torch.full(case.x.shape, torch.nan, dtype=torch.float64))
    assert error(case, out) <= 1


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_nan_row_leaves_its_neighbours_bit_equal(dtype: torch.dtype) -> None:
    case = make(rows=12, slots=3, k=2, hidden=33, width=20, dtype=dtype)
    clean = case.run()
    case.x[5] = torch.nan
    out = case.run()
    others = torch.arange(12) != 5
    assert torch.equal(out[others], clean[others])
    assert out[5].isnan().all()


@pytest.mark.parametrize("poison", [torch.nan, torch.inf])
def test_slots_that_no_pair_names_are_not_read(poison: float) -> None:
    case = make(slots=6)
    case = case.pairs(case.slot != 3)
    clean = case.run()
    case.w13[3], case.w2[3] = poison, poison
    assert torch.equal(case.run(), clean)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [{"rows": 9, "hidden": 24, "width": 16}, {"rows": 150, "hidden": 37, "width": 301}])
def test_waves_in_any_order_and_slot_change_no_bit(shape: dict[str, int], dtype: torch.dtype) -> None:
    case = make(**shape, slots=6, k=3, dtype=dtype)  # type: ignore[arg-type]
    whole = case.run()
    pairs = case.sorted()
    moved = SlotWeights(case.w13.flip(0), case.w2.flip(0))
    evaluation = Evaluation(case.x, pairs, moved)
    for groups in ([4, 1], [5], [0, 3, 2]):
        evaluation.run(groups, [5 - pairs.experts[group] for group in groups])
    out = torch.full_like(case.x, torch.nan)
    evaluation.combine(out)
    assert torch.equal(out, whole)


def test_a_row_hardly_depends_on_the_others() -> None:
    case = make(rows=40, slots=4, k=2)
    out = case.run()
    for row in (0, 17, 39):
        keep = case.row == row
        alone = Case(
            case.x[row : row + 1], case.w13, case.w2, torch.zeros(2, dtype=torch.int32), case.slot[keep], case.weight[keep]
        )
        assert error(alone, out[row : row + 1]) <= 1
        assert error(alone, alone.run()) <= 1


def swapped(case: Case) -> Case:
    return Case(case.x, case.w13.roll(case.w2.shape[2], 1), case.w2, case.row, case.slot, case.weight)


def unweighted(case: Case) -> Case:
    return Case(case.x, case.w13, case.w2, case.row, case.slot, torch.ones_like(case.weight))


def next_expert(case: Case) -> Case:
    return Case(case.x, case.w13, case.w2, case.row, (case.slot + 1) % len(case.w2), case.weight)


def one_pair_less(case: Case) -> Case:
    return case.pairs(torch.arange(len(case.row)) != 3)


def coarser(case: Case) -> Case:
    """Weights with fewer bits: 16 less for float32, 5 or 8 less for the others."""
    fewer = torch.bfloat16 if case.x.dtype == torch.float32 else torch.float8_e5m2
    return Case(case.x, case.w13.to(fewer).to(case.x.dtype), case.w2, case.row, case.slot, case.weight)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("breakage", [swapped, unweighted, next_expert, one_pair_less, coarser])
def test_the_tolerance_catches_a_broken_kernel(breakage: Any, dtype: torch.dtype) -> None:
    case = make(rows=6, hidden=64, width=48, dtype=dtype)
    assert error(case, case.run()) <= 1
    assert error(case, breakage(case).run()) > 1


def test_shapes_that_do_not_fit_are_refused() -> None:
    case = make()
    with pytest.raises(ValueError, match="w13"):
        SlotWeights(case.w13[:, 1:], case.w2)
    with pytest.raises(ValueError, match="w13"):
        SlotWeights(case.w13.double(), case.w2)
    weights = SlotWeights(case.w13, case.w2)
    for x in (case.x[:, 1:], case.x.double()):
        with pytest.raises(ValueError, match="x "):
            grouped_mlp(x, weights, case.sorted(), torch.empty_like(x))
