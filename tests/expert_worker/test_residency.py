"""Copies ahead of time on real experts: what hints bring, what becomes of them, and that they change only bytes moved."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from waiting import until

from expert_worker.experts import Experts, Storage
from expert_worker.residency import CopyFailed, Wait
from forefetch.hints import FIRST, REFINED, ExpertHint
from forefetch.kernels.grouped_mlp.formats import ExpertFormat
from forefetch.spec import ModelSpec
from forefetch.weights import Checkpoint
from forefetch.wire import LayerCall

LONG = 10**12  # ns: any number of copies fits


@pytest.fixture(scope="module")
def folder(checkpoint: Callable[[str], Path]) -> Path:
    return checkpoint("qwen3")


@pytest.fixture(scope="module")
def spec(folder: Path) -> ModelSpec:
    return ModelSpec.load(folder)


def experts_of(folder: Path, slots: int, **storage: Any) -> Experts:
    spec = ModelSpec.load(folder)
    held = dict.fromkeys(spec.moe_layers, tuple(range(spec.num_experts)))
    experts = Experts(
        spec, Checkpoint(folder), held, Storage(slots, **storage), device=torch.device("cpu"), dtype=torch.float32
    )
    experts.pool.memory.fill_(255) if experts.residency else None  # NaN
    return experts


def call_of(spec: ModelSpec, step: int, layer: int, experts: list[int], rows: int = 3) -> LayerCall:
    """Every row needs every expert."""
    draw = torch.Generator().manual_seed(step * 100 + layer)
    pairs = rows * len(experts)
    row = np.arange(rows, dtype=np.int32).repeat(len(experts))
    expert = np.tile(np.array(experts, np.int32), rows)
    x = torch.randn(rows, spec.hidden_size, generator=draw)
    return LayerCall(step, layer, x, row, expert, np.random.rand(pairs).astype(np.float32))


def a_hint(
    step: int, layer: int, experts: list[int], chance: float = 0.9, window_ns: int = LONG, phase: int = FIRST
) -> ExpertHint:
    chances = np.full(len(experts), chance, np.float32)
    return ExpertHint(step, max(layer - 1, 0), layer, phase, np.array(experts, np.int32), chances, window_ns)


def forward(experts: Experts, call: LayerCall) -> tuple[Tensor, Any]:
    out = torch.full_like(call.x, torch.nan)
    _, verified = experts.forward(call, out)
    return out, verified


def asked(experts: Experts) -> bool:
    """Whether a call is under way: it holds the slots of its experts."""
    assert experts.residency is not None
    return bool(experts.residency.slots.table.pins.any())


class Gate:
    """Stands before the copies of some experts: notes the order, holds them up, breaks them."""

    def __init__(self, experts: Experts) -> None:
        assert experts.residency is not None
        self.order: list[int] = []
        self.open = threading.Event()
        self.open.set()
        self.broken: set[int] = set()
        self.broken_once: set[int] = set()
        self._real = experts.residency.start_copy
        experts.residency.start_copy = self._copy

    def _copy(self, slot: int, number: int) -> Wait:
        self.order.append(number)
        self.open.wait(60)
        if number in self.broken | self.broken_once:
            self.broken_once.discard(number)
            raise OSError("copy failed")
        return self._real(slot, number)


@pytest.fixture
def few(folder: Path) -> Iterator[Experts]:
    experts = experts_of(folder, 8)
    yield experts
    assert experts.residency is not None
    experts.residency.close()


def test_what_a_hint_brought_in_time_is_a_hit(few: Experts, spec: ModelSpec) -> None:
    layer = spec.moe_layers[1]
    assert few.hint(a_hint(1, layer, [2, 5]))
    until(lambda: few.resident(layer) == [2, 5])
    out, verified = forward(few, call_of(spec, 1, layer, [2, 5]))
    assert verified[:4] == (2, 0, 0, 0)
    assert verified.copied_bytes > 0
    assert not out.isnan().any()
    _, verified = forward(few, call_of(spec, 2, layer, [2, 5]))
    assert verified == (0, 0, 0, 2, 0, 0, 0, 0), "there without a hint's help"


def test_what_is_lent_nobody_moves(few: Experts, spec: ModelSpec) -> None:
    residency = few.residency
    assert residency is not None
    assert residency.lend()
    residency.later.append(1)
    with residency.changed:
        residency.changed.notify_all()
    time.sleep(0.02)
    assert residency.later == [1]
    assert not residency.copied.bytes
    residency.take_back()
    until(lambda: not residency.later)


def test_what_no_hint_named_is_a_miss(few: Experts, spec: ModelSpec) -> None:
    layer = spec.moe_layers[1]
    few.hint(a_hint(1, layer, [2]))
    until(lambda: few.resident(layer) == [2])
    _, verified = forward(few, call_of(spec, 1, layer, [2, 3]))
    assert verified[:4] == (1, 0, 1, 0)


def test_what_is_still_on_its_way_is_late_and_is_not_copied_twice(few: Experts, spec: ModelSpec) -> None:
    layer, gate = spec.moe_layers[1], Gate(few)
    gate.open.clear()
    few.hint(a_hint(1, layer, [2]))
    until(lambda: len(gate.order) == 1)
    out, found = torch.full((3, spec.hidden_size), torch.nan), list[Any]()
    caller = threading.Thread(target=lambda: found.append(few.forward(call_of(spec, 1, layer, [2]), out)))
    caller.start()
    until(lambda: asked(few))
    time.sleep(0.05)
    assert caller.is_alive(), "it waits"
    gate.open.set()
    caller.join(60)
    ((waited, verified),) = found
    assert verified[:4] == (0, 1, 0, 0)
    assert waited > 0
    assert len(gate.order) == 1


def test_a_demanded_copy_overtakes_wishes_and_none_under_way_is_given_up(few: Experts, spec: ModelSpec) -> None:
    first, second = spec.moe_layers[:2]
    gate = Gate(few)
    gate.open.clear()
    few.hint(a_hint(1, second, [1, 2, 3]))
    until(lambda: len(gate.order) == 1)
    caller = threading.Thread(target=forward, args=(few, call_of(spec, 1, first, [6, 7])))
    caller.start()
    until(lambda: len(gate.order) >= 2)  # the call copies one itself
    gate.open.set()
    caller.join(60)
    until(lambda: few.resident(second) == [1, 2, 3])
    base = spec.num_experts
    assert gate.order[0] == base + 1
    assert set(gate.order[1:3]) == {6, 7}
    assert sorted(gate.order[3:]) == [base + 2, base + 3]


def test_a_refined_hint_replaces_what_the_first_one_still_waits_for(few: Experts, spec: ModelSpec) -> None:
    layer, gate = spec.moe_layers[1], Gate(few)
    gate.open.clear()
    few.hint(a_hint(1, layer, [1, 2, 3]))
    until(lambda: len(gate.order) == 1)
    few.hint(a_hint(1, layer, [3, 4], phase=REFINED))
    gate.open.set()
    until(lambda: few.resident(layer) == [1, 3, 4])
    assert gate.order == [spec.num_experts + expert for expert in (1, 3, 4)]


def test_stale_hints_and_hints_without_time_copy_nothing(few: Experts, spec: ModelSpec) -> None:
    first, second = spec.moe_layers[:2]
    gate = Gate(few)
    forward(few, call_of(spec, 5, first, [0]))
    gate.order.clear()
    assert not few.hint(a_hint(5, first, [1]))
    assert not few.hint(a_hint(4, second, [1]))
    assert few.hint(a_hint(5, second, [1], window_ns=0))
    time.sleep(0.05)
    assert gate.order == []


def test_a_failed_prefetch_is_no_hit_and_costs_no_call(few: Experts, spec: ModelSpec, caplog: pytest.LogCaptureFixture) -> None:
    layer, gate = spec.moe_layers[1], Gate(few)
    gate.broken = {spec.num_experts + 2}
    few.hint(a_hint(1, layer, [2, 3]))
    until(lambda: few.resident(layer) == [3])
    assert few.residency is not None
    assert few.residency.copied.failed == 1
    assert "could not be copied" in caplog.text
    gate.broken.clear()
    out, verified = forward(few, call_of(spec, 1, layer, [2, 3]))
    assert verified[:4] == (1, 1, 0, 0)
    assert not out.isnan().any()


def test_a_prefetch_that_fails_under_the_calls_hands_is_copied_again(few: Experts, spec: ModelSpec) -> None:
    layer, gate = spec.moe_layers[1], Gate(few)
    gate.open.clear()
    gate.broken_once = {spec.num_experts + 2}
    few.hint(a_hint(1, layer, [2]))
    until(lambda: len(gate.order) == 1)
    found: list[Any] = []
    caller = threading.Thread(target=lambda: found.append(forward(few, call_of(spec, 1, layer, [2]))))
    caller.start()
    until(lambda: asked(few))
    gate.open.set()
    caller.join(60)
    assert len(gate.order) == 2
    assert not found[0][0].isnan().any()
    assert found[0][1][:4] == (0, 1, 0, 0)


def test_a_failing_demand_fails_its_call_and_leaves_nothing_pinned(few: Experts, spec: ModelSpec) -> None:
    layer, gate = spec.moe_layers[0], Gate(few)
    gate.broken = {3}
    with pytest.raises(CopyFailed):
        forward(few, call_of(spec, 1, layer, [1, 2, 3, 4]))
    assert few.residency is not None
    until(lambda: not few.residency.flying)  # type: ignore[union-attr]
    assert not few.residency.slots.table.pins.any()
    assert 3 not in few.resident(layer)
    gate.broken.clear()
    out, _ = forward(few, call_of(spec, 2, layer, [1, 2, 3, 4]))
    assert not out.isnan().any()


def test_bytes_copied_in_vain_are_told_once(few: Experts, spec: ModelSpec) -> None:
    first, second = spec.moe_layers[:2]
    few.hint(a_hint(1, second, [1, 2, 3], chance=0.4))
    until(lambda: few.resident(second) == [1, 2, 3])
    wasted = [forward(few, call_of(spec, 2 + step, first, list(range(8))))[1].wasted_bytes for step in range(6)]
    assert few.host is not None
    assert sum(wasted) == 3 * few.host.stride
    assert wasted[-1] == 0


def test_the_debug_switch_sees_a_slot_that_differs(folder: Path, spec: ModelSpec) -> None:
    few = experts_of(folder, 8, check_copies=True)
    forward(few, call_of(spec, 1, spec.moe_layers[0], [1, 2]))
    real = few.lane._bring

    def corrupt(slot: int, number: int) -> None:
        real(slot, number)
        few.pool.memory[slot, 5] ^= 1

    few.lane._bring = corrupt  # type: ignore[method-assign]
    with pytest.raises(CopyFailed):
        forward(few, call_of(spec, 2, spec.moe_layers[0], [3]))
    assert few.resident(spec.moe_layers[0]) == [1, 2]


@pytest.mark.parametrize("percent", [12, 25, 50, 75, 100])
@pytest.mark.parametrize("kind", [None, "int8"])
def test_hints_delays_and_slots_change_no_bit(percent: int, kind: Any, folder: Path, spec: ModelSpec) -> None:
    format = ExpertFormat(kind) if kind else None
    total = spec.num_experts * len(spec.moe_layers)
    resident = experts_of(folder, total, format=format)
    few = experts_of(folder, max(2, total * percent // 100), format=format)
    draw = random.Random(percent)
    if few.residency is not None:
        real = few.residency.start_copy

        def slow(slot: int, number: int) -> Wait:
            time.sleep(draw.random() * 0.002)
            return real(slot, number)

        few.residency.start_copy = slow
    moved = 0
    for step in range(12):
        for layer in spec.moe_layers:
            call = call_of(
                spec, step, layer, draw.sample(range(spec.num_experts), draw.choice((1, 2, 8))), draw.choice((1, 4, 40))
            )
            for target in spec.moe_layers:  # right ones, wrong ones, stale ones
                right = sorted(set(call.pair_expert.tolist()))
                wrong = draw.sample(range(spec.num_experts), 3)
                few.hint(
                    a_hint(
                        step + draw.choice((0, 0, 1)),
                        target,
                        draw.choice((right, wrong)),
                        draw.random(),
                        draw.choice((0, LONG)),
                    )
                )
            out, verified = forward(few, call)
            assert torch.equal(out, forward(resident, call)[0])
            needed = len(set(call.pair_expert.tolist()))
            assert sum(verified[:4]) == needed
            moved += verified.copied_bytes
    assert (moved > 0) == (percent < 100)


def test_a_row_of_nan_leaves_its_neighbours_alone(few: Experts, spec: ModelSpec) -> None:
    call = call_of(spec, 1, spec.moe_layers[0], [1, 2, 3], rows=4)
    expected, _ = forward(few, call)
    call.x = call.x.clone()
    call.x[2] = torch.nan
    out, _ = forward(few, call)
    keep = torch.tensor([0, 1, 3])
    assert torch.equal(out[keep], expected[keep])
    assert out[2].isnan().all()


def test_a_call_without_rows_gets_none_and_breaks_nothing(few: Experts, spec: ModelSpec) -> None:
    layer = spec.moe_layers[0]
    few.hint(a_hint(1, layer, [1]))
    out, verified = forward(few, call_of(spec, 1, layer, [], rows=0))
    assert out.shape == (0, spec.hidden_size)
    assert sum(verified[:4]) == 0
    out, _ = forward(few, call_of(spec, 2, layer, [1]))
    assert not out.isnan().any()


def test_replicas_agree_to_the_bit_whatever_they_hold_in_slots(folder: Path, spec: ModelSpec) -> None:
    """Two workers hold the same expert beside others, one of them in few slots."""
    made = []
    for held, slots in (((1, 4, 6), 9), ((0, 2, 3, 4, 5, 6), 4)):
        everywhere = dict.fromkeys(spec.moe_layers, held)
        made.append(
            Experts(spec, Checkpoint(folder), everywhere, Storage(slots), device=torch.device("cpu"), dtype=torch.float32)
        )
    call = call_of(spec, 1, spec.moe_layers[1], [4, 6], rows=5)
    assert torch.equal(*(forward(experts, call)[0] for experts in made))
