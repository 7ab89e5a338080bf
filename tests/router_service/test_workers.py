"""The table of workers while they come, change and go: links are swapped between steps, rows are given back."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import waiting

from forefetch.families import read_spec
from forefetch.shapes import synthetic_config
from router_service.endpoints import Endpoint
from router_service.workers import Workers

SPEC = read_spec(synthetic_config("synthetic:qwen3-30b-a3b,layers=2,experts=8"), {}, "m")
ALL = tuple(range(8))


@dataclass
class Info:
    layers: dict[int, tuple[int, ...]]
    generation: int = 0


@dataclass
class ScriptedLink:
    info: Info
    kind: str = "grpc"
    alive: bool = True
    closed: bool = False
    hints_dropped: int = 0

    def close(self) -> None:
        self.closed = True


@dataclass
class World:
    """`holds`: what each address would say that it holds; one without an entry cannot be reached."""

    holds: dict[str, tuple[int, ...]] = field(default_factory=dict)
    links: dict[str, list[ScriptedLink]] = field(default_factory=dict)

    def connect(self, address: str) -> Any:
        from forefetch.errors import Unavailable

        if address not in self.holds:
            raise Unavailable("not there")
        link = ScriptedLink(Info(dict.fromkeys(SPEC.moe_layers, self.holds[address])))
        self.links.setdefault(address, []).append(link)
        return link


def until(workers: Workers, condition: Callable[[], bool]) -> None:
    """While steps go by."""
    waiting.until(lambda: condition() or workers.refresh(), every=0.005)


def table(world: World, room: int = 4) -> Workers:
    return Workers(SPEC, (), world.connect, room=room)


def owners(workers: Workers) -> set[str]:
    return {workers.names[index] for turn in workers.owners for index in turn[0].tolist() if index >= 0}


def test_workers_that_come_are_connected_and_own_what_they_hold() -> None:
    world = World({"a:1": ALL[:4], "b:1": ALL[4:]})
    workers = table(world)
    assert not workers.complete
    workers.want([Endpoint("a:1"), Endpoint("b:1")])
    until(workers, lambda: workers.complete)
    assert owners(workers) == {"a:1", "b:1"}
    workers.close()


def test_what_a_worker_holds_by_now_is_taken_over_between_steps_on_the_same_link() -> None:
    world = World({"a:1": ALL[:4], "b:1": ALL[4:]})
    workers = table(world)
    workers.want([Endpoint("a:1"), Endpoint("b:1")])
    until(workers, lambda: workers.complete)
    link, before = world.links["a:1"][0], workers.owners
    workers.holds(link, Info(dict.fromkeys(SPEC.moe_layers, ALL), 1))  # type: ignore[arg-type]
    assert workers.owners is before, "a step that runs goes by the table it began with"
    assert link.info.generation == 0, "nor is the new one acknowledged"
    workers.refresh()
    assert owners(workers) == {"a:1", "b:1"}
    assert len(workers.owners) == 2, "the rows of those experts that both hold are shared"
    assert (workers.rows[0].link, link.closed, len(world.links["a:1"])) == (link, False, 1)
    workers.lost(0, "gone")
    workers.holds(link, Info({}, 2))  # type: ignore[arg-type]
    until(workers, lambda: workers.rows[0].link is not None)
    assert workers.complete, "news of a link that was given up change nothing"
    workers.close()


def test_one_that_leaves_is_used_only_where_nobody_else_holds_an_expert() -> None:
    world = World({"a:1": ALL, "b:1": ALL[4:]})
    workers = table(world)
    workers.want([Endpoint("a:1"), Endpoint("b:1")])
    until(workers, lambda: len(owners(workers)) == 2)
    workers.want([Endpoint("a:1"), Endpoint("b:1", leaving=True)])
    until(workers, lambda: owners(workers) == {"a:1"})
    workers.want([Endpoint("a:1", leaving=True), Endpoint("b:1")])
    until(workers, lambda: set(workers.owner[0].tolist()) == {0, 1})
    assert workers.owner[0].tolist() == [0] * 4 + [1] * 4
    workers.close()


def test_rows_of_those_that_left_are_given_to_others() -> None:
    world = World({f"w{number}:1": ALL for number in range(6)})
    workers = table(world, room=2)
    for number in range(5):
        workers.want([Endpoint(f"w{number}:1"), Endpoint(f"w{number + 1}:1")])
        until(workers, lambda n=number: owners(workers) == {f"w{n}:1", f"w{n + 1}:1"})  # type: ignore[misc]
        assert workers.complete
        world.links[f"w{number}:1"][-1].alive = False  # it ends
    workers.close()


def test_a_link_of_one_that_is_not_listed_any_more_is_used_until_it_breaks() -> None:
    """An API server that forgets a worker for a moment breaks nothing."""
    world = World({"a:1": ALL})
    workers = table(world)
    workers.want([Endpoint("a:1")])
    until(workers, lambda: workers.complete)
    workers.want([])
    workers.refresh()
    assert workers.complete
    workers.want([Endpoint("a:1")])
    workers.refresh()
    assert (workers.complete, len(world.links["a:1"])) == (True, 1)
    workers.lost(0, "gone")
    until(workers, lambda: workers.complete)
    assert workers.rows[0].reconnects == 1
    workers.want([])
    workers.refresh()
    workers.lost(0, "gone")
    assert [worker.address for worker in workers.known] == []
    workers.close()


def test_no_row_left_is_said_and_survived() -> None:
    world = World({"a:1": ALL, "b:1": ALL})
    workers = table(world, room=1)
    workers.want([Endpoint("a:1"), Endpoint("b:1")])
    until(workers, lambda: workers.complete)
    assert [worker.address for worker in workers.known] == ["a:1"]
    workers.close()


def test_threads_end_with_the_table() -> None:
    workers = table(World())
    workers.want([Endpoint("a:1"), Endpoint("b:1")])
    workers.refresh()
    workers.close()

    def connecting() -> list[str]:
        return [thread.name for thread in threading.enumerate() if thread.name.startswith("connect-")]

    waiting.until(lambda: not connecting())
    assert connecting() == []
