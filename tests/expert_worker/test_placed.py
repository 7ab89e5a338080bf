"""Experts that come and go: a worker answers for those that are here as one that holds them for good, to the bit."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from waiting import until

from expert_worker import retiring
from expert_worker.config import ExpertConfig
from expert_worker.core import Core
from expert_worker.experts import Experts
from expert_worker.loading import Loader
from expert_worker.p2p import kind_of
from expert_worker.placer import Placer
from forefetch.errors import BadRequest, ConfigError, Moved, StaleEpoch
from forefetch.hints import ExpertHint
from forefetch.spec import ModelSpec
from forefetch.wire import LayerCall

PLACES = 12
Folder = Callable[[str], Path]
SETTINGS: list[dict[str, Any]] = [
    {"slots": "100%"},
    {"slots": "5"},
    {"slots": "100%", "experts": "int8"},
    {"slots": "5", "experts": "int8"},
]


@pytest.fixture
def folder(checkpoint: Folder) -> Path:
    return checkpoint("qwen3")


def settings(folder: Path, **more: Any) -> ExpertConfig:
    return ExpertConfig(model=str(folder), device="cpu", **{"cache_dir": "none", "check_copies": True, **more})


def placed(folder: Path, **more: Any) -> Core:
    return Loader(settings(folder, placed=True, max_experts=PLACES, **more)).core()


def experts_of(core: Core) -> Experts:
    assert isinstance(core.experts, Experts)
    return core.experts


def call(core: Core, layer: int, experts: list[int], seed: int = 0, rows: int = 5) -> LayerCall:
    """Every row to `experts`, with different weights."""
    draw = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, core.info.hidden_size, generator=draw)
    row = torch.arange(rows).repeat_interleave(len(experts)).int()
    return LayerCall(
        seed, layer, x, row.numpy(), np.array(experts * rows, np.int32), torch.rand(len(row), generator=draw).numpy()
    )


def answer(core: Core, asked: LayerCall) -> Tensor:
    out = torch.full_like(asked.x, torch.nan)
    core.forward(asked, out)
    return out


@pytest.mark.parametrize("how", SETTINGS, ids=str)
def test_answers_equal_a_fixed_workers_while_experts_come_and_go(how: dict[str, Any], folder: Path) -> None:
    spec = ModelSpec.load(folder)
    core, whole = placed(folder, **how), Loader(settings(folder, experts=how.get("experts", "stored"))).core()
    experts, draw = experts_of(core), np.random.default_rng(1)
    if experts.host is not None:
        experts.host.blobs.fill_(255)  # NaN: what a place held before must not matter
    experts.pool.memory.fill_(255)
    here: set[tuple[int, int]] = set()
    everything = [(layer, expert) for layer in spec.moe_layers for expert in range(spec.num_experts)]
    for turn in range(25):
        for unit in [unit for unit in here if draw.random() < 0.4]:
            experts.drop(*unit)
            here.discard(unit)
        for index in draw.permutation(len(everything)):
            if experts.room and everything[index] not in here:
                experts.put(*everything[index])
                here.add(everything[index])
        for layer in spec.moe_layers:
            mine = sorted(expert for at, expert in here if at == layer)[: spec.top_k]
            if mine:
                asked = call(core, layer, mine, seed=turn)
                assert torch.equal(answer(core, asked), answer(whole, asked))
    everywhere = dict.fromkeys(spec.moe_layers, tuple(range(spec.num_experts)))
    assert experts.pairs_of(everywhere) == whole.experts.pairs_of(everywhere)


def test_an_expert_that_is_elsewhere_is_told_apart_from_nonsense(folder: Path) -> None:
    core = placed(folder)
    experts_of(core).put(1, 0)
    with pytest.raises(Moved, match="not held by this worker any more"):
        answer(core, call(core, 1, [0, 2]))
    for nonsense in (10_000, -1):
        with pytest.raises(BadRequest):
            answer(core, call(core, 1, [nonsense]))
    with pytest.raises(BadRequest):
        answer(core, call(core, 99, [0]))


def test_lanes_are_for_workers_whose_experts_stay(folder: Path) -> None:
    """A lane's owners are said when it is made."""
    assert kind_of(Loader(settings(folder)).core()) == "host"
    assert kind_of(placed(folder)) == ""


def test_places_are_bounded(folder: Path) -> None:
    experts, spec = experts_of(placed(folder)), ModelSpec.load(folder)
    for expert in range(spec.num_experts):
        experts.put(spec.moe_layers[0], expert)
    before = experts.weight_bytes
    while experts.room:
        experts.put(spec.moe_layers[1], experts.room)
    with pytest.raises(ValueError, match="no place"):
        experts.put(spec.moe_layers[1], 0)
    assert experts.weight_bytes == before, "allocated at start"
    with pytest.raises(ConfigError, match="--slots"):
        placed(folder, slots="1")


def hint(layer: int, *experts: int, step: int = 1) -> ExpertHint:
    return ExpertHint(step, 0, layer, 0, np.array(experts, dtype=np.int32), np.full(len(experts), 0.9, np.float32), 10**11)


def test_nothing_is_copied_for_an_expert_that_left(folder: Path) -> None:
    """The copier is held up at the first of three wishes; the other two experts leave meanwhile, and so does the first."""
    experts = experts_of(placed(folder, slots="3"))
    for expert in range(4):
        experts.put(1, expert)
    residency, go, started = experts.residency, threading.Event(), threading.Event()
    assert residency is not None
    copied: list[int] = []
    right = residency.start_copy

    def slowly(slot: int, number: int) -> Callable[[], None]:
        copied.append(number)
        started.set()
        go.wait(60)
        return right(slot, number)

    residency.start_copy = slowly
    assert experts.hint(hint(1, 0, 1, 2), "r")
    assert started.wait(60)
    experts.drop(1, 1)
    experts.drop(1, 2)
    leaving = threading.Thread(target=experts.drop, args=(1, 0))
    leaving.start()
    assert not experts.hint(hint(1, 1, step=2), "r"), "it is not here"
    time.sleep(0.05)
    assert leaving.is_alive(), "its bytes are being read"
    go.set()
    leaving.join(60)
    assert not leaving.is_alive()
    assert experts.hint(hint(1, 3, step=3), "r")
    until(lambda: experts.resident(1) == [3])
    assert [experts.members[number] for number in copied] == [(1, 0), (1, 3)]


def test_a_hint_that_was_read_before_its_expert_left_is_of_no_effect(folder: Path) -> None:
    experts = experts_of(placed(folder, slots="3"))
    experts.put(1, 0)
    residency, late = experts.residency, hint(1, 0)
    assert residency is not None
    number = int(experts._number[experts.layers[1], 1])
    experts.drop(1, 0)
    assert not residency.hint(("r", 1, experts.layers[1]), [number], late)
    experts.put(1, 0)
    assert residency.hint(("r", 1, experts.layers[1]), [number], late)


def test_a_wish_for_an_expert_that_left_never_reads_what_lies_in_its_place(folder: Path) -> None:
    """Hints race with experts that come and go through one place; then what the slots hold is compared with a fixed worker."""
    core, whole = placed(folder, slots="3"), Loader(settings(folder)).core()
    experts, stop = experts_of(core), threading.Event()

    def pester() -> None:
        step = 0
        while not stop.is_set():
            step += 1
            for expert in range(4):
                experts.hint(hint(1, expert, step=step), "r")

    thread = threading.Thread(target=pester)
    thread.start()
    try:
        for turn in range(20):
            expert = turn % 4
            experts.put(1, expert)
            asked = call(core, 1, [expert], seed=turn)
            assert torch.equal(answer(core, asked), answer(whole, asked))
            with core.turn:
                experts.drop(1, expert)
            assert expert not in experts.resident(1)
    finally:
        stop.set()
        thread.join()


@pytest.fixture
def core(folder: Path) -> Core:
    return placed(folder)


@pytest.fixture
def placer(core: Core) -> Iterator[Placer]:
    placer = Placer(core)
    yield placer
    placer.close()


def test_a_placed_worker_follows_commands(core: Core, placer: Placer) -> None:
    assert (core.info.layers, core.info.capacity, core.info.generation) == ({}, PLACES, 0)
    placer.command(3, "a", [(1, 1), (1, 2), (0, 5)])
    until(lambda: core.info.layers == {0: (5,), 1: (1, 2)})
    generation = core.info.generation
    assert placer.command(3, "a", [(1, 1), (1, 2), (0, 5)]) == 0, "the same command again changes nothing"
    with pytest.raises(StaleEpoch):
        placer.command(2, "b", [(0, 0)])
    placer.command(4, "b", [(1, 2), (1, 3)])
    until(lambda: core.info.layers == {1: (2, 3)})
    assert core.info.generation > generation
    answer(core, call(core, 1, [2, 3]))
    placer.command(4, "b", [])
    until(lambda: core.info.layers == {} and placer.unloaded == 4)
    assert placer.loaded == 4


def test_what_is_withdrawn_is_served_until_every_router_goes_by_the_newer_table(
    core: Core, placer: Placer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(retiring, "SILENT_S", 60.0)  # one that asks is never taken for silent
    placer.command(1, "a", [(1, 1), (1, 2)])
    until(lambda: core.info.layers == {1: (1, 2)})
    known = core.info.generation
    stop = threading.Event()

    def ask() -> None:
        while not stop.wait(0.05):
            placer.acknowledge("behind", known)
            placer.acknowledge("ahead", core.info.generation)

    thread = threading.Thread(target=ask)
    thread.start()
    try:
        placer.command(1, "a", [(1, 2)])
        until(lambda: core.info.layers == {1: (2,)})
        time.sleep(1.5)
        answer(core, call(core, 1, [1, 2]))
        assert placer.unloaded == 0, "a router still goes by the older table"
        known = core.info.generation
        until(lambda: placer.unloaded == 1)
    finally:
        stop.set()
        thread.join()
    with pytest.raises(Moved):
        answer(core, call(core, 1, [1, 2]))


def test_one_that_is_wanted_again_stays(core: Core, placer: Placer) -> None:
    placer.command(1, "a", [(1, 1)])
    until(lambda: core.info.layers == {1: (1,)})
    placer.command(1, "a", [])
    until(lambda: core.info.layers == {})
    placer.command(1, "a", [(1, 1)])
    until(lambda: core.info.layers == {1: (1,)})
    time.sleep(1.3)
    assert (placer.loaded, placer.unloaded) == (1, 0)
    answer(core, call(core, 1, [1]))


def test_a_full_worker_makes_room_first(core: Core, placer: Placer) -> None:
    spec_experts = [(1, expert) for expert in range(8)] + [(0, expert) for expert in range(4)]
    placer.command(1, "a", spec_experts)
    until(lambda: placer.loaded == PLACES)
    placer.command(1, "a", [*spec_experts[1:], (0, 7)])
    until(lambda: core.info.layers.get(0) == (0, 1, 2, 3, 7))
    assert (placer.loaded, placer.unloaded) == (PLACES + 1, 1)
    answer(core, call(core, 0, [7]))


def test_an_expert_that_cannot_be_read_is_tried_again(core: Core, placer: Placer, monkeypatch: pytest.MonkeyPatch) -> None:
    experts = experts_of(core)
    assert experts.shelf is not None
    right, experts.shelf._fill = experts.shelf._fill, broken
    monkeypatch.setattr("expert_worker.placer.RETRY_S", 0.1)
    placer.command(1, "a", [(1, 1)])
    time.sleep(0.3)
    assert core.info.layers == {}
    experts.shelf._fill = right
    until(lambda: core.info.layers == {1: (1,)})


def broken(place: int, number: int) -> None:
    raise OSError("a disk that fails")


def test_commands_that_cannot_be_followed_are_refused(placer: Placer) -> None:
    with pytest.raises(BadRequest, match="12 at most"):
        placer.command(1, "a", [(1, expert) for expert in range(13)])
    with pytest.raises(BadRequest, match="no expert 10000 of layer 1"):
        placer.command(1, "a", [(1, 10_000)])
    with pytest.raises(BadRequest, match="of layer 99"):
        placer.command(1, "a", [(99, 0)])
