"""The step loop with a trunk that counts: the next token is always the last one plus one."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from waiting import PATIENCE_S, until

from forefetch.errors import (
    BadRequest,
    Cancelled,
    DeadlineExceeded,
    Draining,
    ForefetchError,
    LinkDown,
    Overloaded,
    Unavailable,
)
from forefetch.settings import ServiceConfig
from forefetch.telemetry import names
from forefetch.telemetry.book import RequestBook
from forefetch.telemetry.metrics import new_registry
from forefetch.telemetry.ring import StepRing, StepStamps
from forefetch.telemetry.spans import Exporter
from router_service import engine
from router_service.admission import Admitted, SamplingParams
from router_service.answer import Answer, Delivery, FinishOut, TokenOut
from router_service.batch import StepBatch, StepBuffers
from router_service.engine import Engine
from router_service.finite import NotFinite
from router_service.flight import Parts
from router_service.outgoing import Outgoing
from router_service.pages import PagePool
from router_service.recorder import Recorder
from router_service.scheduler import Request, Scheduler

VOCAB, PAGE = 50, 4


@dataclass
class CountingTrunk:
    """Computes nothing; fails or waits where told. `broken` holds (error to raise) for coming steps."""

    broken: list[Exception] = field(default_factory=list)
    gate: threading.Event = field(default_factory=threading.Event)
    lost: set[int] = field(default_factory=set)  # steps that turn out lost when they are read
    nan_for: int = -1
    steps: int = 0
    ahead: bool = False
    cache: Any = field(default_factory=lambda: SimpleNamespace(commit=lambda batch: None))

    def forward(self, batch: StepBatch, experts: Any, stamps: StepStamps, observer: None = None) -> torch.Tensor:
        self.gate.wait(PATIENCE_S)
        self.steps += 1
        if self.broken:
            raise self.broken.pop(0)
        last = batch.token_ids[batch.logit_rows]
        logits = torch.nn.functional.one_hot((last + 1) % VOCAB, VOCAB).float()
        logits[last == self.nan_for] = float("nan")
        return logits

    def confirm(self, step: int) -> None:
        if step in self.lost:
            raise LinkDown(0, "gone meanwhile")

    def timed(self, step: int, stamps: StepStamps, began_ns: int, forwarded_ns: int, ended_ns: int) -> int:
        return ended_ns - forwarded_ns


@dataclass
class FakeWorkers:
    """A table of workers that is as complete as the test says."""

    complete: bool = True
    changed: Any = None

    def refresh(self) -> bool:
        return self.complete

    def sweep(self) -> None:
        pass

    def missing(self) -> str:
        return "worker w0:1: gone"


@dataclass
class FakeDispatch:
    """Counts steps that began and that ended well."""

    begun: int = 0
    committed: int = 0

    def begin(self) -> None:
        self.begun += 1

    def commit(self) -> None:
        self.committed += 1


@dataclass
class Rig:
    engine: Engine
    trunk: CountingTrunk
    workers: FakeWorkers
    scheduler: Scheduler
    events: dict[str, list[Any]] = field(default_factory=dict)
    ended: dict[str, threading.Event] = field(default_factory=dict)

    def submit(self, name: str, prompt: int = 3, max_tokens: int = 4, deadline: float | None = None, stop: int = -1) -> Request:
        ids = tuple(range(prompt))
        stops = frozenset({stop}) if stop >= 0 else frozenset[int]()
        request = Request(
            len(self.events),
            name,
            ids,
            Admitted(ids, max_tokens, False, SamplingParams(), (), stops, name),
            arrival=0.0,
            deadline=None if deadline is None else time.monotonic() + deadline,
        )
        self.events[name], self.ended[name] = [], threading.Event()
        self.engine.parts.recorder.arrive(request, None, names.TEXT_COMPLETION)
        self.engine.submit(Answer(request, None), name)
        return request

    def deliver(self, deliveries: list[Delivery]) -> None:
        for name, event in deliveries:
            assert not self.ended[name].is_set(), "nothing follows the end of a stream"
            self.events[name].append(event)
            if not isinstance(event, TokenOut):
                self.ended[name].set()

    def result(self, name: str) -> tuple[list[int], Any]:
        assert self.ended[name].wait(PATIENCE_S)
        tokens = [event for event in self.events[name] if isinstance(event, TokenOut)]
        assert [event.index for event in tokens] == list(range(len(tokens)))
        return [event.token_id for event in tokens], self.events[name][-1]


def make_rig(*, ahead: bool, deliver: Callable[[list[Delivery]], None] | None = None) -> Rig:
    """Its engine is not started: tests step it, or start it. `deliver`: in place of the rig's own."""
    ring = StepRing(64, 1, 1)
    registry = new_registry()
    book = RequestBook(ring, 16)
    recorder = Recorder(
        ring, book, model="m", registry=registry, exporter=Exporter(ServiceConfig(), names.SERVICE_ROUTER, book=book)
    )
    scheduler = Scheduler(PagePool(30), page_size=PAGE, max_batch=4, max_step_tokens=16, max_waiting=4)
    buffers = StepBuffers(max_tokens=16, max_batch=4, max_pages=16, page_size=PAGE, device=torch.device("cpu"), buckets=())
    trunk, workers = CountingTrunk(ahead=ahead), FakeWorkers()
    trunk.gate.set()
    made = Rig(None, trunk, workers, scheduler)  # type: ignore[arg-type]
    parts = Parts(trunk, buffers, FakeDispatch(), workers, scheduler, recorder)  # type: ignore[arg-type]
    made.engine = Engine(parts, Outgoing(deliver or made.deliver), worker_grace_s=PATIENCE_S)
    return made


@pytest.fixture(params=[False, True], ids=["in turn", "ahead"])
def rig(request: pytest.FixtureRequest) -> Iterator[Rig]:
    made = make_rig(ahead=request.param)
    made.engine.start()
    yield made
    made.trunk.gate.set()
    made.engine.stop()


def test_streams_count_up_and_end_once(rig: Rig) -> None:
    for name, prompt in (("a", 3), ("b", 9), ("c", 1)):
        rig.submit(name, prompt)
    for name, prompt in (("a", 3), ("b", 9), ("c", 1)):
        tokens, end = rig.result(name)
        assert tokens == [prompt, prompt + 1, prompt + 2, prompt + 3]
        assert isinstance(end, FinishOut)
        assert end.reason == "LENGTH"
    assert rig.scheduler.pool.used == 0


def test_a_stop_token_is_reported_and_ends_the_answer(rig: Rig) -> None:
    rig.submit("a", prompt=3, max_tokens=9, stop=5)
    tokens, end = rig.result("a")
    assert tokens == [3, 4, 5]
    assert end.reason == "STOP_TOKEN"


def test_a_replayed_step_loses_repeats_and_changes_nothing(rig: Rig) -> None:
    rig.trunk.broken = [LinkDown(0, "gone"), LinkDown(0, "gone")]
    request = rig.submit("a", prompt=3, max_tokens=4)
    assert rig.result("a")[0] == [3, 4, 5, 6]
    assert request.replayed_steps == 2
    dispatch: Any = rig.engine.parts.dispatch
    assert (dispatch.begun, dispatch.committed) == (6, 4), "pairs of steps that broke off are not counted"


def test_a_defect_ends_its_requests_and_the_engine_goes_on(rig: Rig, caplog: pytest.LogCaptureFixture) -> None:
    rig.trunk.broken = [RuntimeError("/secret/path")]
    rig.submit("a")
    _, end = rig.result("a")
    assert type(end) is ForefetchError
    assert "secret" not in str(end)
    rig.submit("b")
    assert rig.result("b")[0] == [3, 4, 5, 6]


def test_what_a_worker_says_of_a_frame_is_no_fault_of_the_caller(rig: Rig) -> None:
    rig.trunk.broken = [BadRequest("rows", "exceed the limit")]
    rig.submit("a")
    _, end = rig.result("a")
    assert (type(end), str(end)) == (ForefetchError, "internal error")


def test_who_waits_for_pages_that_a_hand_over_pins_is_looked_after(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine, "IDLE_WAIT_S", 60.0)
    pages = rig.scheduler.pool.allocate(29)
    assert pages is not None
    rig.submit("a")
    time.sleep(1.0)  # whoever looks once, and then when it is idle, has looked
    assert rig.scheduler.waiting
    rig.scheduler.pool.release(pages)  # nobody is woken up by it
    assert rig.result("a")[0] == [3, 4, 5, 6]


def test_bad_logits_end_one_request_only(rig: Rig) -> None:
    rig.trunk.nan_for = 4  # "a" reaches it, "b" does not
    rig.submit("a", prompt=3)
    rig.submit("b", prompt=9)
    tokens, end = rig.result("a")
    assert tokens == [3, 4]
    assert "logits" in str(end)
    assert rig.result("b")[0] == [9, 10, 11, 12]
    assert rig.scheduler.pool.used == 0


def test_a_prompt_whose_rows_are_no_numbers_ends_alone_and_leaves_nothing(rig: Rig) -> None:
    rig.trunk.gate.clear()
    rig.submit("a", prompt=3)
    rig.submit("b", prompt=9)
    rig.trunk.broken = [NotFinite([0])]
    rig.trunk.gate.set()
    assert "logits" in str(rig.result("a")[1])
    assert rig.result("b")[0] == [9, 10, 11, 12]
    until(lambda: rig.scheduler.pool.used == 0)


def test_no_step_works_on_a_cancelled_request(rig: Rig) -> None:
    rig.trunk.gate.clear()
    request = rig.submit("a", max_tokens=40)
    until(lambda: rig.scheduler.running)
    rig.engine.cancel(request)
    rig.trunk.gate.set()
    tokens, end = rig.result("a")
    assert isinstance(end, Cancelled)
    assert len(tokens) <= 1  # the step that was running when it was cancelled
    assert rig.trunk.steps <= 1
    until(lambda: rig.scheduler.pool.used == 0)  # the step that was running has landed


def test_a_deadline_ends_a_running_and_a_waiting_request(rig: Rig) -> None:
    rig.workers.complete = False  # nothing can run, but time goes on
    rig.submit("a", deadline=0.05)
    assert isinstance(rig.result("a")[1], DeadlineExceeded)


def test_a_missing_worker_pauses_streams_then_ends_them_with_the_reason(rig: Rig) -> None:
    rig.workers.complete = False
    rig.submit("a")
    rig.submit("b")
    time.sleep(0.1)
    rig.workers.complete = True
    assert rig.result("a")[0] == rig.result("b")[0] == [3, 4, 5, 6]
    rig.workers.complete = False
    rig.engine.worker_grace_s = 0.3
    rig.submit("c")
    assert isinstance(rig.result("c")[1], Unavailable)
    assert "w0:1" in str(rig.result("c")[1])
    with pytest.raises(Unavailable):  # refused at once from now on
        rig.submit("d")


def test_a_full_queue_refuses_and_running_streams_go_on(rig: Rig) -> None:
    rig.trunk.gate.clear()
    accepted = [f"r{i}" for i in range(8)]
    for name in accepted[:4]:
        rig.submit(name)
    until(lambda: len(rig.scheduler.running) == 4 or rig.scheduler.running)
    with pytest.raises(Overloaded):  # noqa: PT012
        for name in (*accepted[4:], *(f"x{i}" for i in range(8))):
            rig.submit(name)
    rig.trunk.gate.set()
    for name in accepted[:4]:
        assert rig.result(name)[0] == [3, 4, 5, 6]


def test_draining_finishes_what_runs_and_refuses_the_rest(rig: Rig) -> None:
    rig.trunk.gate.clear()
    rig.submit("a")
    rig.engine.drain()
    with pytest.raises(Draining):
        rig.submit("b")
    rig.trunk.gate.set()
    assert rig.result("a")[0] == [3, 4, 5, 6]
    until(lambda: not rig.engine.busy)


def test_stopping_ends_unfinished_streams(rig: Rig) -> None:
    rig.workers.complete = False
    rig.submit("a")
    rig.engine.stop()
    assert isinstance(rig.result("a")[1], Draining)
