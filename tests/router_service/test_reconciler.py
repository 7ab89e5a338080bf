"""The planner's turns over workers that are scripted: who is told what, when, and by whom it may be told."""

from __future__ import annotations

from typing import Any

import pytest

from expert_worker.control import Holdings
from forefetch.errors import StaleEpoch, Unavailable
from router_service.endpoints import Endpoint
from router_service.reconciler import SETTLE_S, Reconciler

SHARDS = 8


class ScriptedWorker:
    """Holds what it is told at once, unless it is `slow`; refuses epochs below the highest."""

    def __init__(self) -> None:
        self.shards: frozenset[int] = frozenset()
        self.wanted: frozenset[int] = frozenset()
        self.pairs: dict[int, int] = {}
        self.epoch, self.slow, self.away, self.capacity = 0, False, False, SHARDS

    def holdings(self) -> Holdings:
        if self.away:
            raise Unavailable("gone")
        if not self.slow:
            self.shards = self.wanted
        pairs = {shard: self.pairs.get(shard, 0) for shard in self.shards}
        return Holdings(tuple(sorted(self.shards)), SHARDS, self.capacity, pairs)

    def place(self, epoch: int, planner: str, shards: Any) -> None:
        if self.away:
            raise Unavailable("gone")
        if epoch < self.epoch:
            raise StaleEpoch("over")
        self.epoch, self.wanted = epoch, frozenset(shards)

    def close(self) -> None:
        pass


class World:
    def __init__(self, **more: Any) -> None:
        self.workers = {name: ScriptedWorker() for name in ("a", "b")}
        self.endpoints = [Endpoint(name) for name in self.workers]
        self.now, self.epoch = 0.0, 1
        settings = {"copies": 1, "rebalance_s": 60.0, "planner": "me", **more}
        self.reconciler = Reconciler(lambda name: self.workers[name], **settings)  # type: ignore[arg-type,return-value]

    def turns(self, seconds: float, **how: Any) -> bool:
        known = True
        for _ in range(round(seconds)):
            self.now += 1.0
            known = self.reconciler.turn(self.endpoints, self.epoch, self.now, **{"leads": True, **how}) and known
        return known

    def held(self) -> dict[str, set[int]]:
        return {name: set(worker.shards) for name, worker in self.workers.items()}

    def add(self, *names: str) -> None:
        for name in names:
            self.workers[name] = ScriptedWorker()
            self.endpoints.append(Endpoint(name))


@pytest.fixture
def world() -> World:
    world = World()
    world.turns(SETTLE_S + 4)
    return world


def test_empty_workers_are_given_everything(world: World) -> None:
    held = world.held()
    assert held["a"] | held["b"] == set(range(SHARDS))
    assert held["a"].isdisjoint(held["b"])
    assert len(held["a"]) == 4


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
    assert set().union(*held.values()) == set(range(SHARDS))
    assert sum(map(len, held.values())) == SHARDS


def test_what_a_lost_worker_held_is_loaded_elsewhere(world: World) -> None:
    world.workers["b"].away = True
    world.turns(SETTLE_S + 4)
    assert world.held()["a"] == set(range(SHARDS))


def test_a_worker_that_leaves_keeps_serving_until_others_do(world: World) -> None:
    before = world.held()["b"]
    world.endpoints[1] = Endpoint("b", leaving=True)
    world.turns(SETTLE_S + 4)
    assert world.held() == {"a": set(range(SHARDS)), "b": before}


def test_a_blink_moves_nothing(world: World) -> None:
    before = world.held()
    world.workers["b"].away = True
    world.turns(SETTLE_S - 1)
    world.workers["b"].away = False
    world.turns(SETTLE_S + 4)
    assert world.held() == before


def test_uneven_use_moves_experts_and_even_use_does_not(world: World) -> None:
    before = world.held()
    hot = sorted(before["a"])[:2]
    for _ in range(200):
        for worker in world.workers.values():
            for shard in worker.shards:
                worker.pairs[shard] = worker.pairs.get(shard, 0) + (1000 if shard in hot else 100)
        world.turns(1)
    held = world.held()
    assert set().union(*held.values()) == set(range(SHARDS))
    one, two = ({name for name, shards in held.items() if shard in shards} for shard in hot)
    assert one != two or len(one) > 1, "the hot ones are on two workers now"
    assert held != before
    for _ in range(200):
        for worker in world.workers.values():
            for shard in worker.shards:
                worker.pairs[shard] = worker.pairs.get(shard, 0) + (1000 if shard in hot else 100)
        world.turns(1)
    assert world.held() == held, "and there they stay"


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
    assert all(shards == set(range(SHARDS)) for shards in world.held().values())
