"""Following and planning without a cluster to ask, over connections that are scripted."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import Any

import pytest
from waiting import until

from expert_worker.control import Holdings
from forefetch.errors import StaleEpoch
from router_service import placing, reconciler
from router_service.config import RouterConfig
from router_service.endpoints import Endpoint
from router_service.placing import Alone, Placing

LAYERS = (0, 1)


@dataclass
class ScriptedControl:
    """A worker that holds what it is told at once; `asked` are (router, generation) of those who asked it as routers."""

    held: Holdings = field(default_factory=lambda: Holdings("w", 0, {}, 16))
    epoch: int = 0
    asked: list[tuple[str, int]] = field(default_factory=list)
    closed: bool = False

    def holdings(self, router: str = "", generation: int = 0) -> Holdings:
        if router:
            self.asked.append((router, generation))
        return self.held

    def pairs(self) -> dict[int, dict[int, int]]:
        return {layer: dict.fromkeys(experts, 0) for layer, experts in self.held.layers.items()}

    def place(self, epoch: int, planner: str, layers: Mapping[int, Sequence[int]]) -> None:
        if epoch < self.epoch:
            raise StaleEpoch("over")
        self.epoch = epoch
        layers = {layer: tuple(experts) for layer, experts in layers.items()}
        if layers != self.held.layers:
            self.held = replace(self.held, generation=self.held.generation + 1, layers=layers)

    def close(self) -> None:
        self.closed = True


@dataclass
class Table:
    """The router's workers; `holds` takes news over at once."""

    known: list[Any]
    spec: Any = field(default_factory=lambda: SimpleNamespace(moe_layers=LAYERS, num_experts=4))

    def holds(self, link: Any, info: Any) -> None:
        link.info = info


@dataclass(frozen=True)
class Info:
    instance_id: str = "w"
    generation: int = 0
    layers: Any = None
    capacity: int = 16


@pytest.fixture
def controls(monkeypatch: pytest.MonkeyPatch) -> dict[str, ScriptedControl]:
    made = {address: ScriptedControl() for address in ("a:1", "b:1")}
    monkeypatch.setattr(placing, "Control", lambda address, tls: made[address])
    monkeypatch.setattr(placing, "LOOK_S", 0.01)
    monkeypatch.setattr(reconciler, "SETTLE_S", 0.05)
    return made


def table(*addresses: str) -> Table:
    return Table([SimpleNamespace(address=address, link=SimpleNamespace(info=Info())) for address in addresses])


def test_a_list_is_planned_followed_and_acknowledged(controls: dict[str, ScriptedControl]) -> None:
    workers = table("a:1", "b:1")
    made = Placing(RouterConfig(model="m"), workers, Alone(), "me", every_s=0.02)  # type: ignore[arg-type]
    made.take([Endpoint("a:1"), Endpoint("b:1")])
    until(lambda: {layer: len(experts) for layer, experts in controls["a:1"].held.layers.items()} == {0: 2, 1: 2})
    until(lambda: all(worker.link.info.layers == controls[worker.address].held.layers for worker in workers.known))
    newest = controls["a:1"].held.generation
    until(lambda: ("me", newest) in controls["a:1"].asked)
    made.take([Endpoint("a:1")])
    assert controls["b:1"].closed, "no connection is kept to one that is gone"
    made.close()


def test_the_router_that_was_started_last_leads(controls: dict[str, ScriptedControl]) -> None:
    first = Alone()
    time.sleep(0.01)
    second = Alone()
    assert second.epoch > first.epoch
    controls["a:1"] = ScriptedControl(epoch=second.epoch)
    made = Placing(RouterConfig(model="m"), table("a:1"), first, "me", every_s=0.02)  # type: ignore[arg-type]
    made.take([Endpoint("a:1")])
    until(lambda: not first.leads)
    assert controls["a:1"].held.layers == {}
    made.close()
