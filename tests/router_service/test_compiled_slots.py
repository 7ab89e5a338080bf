"""Compiled steps with fewer slots than experts: the bits of all resident, whoever copies and however slowly; true counts."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from reference_model import CASES
from torch import Tensor
from trunk_rig import Rig

from expert_worker import client as expert
from expert_worker.client import ExpertConfig
from forefetch.kernels import compiled
from forefetch.spec import ModelSpec
from forefetch.telemetry.ring import HINT_COUNTS, VERIFIED
from router_service.dispatch import Dispatch
from router_service.hints import Hints
from router_service.lookahead.estimate import Estimator
from router_service.lookahead.foresight import Foresight
from router_service.lookahead.heads import Lookahead
from router_service.workers import Workers

pytestmark = pytest.mark.skipif(not compiled.available(), reason="Numba is not installed")
if compiled.available():
    from forefetch.kernels.compiled import ahead, between, copier, step, visit
    from forefetch.kernels.compiled.toolchain import entry
    from router_service.compiled import CompiledTrunk, Local

    begin, finish, pending = entry(copier.begin), entry(copier.finish), entry(copier.pending)
    help_expecting, help_naming = entry(between.help_expecting), entry(ahead.help_naming)
    exchange, sort = entry(between.exchange), entry(between.sort)

PROMPTS = (3, 17, 8, 9, 23)
TOKENS = 8
OVER = threading.Event()


class SlotRig(Rig):
    """A Rig with a local worker whose slots are poisoned, and heads that are later layers' own gates."""

    def __init__(
        self, folder: Path, slots: str, experts: str = "stored", hints: str = "plain", foresight: bool = False
    ) -> None:
        super().__init__(folder)
        self.foresight = foresight
        self.named = False  # in a compiled step
        config = ExpertConfig(model=str(folder), device="cpu", slots=slots, experts=experts)
        self.workers = Workers(self.spec, ["local"], lambda _address: expert.local(config))
        self.workers.wait_complete(240.0)  # it may compile first
        self.core = self.workers.rows[0].link.core  # type: ignore[union-attr]
        self.residency = self.core.experts.residency
        if self.residency is not None:
            self.core.experts.pool.memory.fill_(255)
        dispatch = Dispatch(self.workers, 5.0)
        self.experts = dispatch
        if hints != "off":
            heads = Lookahead(self.trunk, Estimator(self.trunk, {}), {}, _some_foresight(self.spec) if foresight else None)
            self.hints = Hints(heads, dispatch, setting=hints, trained=False)
        whole = expert.whole_of(self.workers.rows[0].link)
        assert whole is not None
        self.whole = whole
        self.compiled = CompiledTrunk(self.trunk, 8, self.workers, Local(self.workers.rows[0], whole), hints=self.hints)
        self.trunk = self.compiled  # type: ignore[assignment]
        self.compiled.warm_up(observed=False)

    def answers(self) -> list[Tensor]:
        """Logits of all steps of several streams, the last of which comes later."""
        prompt = CASES["qwen3"].prompt
        for length in PROMPTS[:-1]:
            self.add(prompt[:length], max_tokens=TOKENS)
        found = []
        for step in range(2 * TOKENS):
            if step == TOKENS // 2:
                self.add(prompt[: PROMPTS[-1]], max_tokens=TOKENS)
            self.compiled._ahead.heads.pace[:] = 1e12  # so short a layer leaves no time for a copy
            logits = self.step()
            if logits is None:
                break
            found.append(logits.clone())
            if self.foresight:
                time.sleep(0.001)  # or a step takes back what nobody has begun
            else:
                self.check()
        self.compiled._still()
        self.check()
        return found

    def check(self) -> None:
        """Between two steps nothing is on its way or held, and the table is sound."""
        if self.residency is None:
            return
        self.named |= bool(self.compiled._moving.counts[:, visit.NAMED].any())  # type: ignore[union-attr]
        with self.residency.still():
            jobs, table = self.compiled._moving.jobs, self.residency.slots.table  # type: ignore[union-attr]
            assert not jobs.word.any()
            assert pending(jobs) == 0
            assert not table.pins.any()
            assert np.array_equal(table.ready, table.expert_in >= 0)
            for number, slot in enumerate(table.slot_of):
                assert slot < 0 or table.expert_in[slot] == number


def _some_foresight(spec: ModelSpec) -> Foresight:
    """Names some experts of every layer, rightly or not, whatever the token."""
    draw, outputs = torch.Generator().manual_seed(5), len(spec.moe_layers) * spec.num_experts
    return Foresight(torch.randn(2 * spec.hidden_size, outputs, generator=draw) / 20, torch.full((outputs,), 0.4), 0.0)


@pytest.fixture(scope="module")
def folder(checkpoint: Callable[[str], Path]) -> Path:
    return checkpoint("qwen3")


@pytest.fixture(scope="module")
def resident(folder: Path) -> dict[str, list[Tensor]]:
    return {kind: SlotRig(folder, "100%", kind, "off").answers() for kind in ("stored", "int8", "int4")}


def _slow(board: np.ndarray, number: int, model: Any, buffers: Any, experts: Any, moving: Any, heads: Any, seen: Any) -> None:
    """A helper that only names and copies, and takes its time."""
    draw, jobs = random.Random(number), moving.jobs
    while not OVER.is_set():
        help_naming(model, heads, moving, experts, buffers.order)
        help_expecting(board, model, seen, moving, experts, buffers.order)
        for at in range(len(jobs.word)):
            if jobs.word[at] == copier.QUEUED:
                time.sleep(draw.random() * 0.0005)
                if begin(jobs, at):
                    time.sleep(draw.random() * 0.002)
                    finish(jobs, moving.copies, at)
        time.sleep(0.0001)


def _never(*_: Any) -> None:
    """A helper that never comes."""


@pytest.fixture(params=["a helper", "a helper that never comes", "a slow helper"])
def copying(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Who copies what is named."""
    monkeypatch.setattr("router_service.compiled.helpers", lambda _spare: 1)
    if request.param != "a helper":
        monkeypatch.setattr(step, "assist", _never if "never" in request.param else _slow)
    OVER.clear()
    yield str(request.param)
    OVER.set()


@pytest.mark.parametrize("kind", ["stored", "int8", "int4"])
def test_slots_and_copies_change_no_bit(kind: str, copying: str, folder: Path, resident: dict[str, list[Tensor]]) -> None:
    for slots in ("8", "25%", "50%", "90%"):
        rig = SlotRig(folder, slots, kind)
        found = rig.answers()
        assert len(found) == len(resident[kind])
        for one, other in zip(found, resident[kind], strict=True):
            assert torch.equal(one, other), slots
        assert rig.core.verified.copied_bytes == rig.core.experts.copied.bytes > 0


def test_foresight_changes_no_bit(copying: str, folder: Path, resident: dict[str, list[Tensor]]) -> None:
    for slots in ("8", "50%"):
        rig = SlotRig(folder, slots, "int8", foresight=True)
        found = rig.answers()
        assert len(found) == len(resident["int8"])
        for one, other in zip(found, resident["int8"], strict=True):
            assert torch.equal(one, other), slots
        assert not rig.residency.lent  # type: ignore[union-attr]
        assert not rig.compiled._moving.hinted.any()  # type: ignore[union-attr]


def test_foresight_brings_what_is_worth_most_in_place_of_what_is_worth_least(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(step, "assist", _never)
    monkeypatch.setattr("router_service.compiled.helpers", lambda _spare: 1)
    rig = SlotRig(folder, "50%", foresight=True)
    rig.answers()
    seen, moving = rig.compiled._between.seen, rig.compiled._moving
    assert moving is not None
    table, worth, usual, exchanged = moving.table, seen.worth, moving.table.gap.copy(), 0
    assert rig.whole.lend()
    worth[:] = np.random.default_rng(3).random(len(worth)) * (1 + between.USUAL)
    sort(worth, seen.order)
    seen.task[[between.LIKELY, between.UNLIKELY]] = len(worth), 0
    table.gap[:] = 0.0
    while True:
        before = table.slot_of.copy()
        if not exchange(seen, moving):
            break
        (comes,), (goes,) = (
            np.flatnonzero((before < 0) & (table.slot_of >= 0)),
            np.flatnonzero((before >= 0) & (table.slot_of < 0)),
        )
        bucket = (1 + between.USUAL) / between.BUCKETS
        assert worth[comes] > worth[before < 0].max() - bucket
        assert worth[comes] - worth[goes] >= between.GAIN
        exchanged += 1
    assert exchanged > 1
    seen.task[between.WORD] = copier.QUEUED
    moving.jobs.numbers[copier.WAITING] += 1
    rig.compiled._still()
    rig.check()  # nobody had begun these copies
    assert np.array_equal(table.gap, usual)
    assert (table.expert_in < 0).sum() == exchanged


def test_foresight_is_counted_for_what_it_named(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("router_service.compiled.helpers", lambda _spare: 1)
    rig = SlotRig(folder, "50%", foresight=True)
    named = HINT_COUNTS.index("named")
    for _ in range(100):
        rig.answers()
        if rig.ring.layer_totals()[0, named] and rig.core.verified.hits:
            break  # else its helper had no core; what prompts were hinted is never the first layer's
    hits, late = rig.core.verified[:2]
    totals = dict(zip(HINT_COUNTS, rig.ring.layer_totals().sum(axis=0).tolist(), strict=False))
    assert hits > 0
    assert hits + late == totals["found"] <= totals["named"]
    assert rig.ring.layer_totals()[0, named] > 0, "the first layer is foreseen too"
    assert rig.core.verified.copied_bytes == rig.core.experts.copied.bytes > 0


def test_counts_are_true(copying: str, folder: Path) -> None:
    rig = SlotRig(folder, "50%")
    rig.answers()
    deadline = time.monotonic() + (0.0 if "never" in copying else 100.0)
    while not rig.named and time.monotonic() < deadline:
        rig.answers()  # a helper that had no core, or still compiles, comes too late
    assert rig.named == ("never" not in copying), "who never comes names nothing"
    totals = dict(zip(HINT_COUNTS, rig.ring.layer_totals().sum(axis=0).tolist(), strict=False))
    verified = rig.core.verified
    hits, late, misses, there = verified[:4]
    assert min(misses, there) > 0, "the first layer is never named, later ones are not always named rightly"
    assert hits + late == totals["found"], "what was named and chosen was there or was not"
    assert totals["refined_named"] == totals["named"] >= totals["found"]
    record = rig.ring.read(rig.steps - 1)
    assert record is not None
    counts = dict(zip(VERIFIED, record.verified[:, 0].sum(axis=0).tolist(), strict=True))
    assert counts["hits"] + counts["late"] + counts["misses"] + counts["resident"] == 2 * len(rig.spec.moe_layers)
    assert counts["copied_bytes"] % rig.core.experts.host.stride == 0
    assert rig.workers.rows[0].copies


def test_without_hints_nothing_is_named_and_auto_tries_both(
    folder: Path, monkeypatch: pytest.MonkeyPatch, resident: dict[str, list[Tensor]]
) -> None:
    monkeypatch.setattr("router_service.compiled.helpers", lambda _spare: 1)
    rig = SlotRig(folder, "50%", hints="off")
    assert all(torch.equal(one, other) for one, other in zip(rig.answers(), resident["stored"], strict=True))
    assert rig.core.verified[:2] == (0, 0)
    rig = SlotRig(folder, "50%", hints="auto")
    assert rig.hints is not None
    ways = set()
    for _ in range(20):
        rig.answers()
        ways.add(rig.hints.mode)
        if rig.core.verified.hits:
            break  # else its helper had no core
    assert rig.core.verified.hits > 0
    assert ways <= {"off", "plain"}


def test_on_one_core_nothing_is_named(folder: Path, monkeypatch: pytest.MonkeyPatch, resident: dict[str, list[Tensor]]) -> None:
    monkeypatch.setattr("router_service.compiled.helpers", lambda _spare: 0)
    rig = SlotRig(folder, "50%")
    assert all(torch.equal(one, other) for one, other in zip(rig.answers(), resident["stored"], strict=True))
    record = rig.ring.read(rig.steps - 1)
    assert record is not None
    assert not record.hints.any()
