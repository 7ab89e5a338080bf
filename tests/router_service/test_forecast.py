"""The pure part of hints: chances, the cut, which rows, and how much time there is."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from router_service.forecast import FLOOR, Pace, Trial, chances, likeliest, looked_at, shortlist

EXPERTS = 12


def test_chances_are_those_of_at_least_one_row() -> None:
    experts = np.array([[0, 3], [3, 5]])
    probabilities = np.array([[1.0, 0.5], [0.5, 0.2]])
    found = chances(experts, probabilities, EXPERTS)
    expected = np.zeros(EXPERTS)
    expected[[0, 3, 5]] = 1.0, 0.75, 0.2
    np.testing.assert_allclose(found, expected, atol=1e-8)


shapes = st.tuples(st.integers(0, 6), st.integers(1, 5))
any_float = st.floats(allow_nan=True, allow_infinity=True, width=32)


@given(st.data(), shapes)
def test_whatever_heads_say_chances_are_probabilities(data: st.DataObject, shape: tuple[int, int]) -> None:
    experts = data.draw(arrays.arrays(np.int64, shape, elements=st.integers(-(2**40), 2**40) | st.integers(-2, EXPERTS)))
    probabilities = data.draw(arrays.arrays(np.float64, shape, elements=any_float))
    found = chances(experts, probabilities, EXPERTS)
    assert found.shape == (EXPERTS,)
    assert ((found >= 0) & (found <= 1)).all()
    unnamed = np.setdiff1d(np.arange(EXPERTS), experts)
    assert not found[unnamed].any()


@given(st.data(), shapes)
def test_another_row_never_makes_an_expert_less_likely(data: st.DataObject, shape: tuple[int, int]) -> None:
    rows, named = shape
    experts = data.draw(arrays.arrays(np.int64, (rows + 1, named), elements=st.integers(0, EXPERTS - 1)))
    probabilities = data.draw(arrays.arrays(np.float64, (rows + 1, named), elements=st.floats(0, 1)))
    fewer, more = (chances(experts[:n], probabilities[:n], EXPERTS) for n in (rows, rows + 1))
    assert (more >= fewer - 1e-12).all()


@given(arrays.arrays(np.float64, EXPERTS, elements=st.floats(0, 1)))
def test_the_shortlist_is_what_passes_the_floor_likeliest_first(chance: np.ndarray) -> None:
    names = shortlist(chance)
    assert set(names.tolist()) == set(np.flatnonzero(chance >= FLOOR).tolist())
    assert (np.diff(chance[names]) <= 0).all()


@given(st.data(), st.integers(1, 4))
def test_what_is_named_is_the_shortlist_of_the_chances(data: st.DataObject, rows: int) -> None:
    """However few rows: one has a way of its own."""
    experts = np.array([data.draw(st.permutations(range(-1, EXPERTS + 1))) for _ in range(rows)])
    probabilities = data.draw(arrays.arrays(np.float32, experts.shape, elements=any_float))
    names, likely = likeliest(experts, probabilities, EXPERTS)
    chance = chances(experts, probabilities, EXPERTS)
    assert set(names.tolist()) == set(shortlist(chance).tolist())
    np.testing.assert_allclose(likely, chance[names], rtol=1e-6)
    assert (np.diff(likely) <= 0).all()


def test_one_row_that_names_an_expert_twice_names_it_once() -> None:
    names, likely = likeliest(np.array([[3, 3, 1]]), np.array([[0.9, 0.5, np.inf]]), EXPERTS)
    assert sorted(names.tolist()) == [1, 3]
    assert likely[0] > 0.999


@given(st.integers(0, 100), st.integers(0, 600), st.integers(1, 80))
def test_looked_at_rows_are_distinct_and_decoding_ones_come_first(decodes: int, prompts: int, most: int) -> None:
    tokens = decodes + prompts
    rows = looked_at(decodes, tokens, most)
    if rows is None:
        assert tokens <= most
        return
    assert len(rows) == most < tokens
    assert len(np.unique(rows)) == len(rows)
    assert rows.min() >= 0
    assert rows.max() < tokens
    first = min(decodes, most)
    assert rows[:first].tolist() == list(range(first))
    spread = rows[first:]
    if len(spread) > 1:  # over the whole prompt, not its beginning
        assert np.diff(spread).max() <= -(-prompts // len(spread))


def walk(pace: Pace, start: int, spans: dict[int, tuple[int, int]]) -> None:
    """Lets a step pass: at each layer its gate, `spans[layer][0]` later its experts, `[1]` later the next gate."""
    pace.begin(prompts=False)
    now = start
    for layer, (experts, attention) in spans.items():
        pace.gate(layer, now)
        pace.returned(layer, now + experts)
        now += experts + attention


def test_windows_are_what_recent_steps_took() -> None:
    pace = Pace((1, 2, 5))
    pace.begin(prompts=False)
    pace.gate(1, 0)
    assert pace.window(2, 10) == 0  # nothing is known in the first step
    walk(pace, 1_000, {1: (30, 20), 2: (40, 60), 5: (10, 0)})
    pace.begin(prompts=False)
    pace.gate(1, 9_000)
    assert pace.window(2, 9_000) == 50
    assert pace.window(2, 9_012) == 38
    assert pace.window(5, 9_000) == 150
    assert pace.window(2, 9_100) == 0  # it should have been here by now
    pace.returned(1, 9_035)
    assert pace.window(2, 9_035) == 20
    assert pace.window(5, 9_035) == 120
    pace.begin(prompts=True)
    pace.gate(1, 10_000)
    assert pace.window(2, 10_000) == 0  # steps with prompts are another matter


def test_a_window_follows_the_steps_without_jumping() -> None:
    pace = Pace((0, 1))
    walk(pace, 0, {0: (100, 0), 1: (0, 0)})
    walk(pace, 10_000, {0: (200, 0), 1: (0, 0)})
    pace.begin(prompts=False)
    pace.gate(0, 20_000)
    assert pace.window(1, 20_000) == pytest.approx(125)


@given(st.lists(st.tuples(st.sampled_from(["begin", "gate", "returned"]), st.sampled_from((1, 2, 5)), st.integers(0, 99))))
def test_windows_are_never_negative_whatever_breaks_off_when(events: list[tuple[str, int, int]]) -> None:
    pace, now = Pace((1, 2, 5)), 0
    for kind, layer, later in events:
        now += later
        if kind == "begin":
            pace.begin(prompts=False)
        else:
            getattr(pace, kind)(layer, now)
        assert all(pace.window(target, now) >= 0 for target in (1, 2, 5))


def steps(trial: Trial, costs: dict[str, float], count: int) -> list[str]:
    """The ways of so many steps."""
    found = []
    for _ in range(count):
        found.append(trial.way)
        trial.learn(costs[trial.way])
    return found


WAYS = ("off", "plain", "attention")


@given(st.lists(st.floats(0, 1e3), min_size=3, max_size=3), st.integers(1, 9), st.integers(1, 30))
def test_each_way_is_tried_and_the_cheapest_kept(values: list[float], tried: int, kept: int) -> None:
    trial, costs = Trial(WAYS, tried=tried, ignored=tried - 1, kept=kept), dict(zip(WAYS, values, strict=True))
    cycle = [way for way in WAYS for _ in range(tried)] + [min(WAYS, key=costs.__getitem__)] * kept
    assert steps(trial, costs, 2 * len(cycle)) == 2 * cycle


def test_a_way_does_not_pay_for_the_one_before_and_a_change_is_noticed() -> None:
    trial = Trial(WAYS, tried=4, ignored=2, kept=50)
    for way in WAYS:
        for step in range(4):
            assert trial.way == way
            trial.learn(1_000.0 if step < 2 else {"off": 5.0, "plain": 2.0, "attention": 3.0}[way])
    assert trial.way == "plain"
    steps(trial, dict.fromkeys(WAYS, 9.0), 50)
    assert steps(trial, {"off": 1.0, "plain": 2.0, "attention": 3.0}, 13)[-1] == "off"
