"""Load or compute, by scenario."""

from __future__ import annotations

import pytest

from router_service.cost import LEAST_S, PROBE, FetchCost, Rate

PAGE, BLOCK = 16, 1000


def cost(prefill: float | None = None, load: float | None = None) -> FetchCost:
    """Of a router that computes `prefill` tokens and loads `load` bytes per second."""
    made = FetchCost(BLOCK, PAGE, timeout_s=5.0)
    if prefill is not None:
        made.prefill.add(prefill, 1.0)
    if load is not None:
        made.load.add(load, 1.0)
    return made


def test_what_is_unknown_is_tried() -> None:
    assert cost().worth(1)
    assert cost(prefill=1e9).worth(1)
    assert cost(load=1.0).worth(1)


def test_the_faster_way_is_taken() -> None:
    # 3 blocks: 48 tokens at 100 per second take 0.48 s.
    assert cost(prefill=100, load=3000 / 0.47).worth(3)
    assert not cost(prefill=100, load=3000 / 0.49).worth(3)


def test_a_slow_disk_does_not_keep_what_is_in_memory_from_being_loaded() -> None:
    # 4 blocks: 64 tokens take 0.64 s; from memory 4,000 bytes take 0.04 s.
    made = cost(prefill=100, load=100_000)
    assert made.worth(4, on_disk=4), "not measured yet"
    made.loaded(4, 4, 2.0)
    assert not made.worth(4, on_disk=4)
    assert made.worth(4)
    assert made.worth(4, on_disk=1)  # 0.5 s, and 0.03
    assert not made.worth(4, on_disk=2)
    for _ in range(30):
        made.loaded(4, 2, 0.03)
    assert made.worth(4, on_disk=4)
    assert made.load.time(1000) == pytest.approx(0.01), "what the disk took is not counted for memory"


def test_a_slow_service_is_asked_now_and_then_and_taken_again_when_it_is_fast() -> None:
    made = cost(prefill=1000, load=1.0)
    asked = [made.before.passes(made.worth(4)) for _ in range(3 * PROBE)]
    assert [i for i, worth in enumerate(asked) if worth] == [PROBE - 1, 2 * PROBE - 1, 3 * PROBE - 1]
    for _ in range(20):
        made.load.add(1e6, 0.01)
    assert made.worth(4)
    assert all(made.before.passes(True) for _ in range(PROBE))
    assert not made.before.passes(False), "counted anew"


def test_a_load_is_given_up_when_computing_would_have_been_done_long_ago() -> None:
    assert cost().limit_s(10) == 5.0
    assert cost(prefill=100).limit_s(10) == pytest.approx(3.2)  # twice 160 tokens' 1.6 s
    assert cost(prefill=100).limit_s(1000) == 5.0
    assert cost(prefill=1e6).limit_s(10) == LEAST_S


def test_a_load_that_brought_nothing_makes_loads_slower() -> None:
    made = cost(load=1000)
    made.load.add(0, 1.0)
    assert made.load.time(1000) == pytest.approx(1.8 / 0.8)


def test_a_rate_weighs_by_amount_and_forgets() -> None:
    rate = Rate(keep=0.5)
    assert rate.time(1) is None
    rate.add(1, 1)  # a small, slow one
    rate.add(1000, 1)
    assert rate.time(1000) == pytest.approx(1.5 * 1000 / 1000.5)
    for _ in range(30):
        rate.add(10, 1)
    assert rate.time(10) == pytest.approx(1.0, rel=1e-3)
