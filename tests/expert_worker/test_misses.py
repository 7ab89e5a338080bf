from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from expert_worker.misses import MissTimes


def times(expert_ns: float, pair_ns: float = 0.0) -> MissTimes:
    made = MissTimes()
    made.host_expert_ns, made.host_pair_ns = expert_ns, pair_ns
    return made


def test_a_slow_host_gets_nothing_and_a_fast_one_all() -> None:
    assert times(1000).on_host([1, 1, 1], copy_ns=10, under_way=0) == []
    assert times(1).on_host([1, 1, 1], copy_ns=1000, under_way=0) == [0, 1, 2]


def test_equal_speeds_share() -> None:
    assert len(times(100).on_host([1] * 6, copy_ns=100, under_way=0)) == 3


def test_experts_with_few_pairs_go_to_the_host() -> None:
    assert times(50, 50).on_host([9, 1, 8, 2], copy_ns=100, under_way=0) == [1, 3]


def test_a_busy_link_sends_more_to_the_host() -> None:
    quiet, busy = (times(100).on_host([1] * 4, copy_ns=100, under_way=under_way) for under_way in (0, 4))
    assert len(busy) > len(quiet)


def test_nothing_missing_is_nothing_to_decide() -> None:
    assert times(1).on_host([], copy_ns=1, under_way=3) == []


def test_measurements_are_learnt() -> None:
    made = MissTimes()
    made.computed(1, 1000)
    made.computed(5, 2000)
    assert made.host_ns(1) == pytest.approx(1000)
    assert made.host_ns(5) == pytest.approx(1800)
    for _ in range(100):
        made.computed(1, 500)
    assert made.host_ns(1) == pytest.approx(500, rel=0.01)


@settings(max_examples=200)
@given(st.lists(st.integers(1, 50), max_size=10), st.floats(0, 1e6), st.floats(0, 1e5), st.floats(1, 1e6), st.integers(0, 5))
def test_no_choice_ends_later_than_copying_all(pairs: list[int], e: float, p: float, copy_ns: float, under_way: int) -> None:
    made = times(e, p)
    host = made.on_host(pairs, copy_ns, under_way)
    end = max(sum(made.host_ns(pairs[place]) for place in host), copy_ns * (under_way + len(pairs) - len(host)))
    assert end <= copy_ns * (under_way + len(pairs)) * (1 + 1e-9)
