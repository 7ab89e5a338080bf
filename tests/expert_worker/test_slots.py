from __future__ import annotations

from contextlib import closing

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from expert_worker.slots import NOWHERE, Slots


def consistent(slots: Slots) -> None:
    """No two experts in one slot, and both directions agree."""
    held = {expert: slot for expert, slot in enumerate(slots.slot_of) if slot != NOWHERE}
    assert len(set(held.values())) == len(held)
    assert {int(e): s for s, e in enumerate(slots.expert_in) if e != NOWHERE} == held


calls = st.lists(st.lists(st.integers(0, 19), min_size=1, max_size=20, unique=True), max_size=12)


@settings(max_examples=300, deadline=None)
@given(st.integers(1, 20), calls, st.sets(st.integers(0, 19), max_size=3))
def test_waves_name_each_expert_once_and_respect_pins(capacity: int, sequence: list[list[int]], pins: set[int]) -> None:
    slots = Slots(capacity, 20)
    pinned: dict[int, int] = {}
    if len(pins) < capacity:
        for wave in slots.waves(sorted(pins), 0):
            pinned |= wave.slots
        for expert in pins:
            slots.pin(expert)
    for now, experts in enumerate(sequence, start=1):
        resident = {expert for expert in experts if slots.slot_of[expert] != NOWHERE}
        seen: list[int] = []
        loaded: list[int] = []
        for wave in slots.waves(experts, now):
            consistent(slots)
            assert all(slots.slot_of[expert] == slot for expert, slot in wave.slots.items())
            assert set(wave.loads) <= set(wave.slots)
            assert all(slots.slot_of[expert] == slot for expert, slot in pinned.items())
            seen += wave.slots
            loaded += wave.loads
        assert sorted(seen) == sorted(experts)
        assert len(set(loaded)) == len(loaded)
        assert set(loaded) == set(experts) - resident
    assert not any(slots._pins[slot] for slot in range(capacity) if slot not in pinned.values())


def run(slots: Slots, experts: list[int], now: int) -> list[tuple[list[int], list[int]]]:
    return [(sorted(wave.slots), sorted(wave.loads)) for wave in slots.waves(experts, now)]


def test_what_is_resident_runs_first_and_is_not_evicted_by_the_same_wave() -> None:
    slots = Slots(2, 4)
    assert run(slots, [0, 1], 1) == [([0, 1], [0, 1])]
    assert run(slots, [1, 2, 3], 2) == [([1, 2], [2]), ([3], [3])]
    assert (slots.hits, slots.misses) == (1, 4)


def test_the_victim_is_the_least_used_for_its_age() -> None:
    slots = Slots(3, 5)
    for now in range(1, 6):
        run(slots, [0], now)
    run(slots, [1], 6)
    run(slots, [2], 7)
    run(slots, [3], 8)  # 0: 5 uses, 3 calls ago; 1: 1 use, 2 calls ago; 2: 1 use, last call
    assert [expert for expert in range(5) if slots.slot_of[expert] != NOWHERE] == [0, 2, 3]


def test_a_failed_load_is_forgotten_and_unpinned() -> None:
    slots = Slots(2, 4)
    run(slots, [0], 1)

    def fail() -> None:
        with closing(slots.waves([0, 1], 2)) as waves:
            for _ in waves:
                raise OSError("copy failed")

    with pytest.raises(OSError, match="copy"):
        fail()
    assert slots.slot_of[1] == NOWHERE
    assert slots.slot_of[0] != NOWHERE
    assert not slots._pins.any()
    assert run(slots, [1, 2], 3) == [([1, 2], [1, 2])]


def test_no_slot_at_all_and_all_pinned_are_said() -> None:
    with pytest.raises(ValueError, match="0 slots"):
        Slots(0, 3)
    slots = Slots(1, 3)
    run(slots, [0], 1)
    slots.pin(0)
    with pytest.raises(RuntimeError, match="pinned"):
        run(slots, [1], 2)
    slots.unpin(0)
    assert run(slots, [1], 3) == [([1], [1])]
