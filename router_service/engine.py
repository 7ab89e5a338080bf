"""The step loop: schedule -> run -> sample -> publish, on one thread.

Every change of a request's state happens on this thread; the API's side submits, cancels and receives. A step is all or
nothing: when a worker is lost half-way, nothing was committed and the same tokens are planned again.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from time import monotonic, perf_counter_ns
from typing import Any

from forefetch.errors import Draining, ForefetchError, LinkDown, Unavailable
from forefetch.telemetry.ring import StepStamps, Timings
from router_service.answer import Answer, FinishOut, TokenOut
from router_service.batch import StepBuffers
from router_service.dispatch import Dispatch
from router_service.hints import Hints
from router_service.kv import KvSide
from router_service.recorder import Recorder
from router_service.sampling import Sampled, sample
from router_service.scheduler import Plan, Request, Scheduler
from router_service.trunk import Model
from router_service.workers import Workers

log = logging.getLogger("forefetch.router")

Event = TokenOut | FinishOut | ForefetchError
Delivery = tuple[Any, Event]  # the sink of a request, and what happened
IDLE_WAIT_S = 0.5  # idle: how long until deadlines of waiting requests are looked at again
STALL_WAIT_S = 0.02  # a worker is missing: how long until the table is looked at again


@dataclass
class Parts:
    """What the engine drives."""

    trunk: Model
    buffers: StepBuffers
    dispatch: Dispatch
    workers: Workers
    scheduler: Scheduler
    recorder: Recorder
    kv: KvSide | None = None
    hints: Hints | None = None


@dataclass
class _Stream:
    """An unfinished request and where its events go."""

    answer: Answer
    sink: Any


@dataclass
class Engine:
    """`deliver` hands a step's events to the streams; it is called from the engine's thread and must not block."""

    parts: Parts
    deliver: Callable[[list[Delivery]], None]
    worker_grace_s: float
    _streams: dict[Request, _Stream] = field(default_factory=dict)
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _wake: threading.Event = field(default_factory=threading.Event)
    _stopping: bool = False
    _draining: bool = False
    _missing_since: float | None = None
    _step: int = 0
    _broken: int = 0
    _thread: threading.Thread | None = None

    # ---- the API's side: any thread ----

    def start(self) -> None:
        """Starts the thread."""
        self.parts.workers.changed = self._wake.set
        if self.parts.kv:
            self.parts.kv.on_change(self._wake.set)
        self._thread = threading.Thread(target=self._loop, name="engine", daemon=True)
        self._thread.start()

    def submit(self, answer: Answer, sink: Any) -> None:
        """Queues a request. Overloaded when the queue is full, Draining or Unavailable when it could not be served."""
        with self._lock:
            if self._draining:
                raise Draining("the router is shutting down")
            if self._missing_since is not None and monotonic() - self._missing_since > self.worker_grace_s:
                raise Unavailable(self.parts.workers.missing())
            self.parts.scheduler.submit(answer.request)
            self._streams[answer.request] = _Stream(answer, sink)
        self._wake.set()

    def cancel(self, request: Request) -> None:
        """The caller went away: the request leaves the batch before the next step."""
        request.cancelled = True
        self._wake.set()

    def fail(self, request: Request, error: ForefetchError) -> None:
        """The request may not go on: it ends in `error` before the next step. No effect on one that has ended."""
        request.error = error
        self._wake.set()

    def drain(self) -> None:
        """Refuses new requests from now on; running and waiting ones go on."""
        with self._lock:
            self._draining = True

    @property
    def busy(self) -> bool:
        """Whether any request is unfinished."""
        return bool(self._streams)

    @property
    def progress(self) -> int:
        """A number that moves with every step, run or broken off."""
        return self._step + self._broken

    @property
    def ready(self) -> bool:
        """Whether a request that came now would be taken and could begin."""
        return not self._draining and self._missing_since is None and self.parts.workers.complete

    @property
    def working(self) -> bool:
        """Requests are in the batch and their workers are there: steps must follow one another."""
        return bool(self.parts.scheduler.running) and self._missing_since is None

    @property
    def running(self) -> bool:
        """The thread lives."""
        return self._thread is None or self._thread.is_alive()

    def stop(self) -> None:
        """Ends the thread after the current step; what is left ends in UNAVAILABLE."""
        self._stopping = True
        self._wake.set()
        if self._thread is not None:
            self._thread.join()

    # ---- the engine's thread ----

    def _loop(self) -> None:
        while not self._stopping:
            try:
                if not self.step():
                    self.parts.workers.sweep()
                    self._wake.wait(STALL_WAIT_S if self._missing_since is not None else IDLE_WAIT_S)
                    self._wake.clear()
            except Exception as error:  # a defect: its requests must not hang, and the process stays up
                log.exception("step %d failed", self._step)
                self._end_all(error if isinstance(error, ForefetchError) else ForefetchError("internal error"))
        self._end_all(Draining("the router is shutting down"))

    def step(self) -> bool:
        """One step. False when there was nothing to do."""
        plan = self._schedule()
        if plan is None:
            return False
        stamps = self.parts.recorder.begin(self._step)
        try:
            sampled, sampling_ns = self._run(plan, stamps)
        except LinkDown:
            self._replay(plan)
            return True
        timings = stamps.finish(perf_counter_ns(), sampling_ns, len(plan.chunks), plan.tokens)
        if self.parts.hints:
            self.parts.hints.learn(timings)
        self._publish(plan, sampled, timings)
        self._step += 1
        return True

    def _schedule(self) -> Plan | None:
        """Ends what was cancelled or expired, admits what fits, plans. None: nothing to do, or a worker is missing."""
        now, scheduler = monotonic(), self.parts.scheduler
        if self.parts.kv:
            for request in self.parts.kv.settle():
                self.parts.recorder.loaded(request)
        with self._lock:
            ended, admitted = scheduler.reap(now), scheduler.admit(now)
        self._end(ended)
        for request in admitted:
            self.parts.recorder.admitted(request)
            if self.parts.kv:
                self.parts.kv.admitted(request, self.parts.recorder.context(request))
        if not self._workers_complete(now):
            return None
        return scheduler.plan()

    def _workers_complete(self, now: float) -> bool:
        """Follows the table of workers; ends everything when one is away for longer than the grace."""
        if self.parts.workers.refresh():
            self._missing_since = None
            return True
        if self._missing_since is None:
            self._missing_since = now
        if now - self._missing_since > self.worker_grace_s and self._streams:
            self._end_all(Unavailable(self.parts.workers.missing()))
        return False

    def _run(self, plan: Plan, stamps: StepStamps) -> tuple[Sampled, int]:
        """Logits of the plan's last rows, and the tokens they choose. LinkDown when a worker is lost."""
        batch = self.parts.buffers.fill(self._step, plan, self.parts.recorder.trace_of(plan))
        observer = self.parts.hints.begin(batch, stamps) if self.parts.hints else None
        began = perf_counter_ns()
        logits = self.parts.trunk.forward(batch, self.parts.dispatch, stamps, observer)
        forwarded = perf_counter_ns()
        choosing = [chunk.request for chunk in plan.chunks if chunk.samples]
        params = [request.admitted.sampling for request in choosing]
        sampled = sample(logits, params, [len(request.tokens) for request in choosing]) if choosing else Sampled([], [], [])
        self.parts.trunk.cache.commit(batch)
        return sampled, self.parts.trunk.timed(stamps, began, forwarded, perf_counter_ns())

    def _replay(self, plan: Plan) -> None:
        """A worker was lost: nothing is committed, so the next plan holds the same tokens again."""
        self._broken += 1
        for chunk in plan.chunks:
            chunk.request.replayed_steps += 1
        self.parts.recorder.replayed()

    def _publish(self, plan: Plan, sampled: Sampled, timings: Timings) -> None:
        """Commits the step and hands out its events."""
        choosing = [chunk.request for chunk in plan.chunks if chunk.samples]
        self.parts.recorder.stepped(self._step, plan, timings)
        sealed = self.parts.scheduler.commit(plan, sampled.ids)
        if self.parts.kv:
            self.parts.kv.computed(plan, timings.total_ns)
            for request, first in sealed:
                self.parts.kv.sealed(request, first, self.parts.recorder.context(request))
        deliveries: list[Delivery] = []
        for row, request in enumerate(choosing):
            if row in sampled.bad:
                error = ForefetchError("the model produced no usable logits for this request")
                self._end([(request, error)], remove=True)
                continue
            stream = self._streams[request]
            event, finish = stream.answer.token(sampled.ids[row], sampled.logprobs[row], sampled.tops[row], timings)
            deliveries.append((stream.sink, event))
            self.parts.recorder.token(request)
            if finish is not None:
                deliveries.append((stream.sink, finish))
                self._forget(request)
                self.parts.recorder.finished(request, "OK", finish.reason)
        self.deliver(deliveries)

    def _end(self, ended: list[tuple[Request, ForefetchError]], remove: bool = False) -> None:
        """Tells streams that their requests ended in an error."""
        deliveries: list[Delivery] = []
        for request, error in ended:
            stream = self._streams[request]
            deliveries.append((stream.sink, error))
            self._forget(request, remove)
            self.parts.recorder.finished(request, error.code)
        self.deliver(deliveries)

    def _forget(self, request: Request, remove: bool = True) -> None:
        with self._lock:
            del self._streams[request]
            if remove:
                self.parts.scheduler.remove(request, monotonic())
        if self.parts.kv:
            self.parts.kv.ended(request)

    def _end_all(self, error: ForefetchError) -> None:
        with self._lock:
            left = list(self._streams)
        self._end([(request, error) for request in left], remove=True)
