"""Rigs of routers' KV side."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from kv_rigs import Engine, Rig
from waiting import PATIENCE_S, until

from router_service import cost, lane


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cost, "LEAST_S", PATIENCE_S)  # loads have time, whatever computing is said to take
    monkeypatch.setattr(lane, "HEARTBEAT_S", 0.1)
    monkeypatch.setattr(lane, "BACKOFF_S", (0.02, 0.1))


@pytest.fixture
def start(quick: None) -> Iterator[Callable[..., Engine]]:
    engines: list[Engine] = []

    def build(address: str, **how: Any) -> Engine:
        engines.append(Engine(address, **how))
        return engines[-1]

    yield build
    for engine in engines:
        engine.gate.set()
        engine.handover.close(timeout_s=0.5)
        engine.replicas.close()
        until(lambda engine=engine: not engine.lane._copier.is_alive() and not engine.lane._sender.is_alive())  # type: ignore[misc]


@pytest.fixture
def make(quick: None) -> Iterator[Callable[..., Rig]]:
    rigs: list[Rig] = []

    def build(addresses: list[str], digest: str = "", **how: Any) -> Rig:
        rigs.append(Rig(addresses, digest or os.urandom(8).hex(), **how))
        return rigs[-1]

    yield build
    for rig in rigs:
        rig.close()
