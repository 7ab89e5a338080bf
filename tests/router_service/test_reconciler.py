"""The planner's turns over workers that are scripted: who is told what, when, and by whom it may be told."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import pytest

from expert_worker.control import Holdings
from forefetch.errors import StaleEpoch, Unavailable
from router_service.endpoints import Endpoint
from router_service.planner import Unit
from router_service.reconciler import LEAST, SETTLE_S, Reconciler

LAYERS, EXPERTS = (1, 3), 8
ALL = {(layer, expert) for layer in LAYERS for expert in range(EXPERTS)}


class ScriptedWorker:
    """Holds what it is told at once, unless it is `slow`; refuses epochs below the highest."""

    def __init__(self) -> None:
        self.experts: set[Unit] = set()
        self.wanted: set[Unit] = set()
        self.counts: dict[Unit, int] = {}
        self.epoch, self.slow, self.away, self.capacity = 0, False, False, 2 * len(ALL)

    def holdings(self) -> Holdings:
        if self.away:
            raise Unavailable("gone")
        if not self.slow:
            self.experts = set(self.wanted)
        layers = {layer: tuple(e for at, e in sorted(self.experts) if at == layer) for layer in LAYERS}
        return Holdings("w", 0, layers, self.capacity)

    def pairs(self) -> dict[int, dict[int, int]]:
        if self.away:
            raise Unavailable("gone")
        found: dict[int, dict[int, int]] = {layer: {} for layer in LAYERS}
        for layer, expert in self.experts:
            found[layer][expert] = self.counts.get((layer, expert), 0)
        return found

    def place(self, epoch: int, planner: str, layers: Mapping[int, Sequence[int]]) -> None:
        if self.away:
            raise Unavailable("gone")
        if epoch < self.epoch:
            raise StaleEpoch("over")
        self.epoch = epoch
        self.wanted = {(layer, expert) for layer, experts in layers.items() for expert in experts}

    def close(self) -> None:
        pass


class World:
    def __init__(self, **more: Any) -> None:
        self.workers = {name: ScriptedWorker() for name in ("a", "b")}
        self.endpoints = [Endpoint(name) for name in self.workers]
        self.now, self.epoch = 0.0, 1
        settings = {"copies": 1, "extra": 0, "rebalance_s": 60.0, "planner": "me", **more}
        self.reconciler = Reconciler(lambda name: self.workers[name], LAYERS, EXPERTS, **settings)  # type: ignore[arg-type,return-value]

    def turns(self, seconds: float, **how: Any) -> bool:
        known = True
        for _ in range(round(seconds)):
            self.now += 1.0
            known = self.reconciler.turn(self.endpoints, self.epoch, self.now, **{"leads": True, **how}) and known
        return known

    def held(self) -> dict[str, set[Unit]]:
        return {name: set(worker.experts) for name, worker in self.workers.items()}

    def holders(self, unit: Unit) -> set[str]:
        return {name for name, experts in self.held().items() if unit in experts}

    def add(self, *names: str) -> None:
        for name in names:
            self.workers[name] = ScriptedWorker()
            self.endpoints.append(Endpoint(name))

    def use(self, seconds: int, hot: Sequence[Unit], often: int = 1000, seldom: int = 100) -> None:
        """Streams that use some experts more: replicas share what an expert gets."""
        for _ in range(seconds):
            for unit in ALL:
                holders = self.holders(unit)
                for name in holders:
                    counts = self.workers[name].counts
                    counts[unit] = counts.get(unit, 0) + (often if unit in hot else seldom) // len(holders)
            self.turns(1)


@pytest.fixture
def world() -> World:
    world = World()
    world.turns(SETTLE_S + 4)
    return world


def test_empty_workers_are_given_everything(world: World) -> None:
    held = world.held()
    assert held["a"] | held["b"] == ALL
    assert held["a"].isdisjoint(held["b"])
    assert len(held["a"]) == len(held["b"]) == len(ALL) // 2


def test_nobody_is_told_anything_by_a_router_that_does_not_lead() -> None:
    world = World()
    world.turns(10, leads=False)
    assert all(worker.epoch == 0 for worker in world.workers.values())


def test_a_new_worker_loads_before_the_old_one_unloads(world: World) -> None:
    before = world.held()
    world.add("c")
    world.workers["c"].slow = True
    world.turns(SETTLE_S + 10)
    assert world.workers["c"].wanted
    assert {name: world.held()[name] for name in "ab"} == before, "nobody gives up anything while the new one still loads"
    world.workers["c"].slow = False
    world.turns(4)
    held = world.held()
    assert held["c"]
    assert set().union(*held.values()) == ALL
    assert sum(map(len, held.values())) == len(ALL)


def test_what_a_lost_worker_held_is_loaded_elsewhere(world: World) -> None:
    world.workers["b"].away = True
    world.turns(SETTLE_S + 4)
    assert world.held()["a"] == ALL


def test_a_worker_that_leaves_keeps_serving_until_others_do(world: World) -> None:
    before = world.held()["b"]
    world.endpoints[1] = Endpoint("b", leaving=True)
    world.turns(SETTLE_S + 4)
    assert world.held() == {"a": ALL, "b": before}


def test_a_blink_moves_nothing(world: World) -> None:
    before = world.held()
    world.workers["b"].away = True
    world.turns(SETTLE_S - 1)
    world.workers["b"].away = False
    world.turns(SETTLE_S + 4)
    assert world.held() == before


def test_one_hot_expert_gets_a_second_holder_and_no_other_moves(world: World) -> None:
    """Only as much moves as evens things out, and there it stays."""
    before = world.held()
    hot = min(before["a"])
    world.use(150, [hot], often=2400)
    assert world.holders(hot) == {"a", "b"}, "it had three quarters of its layer's load"
    moved = {unit for unit in ALL if world.holders(unit) != {name for name in "ab" if unit in before[name]}}
    assert moved == {hot}
    held = world.held()
    world.use(150, [hot], often=2400)
    assert world.held() == held


def test_hot_experts_of_one_worker_are_parted_and_even_use_moves_nothing(world: World) -> None:
    before = world.held()
    world.use(150, [])
    assert world.held() == before
    hot = [unit for unit in sorted(before["a"]) if unit[0] == 1][:3]
    world.use(150, hot)
    assert {frozenset(world.holders(unit)) for unit in hot} != {frozenset("a")}
    assert set().union(*world.held().values()) == ALL
    other = {unit for unit in ALL if unit[0] == 3}
    assert all(world.held()[name] & other == before[name] & other for name in "ab"), "the layer that is even stays"


def test_a_few_tokens_say_nothing(world: World) -> None:
    before = world.held()
    hot = min(before["a"])
    for unit in (hot,):
        world.workers["a"].counts[unit] = LEAST * len(ALL) // 2
    world.turns(150)
    assert world.held() == before


def test_a_worker_that_counts_from_zero_again_takes_no_load_back(world: World) -> None:
    world.use(10, [])
    world.workers["b"].counts.clear()  # it was started again
    world.use(1, [])
    assert (world.reconciler._loads > 0).all()


def test_a_planner_that_was_replaced_says_so_and_stops(world: World) -> None:
    for worker in world.workers.values():
        worker.epoch = 7
    world.add("c")
    assert not world.turns(SETTLE_S + 4)
    assert world.workers["a"].epoch == 7


def test_without_an_api_server_lost_shards_are_loaded_again_and_nothing_else_moves(world: World) -> None:
    before = world.held()
    world.workers["b"] = ScriptedWorker()  # killed, and started again without anything
    world.add("c")
    world.turns(SETTLE_S + 6, leads=False, away=True)
    assert {name: world.held()[name] for name in "ab"} == before
    assert world.held()["c"] == set()
    world.turns(2, leads=False, away=False)
    world.workers["b"] = ScriptedWorker()
    world.turns(5, leads=False, away=True)
    assert world.held()["b"] == set(), "it knows that another router may plan now"


def test_workers_with_a_fixed_shard_are_left_alone() -> None:
    world = World()
    for worker in world.workers.values():
        worker.capacity = 0
    world.turns(10)
    assert all(worker.epoch == 0 for worker in world.workers.values())


def test_copies() -> None:
    world = World(copies=2)
    world.turns(SETTLE_S + 4)
    assert all(shards == ALL for shards in world.held().values())
