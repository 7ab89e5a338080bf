"""Steps over lanes that are launched ahead of the host: a lane that breaks under one while the next is on its way."""

from __future__ import annotations

import random
import threading
import time
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import torch

from forefetch import shm
from forefetch.errors import Cancelled, DeadlineExceeded, LinkDown
from forefetch.kernels.gate import choose
from forefetch.kernels.kv_codec import KvFormat
from forefetch.p2p.host import HostLanes, HostPort
from forefetch.p2p.lane import LaneShape, Step, behind
from forefetch.shm import Bell
from router_service import p2p
from router_service.admission import SamplingParams
from router_service.p2p import LaneTrunk
from router_service.p2p_decoder import LaneExperts, step_shape
from router_service.scheduler import Chunk, Plan, Request
from router_service.workers import LaneCounts
from tests.router_service.test_captured import Spy
from tests.router_service.test_captured_sealed import LANES
from tests.router_service.test_flight import SealedEngine, put, run_long, told

pytestmark = pytest.mark.skipif(bool(shm.unsupported()), reason=shm.unsupported())

PATIENCE_S = 0.1
FORMAT = KvFormat("e2m0", head_dim=16, page=32, sinks=2, recent=8)
BARE = KvFormat("e2m0", head_dim=16, page=32, sinks=2, recent=0)
FOREVER = 1 << 30
WAYS = [pytest.param(FORMAT, False, id="silent"), pytest.param(BARE, True, id="gone, and no window")]


class Port(HostPort):
    """A lane on whose router it does not count how long a worker is without a core: patience begins when it is `silent`."""

    silent, vain = False, 0

    def wait(self, bell: Bell, wanted: int, patience_s: float, spin_ns: int = 0) -> None:
        if bell is self.segment.reply_bell:
            while behind(seen := bell.value, wanted) and not (self.down or self.silent):
                bell.wait(seen, 0)
            self.vain += self.silent
        super().wait(bell, wanted, patience_s, spin_ns)


class Worker(threading.Thread):
    """The other side of a lane. It answers `calls` calls; then it is silent, or `leaves` and says so."""

    def __init__(self, rig: LanesRig, port: Port, calls: int, leaves: bool) -> None:
        super().__init__(daemon=True)
        self.port, self.down, self.announced = port, "", deque[Step]()
        self._rig, self._calls, self._leaves = rig, calls, leaves
        self.on_down: Any = lambda reason: None
        self._said = threading.Semaphore(0)
        self.start()

    def announce(self, step: Step, number: int) -> None:
        self.announced.append(step)
        self._said.release()

    def run(self) -> None:
        try:
            number = 0
            while self._said.acquire() and not self.down:
                step = self.announced.popleft()
                for place, (first, count) in ((place, cut) for place in range(self.port.shape.layers) for cut in step.cuts()):
                    number += 1
                    self.port.wait(self.port.segment.request_bell, number, 60.0)
                    if number > self._calls:
                        return self._end()
                    rows = slice(first, first + count)
                    where = self.port.x[rows], self.port.ids[place, rows].long(), self.port.weights[rows]
                    self.port.results[rows] = self._rig.resident.run(place, *where)
                    self.port.segment.reply_bell.ring(number)
        except LinkDown:
            return  # it was closed

    def _end(self) -> None:
        if self._leaves:
            self.down = "it was killed"
            self.on_down(self.down)
        self.port.silent = True
        self.port.segment.reply_bell.nudge()

    def close(self) -> None:
        self.down = self.down or "closed"
        self.port.abort(self.down)
        self._said.release()


@dataclass
class Opener:
    """Lanes whenever they are wanted; `lives`: how many calls coming ones answer, and whether they leave then."""

    rig: LanesRig
    lives: Iterator[tuple[int, bool]]

    def want(self, links: tuple[Any, ...]) -> None:
        """See router_service.p2p."""

    def take(self, links: tuple[Any, ...]) -> list[Worker]:
        return [Worker(self.rig, self.rig.port(), *next(self.lives))]


class LanesRig(SealedEngine):
    """The engine over lanes to one worker, pages sealed under way."""

    def __init__(self, lives: Iterator[tuple[int, bool]], format: KvFormat = FORMAT) -> None:
        super().__init__(format, torch.device("cpu"), ahead=True)
        self.buffers.chunk_rows = ()  # as over every lane with sealed pages (build.buffers)
        trunk, spec = self.model.trunk, self.model.trunk.spec
        self.shape = LaneShape(LANES, spec.hidden_size, spec.top_k, len(spec.moe_layers), 4)
        self.lanes = HostLanes(partial(choose, top_k=spec.top_k, rule=spec.gate_rule, renormalise=spec.renormalise), PATIENCE_S)
        row = SimpleNamespace(link=object(), address="w0:1", index=0, copies=False)
        self.table: Any = SimpleNamespace(rows=[row], owners=np.zeros((1, spec.layers, spec.num_experts)), lanes=LaneCounts())
        experts = LaneExperts(spec, self.lanes, LANES, torch.float32, torch.device("cpu"))
        opener: Any = Opener(self, lives)
        shape_of = partial(step_shape, halves_from=4)
        self.over = LaneTrunk(trunk, experts, self.buffers, self.lanes, self.table, opener, shape_of, Spy())
        self.over.warm_up()
        self.resident, dispatch = self.experts._resident, cast(Any, self.experts)
        dispatch.begin = dispatch.commit = lambda: None
        self.rig.engine.parts.trunk, self.rig.engine.parts.dispatch = self.over, dispatch

    def port(self) -> Port:
        segment = shm.Segment.create(self.shape.inbox_bytes, self.shape.outbox_bytes)
        segment.unlink()
        return Port(segment, self.shape, torch.float32)

    def ends_clean(self) -> None:
        assert self.scheduler.pool.used == 0
        assert sorted(self.scheduler._lanes) == list(range(LANES))
        assert not self.rig.engine._flights


def test_rows_behind_a_bad_verdict_are_as_idle_as_padding() -> None:
    """Also where a cached prefix says that so many pages are sealed."""
    rig = LanesRig(iter(()))
    put(rig.rig, "a", tuple(range(40)), 40, SamplingParams())
    (request,) = rig.scheduler.admit(0.0)
    request.computed, request.loaded_blocks = 39, 1
    batch = rig.buffers.fill(0, Plan((Chunk(request, 39, 1),), ()))
    rig.lanes.verdict.fill_(1)
    rig.over._decoder.forward(batch)
    idle = rig.buffers.idle(1, 0)
    assert batch.paged is not None
    assert idle.paged is not None
    assert batch.held is not None
    assert torch.equal(batch.slots, idle.slots)
    assert torch.equal(batch.paged.lengths, idle.paged.lengths)
    assert torch.equal(batch.held, torch.zeros_like(batch.held))
    assert kept(rig)[1].isnan().all()


@pytest.fixture(autouse=True)
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """A lane that broke is followed by the next without a pause."""
    monkeypatch.setattr(p2p, "FIRST_PAUSE_S", 0.0)
    monkeypatch.setattr(p2p, "LAST_PAUSE_S", 0.0)


@pytest.mark.parametrize(("format", "leaves"), WAYS)
def test_answers_over_lanes_that_break_are_those_of_one_device(format: KvFormat, leaves: bool) -> None:
    """Stop tokens, draws and sealed pages among steps of which every fifth or so breaks, at any call."""
    draw = random.Random(f"{format} {leaves}")
    rig = LanesRig(((draw.randrange(1, 24), leaves) for _ in iter(int, 1)), format)
    assert rig.answers(3) == SealedEngine(format, torch.device("cpu"), ahead=False).answers(3)
    counts = rig.table.lanes
    assert counts.breaks >= 8
    assert counts.steps >= 40
    rig.ends_clean()


def kept(rig: LanesRig) -> list[torch.Tensor]:
    """All that requests have: every page but the scratch one, every lane but the idle one."""
    cache = rig.cache
    return [cache.pages[:, :, 1:].clone(), cache.tails[:, :, :, :LANES].clone(), cache.sinks[:, :, :, :LANES].clone()]


@pytest.mark.parametrize(("format", "leaves"), WAYS)
def test_what_is_launched_behind_a_break_leaves_no_trace(format: KvFormat, leaves: bool) -> None:
    """The broken step is one that seals a page; it may write its own place of the tail, and nobody else anything."""
    answers = []
    for breaks in (False, True):
        rig = LanesRig(iter([(FOREVER, leaves)] * 3), format)
        put(rig.rig, "a", tuple(range(20)), 40, SamplingParams())
        request, engine = rig.scheduler.waiting[0], rig.rig.engine
        while breaks and request.computed + 1 - format.recent < format.page:
            engine.step()
        if breaks:
            assert [flight.ahead for flight in engine._flights] == [True]
            breaks_under_a_seal(rig, request)
        run_long(rig.rig)
        answers.append(told(rig.rig, "a"))
        rig.ends_clean()
    assert answers[0] == answers[1]
    assert len(answers[0]) == 40


def breaks_under_a_seal(rig: LanesRig, request: Request) -> None:
    """The next step's second call is not answered."""
    engine, position = rig.rig.engine, request.computed
    (worker,) = rig.over._attached
    worker._calls = int(worker.port.segment.reply_bell.value) + 1  # type: ignore[attr-defined]
    before = kept(rig)
    engine.step()
    assert (request.computed, request.in_flight, request.owed) == (position + 1, 1, 1)
    assert engine._flights[0].ahead
    seen = len(told(rig.rig, "a"))
    engine.step()  # commits the lost step, launches the next, and learns that the first was lost
    assert worker.port.vain <= 1, "what follows does not wait again"  # type: ignore[attr-defined]
    assert not engine._flights
    assert len(told(rig.rig, "a")) == seen
    assert (request.computed, request.in_flight, request.owed, request.replayed_steps) == (position, 0, 0, 2)
    pages, tails, sinks = kept(rig)
    assert torch.equal(pages, before[0])
    assert torch.equal(sinks.view(torch.int16), before[2].view(torch.int16))
    changed = (tails.view(torch.int16) != before[1].view(torch.int16)).nonzero()
    assert {(int(lane), int(place)) for lane, place in changed[:, 3:5]} <= {(request.lane, position)}
    assert not rig.over._attached
    assert rig.table.lanes.breaks == 1


def test_requests_that_end_while_a_lane_breaks() -> None:
    """Cancelled or past their deadlines while lanes break: each a prefix of its answer, and one end."""
    draw = random.Random(5)
    rig = LanesRig((draw.randrange(1, 30), draw.random() < 0.5) for _ in iter(int, 1))
    plain = SealedEngine(FORMAT, torch.device("cpu"), ahead=False)
    for engine in (rig, plain):
        for n in range(6):
            put(engine.rig, f"r{n}", tuple(range(n, n + 12 + 9 * n)), 60, SamplingParams())
    run_long(plain.rig)
    ends = {9: 0, 23: 3, 40: 1, 57: 4}
    requests = {name: request for request, stream in rig.rig.engine._streams.open.items() for name in (stream.sink,)}
    step = 0
    while rig.rig.engine.step():
        step += 1
        if (n := ends.get(step)) is not None and (request := requests[f"r{n}"]) in rig.rig.engine._streams:
            if n % 2:
                request.deadline = time.monotonic()
            else:
                rig.rig.engine.cancel(request)
    for n in range(6):
        expected, got, end = told(plain.rig, f"r{n}"), told(rig.rig, f"r{n}"), rig.rig.events[f"r{n}"][-1]
        assert got == expected[: len(got)]
        assert len(got) == 60 or isinstance(end, DeadlineExceeded if n % 2 else Cancelled)
    assert sum(len(told(rig.rig, f"r{n}")) < 60 for n in range(6)) >= 3
    assert rig.table.lanes.breaks >= 5
    rig.ends_clean()


def test_a_step_over_other_links_waits_for_the_verdict_of_the_one_in_flight() -> None:
    """A prompt over sealed pages fits no layout. What it would be computed beside was lost: it is not even begun."""
    rig = LanesRig(iter([(FOREVER, False)] * 3))
    put(rig.rig, "a", tuple(range(20)), 30, SamplingParams())
    engine = rig.rig.engine
    for _ in range(6):
        engine.step()
    (worker,) = rig.over._attached
    worker._calls = 0  # type: ignore[attr-defined]
    engine.step()
    eager, forward = list[int](), rig.over.trunk.forward
    rig.over.trunk.forward = lambda batch, *rest: (eager.append(batch.step), forward(batch, *rest))[1]  # type: ignore[method-assign]
    put(rig.rig, "b", tuple(range(9)), 20, SamplingParams())
    engine.step()
    assert not engine._flights
    assert eager == []
    engine.step()
    assert len(eager) == 1
    run_long(rig.rig)
    plain = SealedEngine(FORMAT, torch.device("cpu"), ahead=False)
    put(plain.rig, "a", tuple(range(20)), 30, SamplingParams())
    put(plain.rig, "b", tuple(range(9)), 20, SamplingParams())
    run_long(plain.rig)
    assert [told(rig.rig, name) for name in "ab"] == [told(plain.rig, name) for name in "ab"]
    rig.ends_clean()
