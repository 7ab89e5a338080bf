"""Placement: plans by scenario, and moves by property: an expert is never without a holder on the way."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from hypothesis import given, settings
from hypothesis import strategies as st

from router_service.planner import Holder, Placement, Unit, imbalance, moves, plan

EVEN = {0: [1.0] * 8}


def empty(*names: str, capacity: int = 8) -> dict[str, Holder]:
    return {name: Holder(frozenset(), capacity) for name in names}


def covered(sets: Iterable[frozenset[Unit]]) -> set[Unit]:
    return set().union(*sets)


def units(*experts: int, layer: int = 0) -> frozenset[Unit]:
    return frozenset((layer, expert) for expert in experts)


def having(target: Placement, expert: int, layer: int = 0) -> set[str]:
    return {name for name, held in target.items() if (layer, expert) in held}


def held(target: Placement, capacity: int = 8) -> dict[str, Holder]:
    return {name: Holder(experts, capacity) for name, experts in target.items()}


def test_experts_are_spread_evenly_to_begin_with_in_every_layer() -> None:
    target = plan(empty("a", "b", capacity=16), {0: [0.0] * 8, 3: [0.0] * 8})
    assert covered(target.values()) == units(*range(8)) | units(*range(8), layer=3)
    assert {name: sum(layer == 3 for layer, _ in mine) for name, mine in target.items()} == {"a": 4, "b": 4}


def test_nothing_moves_without_a_reason() -> None:
    target = plan(empty("a", "b", "c"), {0: [0.0] * 8})
    assert plan(held(target), EVEN) == target
    assert moves(held(target), target) == {}


def test_a_new_worker_takes_some_and_the_others_keep_theirs() -> None:
    target = plan(empty("a", "b"), EVEN)
    after = plan({**held(target), **empty("c", "d")}, EVEN)
    assert [len(after[name]) for name in "abcd"] == [2, 2, 2, 2]
    assert after["a"] <= target["a"]
    assert after["b"] <= target["b"]


def test_one_hot_expert_moves_and_the_rest_of_its_layer_and_the_others_stay() -> None:
    even = {0: [1.0] * 8, 1: [1.0] * 8}
    before = plan(empty("a", "b", capacity=24), even)
    skewed = {**even, 0: [4.0, 4.0] + [1.0] * 6 if having(before, 0) == having(before, 1) else [4.0, 1.0, 4.0] + [1.0] * 5}
    after = plan(held(before, 24), skewed)
    assert {unit for unit in covered(after.values()) if unit[0] == 1} == units(*range(8), layer=1)
    for name in "ab":
        assert units(*range(8), layer=1) & after[name] == units(*range(8), layer=1) & before[name], "the even layer stays"
    moved = sum(len(after[name] - before[name]) for name in "ab")
    assert 1 <= moved <= 3


def test_what_leaves_is_given_nothing() -> None:
    holders = {"a": Holder(units(*range(8)), 8, leaving=True), **empty("b")}
    assert plan(holders, EVEN) == {"b": units(*range(8))}
    assert plan({"a": holders["a"]}, EVEN) == {}


def test_hot_experts_are_apart_and_the_hottest_has_several_holders() -> None:
    loads = {0: [40.0, 10.0, 9.0, 1.0, 1.0, 1.0, 1.0, 1.0]}
    target = plan(empty("a", "b", "c", "d"), loads)
    assert len(having(target, 0)) >= 2
    assert imbalance(held(target), loads) < 1.2, "in four equal parts it is 3.2"
    target = plan(empty("a", "b"), {0: [8.0, 8.0] + [1.0] * 6})
    assert having(target, 0) != having(target, 1)


def test_copies_and_extra_places() -> None:
    target = plan(empty("a", "b", "c"), EVEN, copies=2)
    assert all(len(having(target, expert)) == 2 for expert in range(8))
    assert all(len(having(plan(empty("a"), EVEN, copies=2), expert)) == 1 for expert in range(8))
    loads = {0: [2.0, 1.9] + [1.0] * 6}
    target = plan(empty("a", "b"), loads, extra=1)
    assert [len(having(target, expert)) for expert in range(8)] == [2, 2, 1, 1, 1, 1, 1, 1], "for the hottest"


def test_every_expert_comes_before_a_second_holder_where_room_is_short() -> None:
    target = plan(empty("a", "b", capacity=3), {0: [9.0, 1.0, 1.0, 1.0, 1.0, 1.0]}, copies=2)
    assert covered(target.values()) == units(*range(6))
    short = plan(empty("a", capacity=2), {0: [3.0, 2.0, 1.0]})
    assert short == {"a": units(0, 1)}, "the least used goes without"


def test_room_is_shared_out_over_layers() -> None:
    target = plan(empty("a", "b", capacity=5), {layer: [1.0] * 2 for layer in range(3)})
    assert covered(target.values()) == {(layer, expert) for layer in range(3) for expert in range(2)}
    assert all(len(mine) <= 5 for mine in target.values())


def test_imbalance_is_of_layers_and_not_of_their_sum() -> None:
    holders = {"a": Holder(units(0, 1) | units(0, 1, layer=1), 8), "b": Holder(units(2, 3) | units(2, 3, layer=1), 8)}
    assert imbalance(holders, {0: [1.0] * 4, 1: [1.0] * 4}) == 1.0
    assert imbalance(holders, {0: [3.0, 3.0, 1.0, 1.0], 1: [1.0, 1.0, 3.0, 3.0]}) == 1.5, "each waits for another"
    assert imbalance(holders, {0: [0.0] * 4, 1: [0.0] * 4}) == 1.0
    both = {name: Holder(units(0), 8) for name in "ab"}
    assert imbalance(both, {0: [7.0]}) == 1.0, "replicas share"


LAYERS, EXPERTS = (0, 2), 3
ALL = frozenset((layer, expert) for layer in LAYERS for expert in range(EXPERTS))
workers = st.dictionaries(
    st.sampled_from("abcd"),
    st.builds(Holder, st.frozensets(st.sampled_from(sorted(ALL))), st.integers(6, 8), st.booleans()),
    min_size=1,
)
loads = st.fixed_dictionaries({layer: st.lists(st.floats(0, 100), min_size=EXPERTS, max_size=EXPERTS) for layer in LAYERS})


@settings(max_examples=300)
@given(workers, loads, st.integers(1, 3), st.integers(0, 2))
def test_moves_reach_the_plan_and_never_uncover_an_expert(
    holders: dict[str, Holder], loads: Mapping[int, list[float]], copies: int, extra: int
) -> None:
    target = plan(holders, loads, copies, extra)
    served = covered(holder.held for holder in holders.values())
    if not target:
        assert moves(holders, target) == {}
        return
    for _ in range(30):
        commands = moves(holders, target)
        if not commands:
            break
        for name, experts in commands.items():  # one after the other: any order, any pause between them
            holder = holders[name]
            assert len(experts) <= holder.capacity
            assert not holder.leaving
            holders = {**holders, name: Holder(experts, holder.capacity)}
            now = covered(holder.held for holder in holders.values())
            assert served <= now, "somebody still asks for it"
            served = now
    staying = {name: holder for name, holder in holders.items() if not holder.leaving}
    assert all(target[name] <= holder.held for name, holder in staying.items())
    assert covered(holder.held for holder in staying.values()) == ALL
