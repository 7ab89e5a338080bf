from __future__ import annotations

from functools import cache
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from expert_worker.slots import CROWD, FREE, NOWHERE, Slots, uses_of
from forefetch.kernels import compiled

ONE = np.ones(1)


def consistent(slots: Slots) -> None:
    """No two experts in one slot, both directions agree, and the counts are right."""
    held = {expert: slot for expert, slot in enumerate(slots.slot_of) if slot != NOWHERE}
    assert len(set(held.values())) == len(held)
    assert {int(e): s for s, e in enumerate(slots.table.expert_in) if e != NOWHERE} == held
    table = slots.table
    assert sorted([*table.free[: table.numbers[FREE]], *held.values()]) == list(range(slots.capacity))
    assert table.held.tolist() == [sum(table.layer_of[e] == layer for e in held) for layer in range(table.layers)]


def use(slots: Slots, layer: int, *experts: int) -> None:
    slots.used(layer, np.array(experts), np.ones(len(experts)))


def bring(slots: Slots, *experts: int) -> list[int]:
    """Places and fills; returns who had to go."""
    before = {expert for expert in range(len(slots.slot_of)) if slots.slot_of[expert] != NOWHERE}
    for expert in experts:
        assert slots.place(expert, needed=True) != NOWHERE
        slots.filled(expert)
    return sorted(expert for expert in before if slots.slot_of[expert] == NOWHERE)


operation = st.tuples(st.sampled_from(["use", "place", "need", "fill", "fail", "pin", "unpin", "predict"]), st.integers(0, 14))


@settings(max_examples=300)
@given(st.integers(1, 15), st.integers(0, 3), st.lists(operation, max_size=80))
def test_whatever_happens_the_table_is_sound_and_promises_hold(
    capacity: int, floor: int, operations: list[tuple[str, int]]
) -> None:
    slots = Slots(capacity, [5, 4, 6], floor)
    pins: list[int] = []
    for what, expert in operations:
        placed = slots.slot_of[expert] != NOWHERE
        if what == "use":
            slots.used(int(slots.table.layer_of[expert]), np.array([expert]), ONE)
        elif what in ("place", "need") and not placed:
            before = slots.table.expert_in.copy()
            ready, predicted, counts = slots.table.ready.copy(), slots.predicted.copy(), slots.table.held.copy()
            slot = slots.place(expert, needed=what == "need")
            if slot != NOWHERE and before[slot] != NOWHERE:
                gone = int(before[slot])
                assert gone not in pins
                assert ready[slot], "a copy under way was given up"
                if what == "place":
                    assert not predicted[gone]
                    layer = slots.table.layer_of[gone]
                    assert layer == slots.table.layer_of[expert] or counts[layer] > slots.table.floor
            elif slot == NOWHERE:
                assert (before == slots.table.expert_in).all()
                assert what == "place" or all(not ready[s] or int(before[s]) in pins for s in range(capacity))
        elif what == "fill" and placed:
            slots.filled(expert, prefetched=True)
        elif what == "fail" and placed and not slots.is_ready(expert):
            slots.abandon(expert)
            pins = [pinned for pinned in pins if pinned != expert]
        elif what == "pin" and placed:
            slots.pin([expert])
            pins.append(expert)
        elif what == "unpin" and expert in pins:
            slots.unpin([expert])
            pins.remove(expert)
        elif what == "predict":
            slots.predicted[expert] ^= True
        consistent(slots)
        assert all(slots.slot_of[pinned] != NOWHERE for pinned in pins)


def test_the_layer_just_passed_is_the_farthest() -> None:
    slots = Slots(4, [4, 4])
    bring(slots, 0, 1, 4, 5)
    for _ in range(20):
        use(slots, 0, 0, 1)
        use(slots, 1, 4, 5)
    use(slots, 0, 0, 1)
    assert slots.table.layer_of[bring(slots, 6)].tolist() == [0], "layer 1 is next"
    use(slots, 1, 5, 6)
    assert slots.table.layer_of[bring(slots, 2)].tolist() == [1], "layer 0 is next"


def test_what_is_used_often_outlives_what_was_used_last() -> None:
    slots = Slots(3, [8])
    bring(slots, 0, 1, 2)
    for _ in range(200):
        use(slots, 0, 0, 1)
    for _ in range(3):
        use(slots, 0, 0)
    use(slots, 0, 2)
    use(slots, 0, 3)
    assert bring(slots, 3) == [2]


def test_recent_use_counts_where_frequency_is_equal() -> None:
    slots = Slots(2, [8])
    bring(slots, 0, 1)
    for _ in range(50):
        use(slots, 0, 0)
        use(slots, 0, 1)
    use(slots, 0, 2)
    assert bring(slots, 2) == [0]


def test_a_prompt_does_not_flush_what_decoding_uses() -> None:
    experts, layers = 32, 4
    slots = Slots(64, [experts] * layers, floor=4)
    hot = {layer: [layer * experts + e for e in range(12)] for layer in range(layers)}
    for _ in range(60):
        for layer in range(layers):
            use(slots, layer, *hot[layer])
            bring(slots, *(expert for expert in hot[layer] if not slots.is_ready(expert)))
    kept = {expert for each in hot.values() for expert in each if slots.is_ready(expert)}
    assert len(kept) == 48
    for layer in range(layers):  # 500 rows that need every expert, some of them much
        counts = [30 if e % 5 else 200 for e in range(experts)]
        numbers = np.arange(layer * experts, (layer + 1) * experts)
        slots.used(layer, numbers, uses_of(counts, 500))
        missing = [int(number) for number in numbers if not slots.is_ready(int(number))]
        while missing:
            bring(slots, *missing[: slots.window])
            missing = missing[slots.window :]
    lost = kept - {expert for expert in kept if slots.is_ready(expert)}
    assert len(lost) <= slots.window


def test_uses_say_what_a_few_rows_would_use() -> None:
    assert uses_of([1, 3], 1).tolist() == [1.0, 1.0]
    assert uses_of([1, CROWD], CROWD).tolist() == [1.0, 1.0]
    assert uses_of([1, 100, 50], 400).tolist() == [CROWD / 400, 1.0, 1.0]


def test_a_hint_evicts_only_for_something_better() -> None:
    slots = Slots(2, [4, 4])
    bring(slots, 0, 4)
    for _ in range(50):
        use(slots, 0, 0)
        use(slots, 1, 4)
    assert slots.place(5, unless=slots.calls_until(1, 0.3)) == NOWHERE, "0 and 4 are used every time"
    for _ in range(200):
        use(slots, 0, 1)
        use(slots, 1, 4)
    assert slots.place(5, unless=slots.calls_until(1, 0.01)) == NOWHERE
    assert slots.place(5, unless=slots.calls_until(1, 0.9)) != NOWHERE
    assert slots.slot_of[0] == NOWHERE


def test_what_was_prefetched_in_vain_is_counted() -> None:
    slots = Slots(1, [4])
    slots.place(0)
    slots.filled(0, prefetched=True)
    slots.place(1, needed=True)
    assert slots.wasted == 1
    slots.filled(1)
    slots.place(2, needed=True)
    assert slots.wasted == 1


def test_no_slot_at_all_is_said() -> None:
    with pytest.raises(ValueError, match="0 slots"):
        Slots(0, [3])


@cache
def _compiled_rules() -> SimpleNamespace:
    from forefetch.kernels.compiled import slots as rules
    from forefetch.kernels.compiled.toolchain import entry

    return SimpleNamespace(**{name: entry(getattr(rules, name)) for name in ("used", "calls_until", "place", "drop")})


@pytest.mark.skipif(not compiled.available(), reason="Numba is not installed")
@settings(max_examples=200)
@given(st.integers(1, 15), st.integers(0, 3), st.lists(st.tuples(operation, st.floats(0, 20)), max_size=80))
def test_compiled_rules_are_the_same(capacity: int, floor: int, operations: list[tuple[tuple[str, int], float]]) -> None:
    rules = _compiled_rules()
    ours, theirs = Slots(capacity, [5, 4, 6], floor), Slots(capacity, [5, 4, 6], floor)
    table = theirs.table
    for (what, expert), unless in operations:
        placed = ours.slot_of[expert] != NOWHERE
        layer, either = int(ours.table.layer_of[expert]), (ours, theirs)
        if what == "use":
            ours.used(layer, np.array([expert]), np.array([unless / 20]))
            rules.used(table, layer, np.array([expert]), np.array([unless / 20]))
            assert ours.calls_until(layer, unless / 20) == rules.calls_until(table, layer, unless / 20)
        elif what in ("place", "need") and not placed:
            assert ours.place(expert, unless, what == "need") == rules.place(table, expert, unless, what == "need")
        elif what == "fill" and placed:
            [one.filled(expert, prefetched=True) for one in either]
        elif what == "fail" and placed and not ours.table.pins[ours.slot_of[expert]]:
            ours.drop(expert)
            rules.drop(table, expert)
        elif what in ("pin", "unpin") and placed:
            [one.pin([expert]) for one in either]
        elif what == "predict":
            for one in either:
                one.predicted[expert] ^= True
        for name, mine, other in zip(table._fields, ours.table, table, strict=True):
            assert name == "distances" or np.array_equal(mine, other)  # room, in which compiled code leaves what it likes
