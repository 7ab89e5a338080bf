from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from expert_worker.prefetch import Prefetcher
from expert_worker.slots import Slots

MS = 1_000_000


def a_prefetcher(capacity: int = 8, copy_ns: float = MS) -> Prefetcher:
    return Prefetcher(Slots(capacity, [8, 8, 8]), copy_ns)


def hint(
    prefetcher: Prefetcher,
    layer: int,
    experts: list[int],
    chances: list[float] | None = None,
    *,
    step: int = 1,
    now: int = 0,
    window: int = 100 * MS,
    busy: int = 0,
    source: str = "a",
) -> bool:
    chances = chances or [0.9] * len(experts)
    return prefetcher.hint((source, step, layer), experts, chances, now, window, busy)


def taken(prefetcher: Prefetcher, now: int = 0) -> list[int]:
    wishes = []
    while (wish := prefetcher.next(now)) is not None:
        wishes.append(wish.expert)
    return wishes


def test_the_earlier_call_comes_first_and_in_it_the_likelier() -> None:
    prefetcher = a_prefetcher()
    assert hint(prefetcher, 2, [16, 17], [0.9, 0.2], window=50 * MS)
    assert hint(prefetcher, 1, [8, 9], [0.4, 0.3], window=20 * MS)
    assert taken(prefetcher) == [8, 9, 16, 17]


def test_only_as_many_as_the_link_can_bring_in_time() -> None:
    prefetcher = a_prefetcher()
    hint(prefetcher, 1, list(range(8, 16)), window=4 * MS, busy=1)
    assert prefetcher.late_wishes == 5
    hint(prefetcher, 2, list(range(16, 24)), window=6 * MS)  # behind the three for layer 1
    assert prefetcher.late_wishes == 5 + 5
    assert taken(prefetcher) == [8, 9, 10, 16, 17, 18]


def test_faster_copies_bring_more() -> None:
    prefetcher = a_prefetcher()
    for _ in range(100):
        prefetcher.copied(MS // 4)
    hint(prefetcher, 1, list(range(8, 16)), window=2 * MS)
    assert len(taken(prefetcher)) in (7, 8)


def test_a_wish_that_can_no_longer_be_in_time_is_given_up() -> None:
    prefetcher = a_prefetcher()
    hint(prefetcher, 1, [8, 9], window=2 * MS)
    assert taken(prefetcher, now=MS + 1) == []
    assert prefetcher.late_wishes == 2


def test_a_refined_hint_replaces_the_first() -> None:
    prefetcher = a_prefetcher()
    hint(prefetcher, 1, [8, 9])
    hint(prefetcher, 1, [10, 9])
    assert taken(prefetcher) == [10, 9]
    assert prefetcher._slots.predicted.nonzero()[0].tolist() == [9, 10]
    assert prefetcher.arrived("a", 1, 1) == {9, 10}


def test_stale_hints_are_dropped() -> None:
    prefetcher = a_prefetcher()
    hint(prefetcher, 1, [8])
    hint(prefetcher, 2, [16])
    assert prefetcher.arrived("a", 1, 1) == {8}
    assert not hint(prefetcher, 1, [9]), "its layer is passed"
    assert not hint(prefetcher, 0, [0])
    assert not hint(prefetcher, 2, [17], step=0), "an older step"
    assert taken(prefetcher) == [16]
    assert hint(prefetcher, 0, [0], step=2)
    assert prefetcher.arrived("a", 2, 1) == frozenset(), "layer 0 was never called"
    assert taken(prefetcher) == []
    assert not prefetcher._slots.predicted.any()


def test_a_step_that_is_replayed_may_be_hinted_again() -> None:
    prefetcher = a_prefetcher()
    prefetcher.arrived("a", 5, 2)
    assert not hint(prefetcher, 1, [8], step=5)
    prefetcher.arrived("a", 5, 0)
    assert hint(prefetcher, 1, [8], step=5)


def test_routers_count_their_own_steps() -> None:
    prefetcher = a_prefetcher()
    prefetcher.arrived("a", 1000, 2)
    assert hint(prefetcher, 1, [8], step=3, source="b")
    assert hint(prefetcher, 1, [9], step=1001)
    assert prefetcher.arrived("b", 3, 1) == {8}
    assert prefetcher.arrived("a", 1001, 1) == {9}
    assert not prefetcher._slots.predicted.any()


def test_what_two_routers_predict_stays_predicted_for_the_other() -> None:
    prefetcher = a_prefetcher()
    hint(prefetcher, 1, [8])
    hint(prefetcher, 1, [8], source="b")
    prefetcher.arrived("a", 1, 1)
    assert prefetcher._slots.predicted[8]
    prefetcher.arrived("b", 1, 1)
    assert not prefetcher._slots.predicted[8]


def test_what_is_there_is_not_wished_for() -> None:
    prefetcher = a_prefetcher()
    prefetcher._slots.place(8)
    hint(prefetcher, 1, [8, 9])
    prefetcher._slots.place(9)
    assert taken(prefetcher) == []


def test_routers_that_never_call_cost_a_bounded_amount() -> None:
    prefetcher = a_prefetcher()
    for step in range(5000):
        hint(prefetcher, 1, [8], step=step, source=str(step % 900))
        prefetcher.arrived(str(step), 0, 0)
    assert len(prefetcher._outlooks) <= 64
    assert len(prefetcher._reached) <= 256


@settings(max_examples=200)
@given(
    st.lists(
        st.tuples(
            st.integers(0, 2), st.lists(st.integers(0, 7), unique=True, max_size=8), st.integers(0, 20), st.integers(0, 4)
        ),
        max_size=8,
    )
)
def test_admitted_copies_always_fit_into_the_time(hints: list[tuple[int, list[int], int, int]]) -> None:
    """Copies made one after the other, in the order given, are done by the deadline of their call."""
    prefetcher = a_prefetcher()
    for layer, experts, window, busy in hints:
        hint(prefetcher, layer, [8 * layer + e for e in experts], window=window * MS, busy=busy)
    now, seen = 0, []
    while (wish := prefetcher.next(now)) is not None:
        now += MS
        assert now <= wish.deadline_ns
        seen.append(wish.expert)
    assert len(set(seen)) == len(seen)
