"""Placement: plans by scenario, and moves by property: an expert is never without a holder on the way."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from router_service.planner import Holder, imbalance, moves, plan


def empty(*names: str, capacity: int = 8) -> dict[str, Holder]:
    return {name: Holder(frozenset(), capacity) for name in names}


def covered(target: dict[str, frozenset[int]]) -> set[int]:
    return set().union(*target.values()) if target else set()


def test_shards_are_spread_evenly_to_begin_with() -> None:
    target = plan(empty("a", "b"), [0.0] * 8)
    assert covered(target) == set(range(8))
    assert sorted(map(len, target.values())) == [4, 4]


def test_nothing_moves_without_a_reason() -> None:
    target = plan(empty("a", "b", "c"), [0.0] * 8)
    holders = {name: Holder(shards, 8) for name, shards in target.items()}
    assert plan(holders, [1.0] * 8) == target
    assert moves(holders, target) == {}


def test_a_new_worker_takes_some_and_the_others_keep_theirs() -> None:
    target = plan(empty("a", "b"), [1.0] * 8)
    holders = {**{name: Holder(shards, 8) for name, shards in target.items()}, **empty("c", "d")}
    after = plan(holders, [1.0] * 8)
    assert [len(after[name]) for name in "abcd"] == [2, 2, 2, 2]
    assert after["a"] <= target["a"]
    assert after["b"] <= target["b"]


def test_what_leaves_is_given_nothing() -> None:
    holders = {"a": Holder(frozenset(range(8)), 8, leaving=True), **empty("b")}
    assert plan(holders, [1.0] * 8) == {"b": frozenset(range(8))}
    assert plan({"a": holders["a"]}, [1.0] * 8) == {}


def test_hot_shards_are_apart_and_the_hottest_has_several_holders() -> None:
    target = plan(empty("a", "b", "c", "d"), [40.0, 10.0, 9.0, 1.0, 1.0, 1.0, 1.0, 1.0])
    holders = [name for name, shards in target.items() if 0 in shards]
    assert len(holders) >= 2
    one, two = (next(name for name, shards in target.items() if shard in shards) for shard in (1, 2))
    assert one != two


def test_copies() -> None:
    target = plan(empty("a", "b", "c"), [1.0] * 6, copies=2)
    assert all(sum(shard in shards for shards in target.values()) == 2 for shard in range(6))
    assert all(sum(s in shards for shards in plan(empty("a"), [1.0] * 6, copies=2).values()) == 1 for s in range(6))


def test_every_shard_comes_before_a_second_holder_where_room_is_short() -> None:
    target = plan(empty("a", "b", capacity=3), [9.0, 1.0, 1.0, 1.0, 1.0, 1.0], copies=2)
    assert covered(target) == set(range(6))
    short = plan(empty("a", capacity=2), [3.0, 2.0, 1.0])
    assert short == {"a": frozenset({0, 1})}, "the lightest goes without"


def test_imbalance() -> None:
    holders = {"a": Holder(frozenset({0, 1}), 8), "b": Holder(frozenset({2, 3}), 8)}
    assert imbalance(holders, [1.0, 1.0, 1.0, 1.0]) == 1.0
    assert imbalance(holders, [3.0, 3.0, 1.0, 1.0]) == 1.5
    assert imbalance(holders, [0.0] * 4) == 1.0


NAMES = "abcd"
workers = st.dictionaries(
    st.sampled_from(NAMES),
    st.builds(Holder, st.frozensets(st.integers(0, 5)), st.integers(6, 8), st.booleans()),
    min_size=1,
)


@settings(max_examples=300)
@given(workers, st.lists(st.floats(0, 100), min_size=6, max_size=6), st.integers(1, 3))
def test_moves_reach_the_plan_and_never_uncover_a_shard(holders: dict[str, Holder], loads: list[float], copies: int) -> None:
    target = plan(holders, loads, copies)
    served = covered({name: holder.held for name, holder in holders.items()})
    if not target:
        assert moves(holders, target) == {}
        return
    for _ in range(30):
        commands = moves(holders, target)
        if not commands:
            break
        for name, shards in commands.items():  # one after the other: any order, any pause between them
            holder = holders[name]
            assert len(shards) <= holder.capacity
            assert not holder.leaving
            holders = {**holders, name: Holder(shards, holder.capacity)}
            now = covered({name: holder.held for name, holder in holders.items()})
            assert served <= now, "somebody still asks for it"
            served = now
    staying = {name: holder for name, holder in holders.items() if not holder.leaving}
    assert all(target[name] <= holder.held for name, holder in staying.items())
    assert covered({name: holder.held for name, holder in staying.items()}) == set(range(6))
