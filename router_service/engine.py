"""The step loop: schedule -> launch -> land, on one thread.

Every change of a request's state happens on this thread; the API's side submits, cancels and receives. A step is all or
nothing: when a worker is lost half-way, nothing was committed and the same tokens are planned again. A model that runs ahead
has the next step launched before the last one lands (ARCHITECTURE.md, "Running ahead").
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from contextlib import suppress
from dataclasses import dataclass, field
from time import monotonic
from typing import Any

from forefetch.errors import Draining, ForefetchError, LinkDown, Unavailable
from forefetch.telemetry.ring import Timings
from router_service.answer import Answer, Delivery
from router_service.finite import NotFinite
from router_service.flight import Flight, Parts, launch
from router_service.outgoing import Outgoing
from router_service.sampling import Sampled
from router_service.scheduler import Plan, Request
from router_service.streams import Streams

log = logging.getLogger("forefetch.router")

IDLE_WAIT_S = 0.5  # idle: how long until deadlines of waiting requests are looked at again
BAD_LOGITS = "the model produced no usable logits for this request"
STALL_WAIT_S = 0.02  # workers or pages are missing: how long until they are looked for again
ENDED = "the router has failed and will be restarted"


@dataclass
class Engine:
    """`outgoing` hands a step's events to the streams; it is called from the engine's thread and must not block."""

    parts: Parts
    outgoing: Outgoing
    worker_grace_s: float
    _streams: Streams = field(init=False)
    _wake: threading.Event = field(default_factory=threading.Event)
    _stopping: bool = False
    _draining: bool = False
    _missing_since: float | None = None
    _step: int = 0
    _broken: int = 0
    _flights: deque[Flight] = field(default_factory=deque)  # launched, not landed
    _landed_ns: int = 0
    _thread: threading.Thread | None = None

    def __post_init__(self) -> None:
        self._streams = Streams(self.parts, self.outgoing)

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
        with self._streams.lock:
            if self._draining:
                raise Draining("the router is shutting down")
            if not self.running:
                raise Unavailable(ENDED)
            since = self._missing_since  # the engine's thread may be about to forget it
            if since is not None and monotonic() - since > self.worker_grace_s:
                raise Unavailable(self.parts.workers.missing())
            self._streams.begin(answer, sink)
        self._wake.set()

    def cancel(self, request: Request) -> None:
        """The caller went away: the request is in no step that is planned from now on."""
        request.cancelled = True
        self._wake.set()

    def fail(self, request: Request, error: ForefetchError) -> None:
        """The request may not go on: it ends in `error` before the next step is planned. No effect on one that has ended."""
        request.error = error
        self._wake.set()

    def end(self, request: Request, error: ForefetchError | None) -> None:
        """Nobody takes its events any more: because of `error`, or because the caller went away."""
        if error is not None:
            self.fail(request, error)
        else:
            self.cancel(request)

    def drain(self) -> None:
        """Refuses new requests from now on; running and waiting ones go on."""
        with self._streams.lock:
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
        return self.running and not self._draining and self._missing_since is None and self.parts.workers.complete

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
        try:
            self._steps()
        finally:  # no stream waits for a step that nobody will run, whatever ended this thread
            self._streams.give_up(Unavailable(ENDED))

    def _steps(self) -> None:
        while not self._stopping:
            try:
                if not self.step():
                    self.parts.workers.sweep()
                    self._wake.wait(STALL_WAIT_S if self._stalled else IDLE_WAIT_S)
                    self._wake.clear()
            except Exception as error:  # a defect: its requests must not hang, and the process stays up
                log.exception("step %d failed", self._step)
                # What a worker says of a frame, say, is for the log: it would blame the caller.
                self._streams.end_all(error if isinstance(error, Unavailable) else ForefetchError("internal error"))
                self._abandon()
        self._streams.end_all(Draining("the router is shutting down"))
        self._abandon()

    @property
    def _stalled(self) -> bool:
        """Somebody waits for what wakes nobody up: a worker, or pages that a hand-over has yet to let go of."""
        return self._missing_since is not None or bool(self.parts.scheduler.waiting)

    def step(self) -> bool:
        """One step. False when there was nothing to do."""
        for flight in self._flights:  # the one before it has landed, so what it was computed from is known
            flight.commit(self.parts.trunk.cache)
        plan, flying = self._schedule(), len(self._flights)
        launched = plan is not None and self._launch(plan)
        self.outgoing.release()  # what nothing computed for
        keep = 1 if launched and self._flights[-1].ahead else 0
        while len(self._flights) > keep:
            try:
                self._land(self._flights[0])
                self._flights.popleft()
            except LinkDown:
                self._break_off()
        return plan is not None or flying > 0

    def _schedule(self) -> Plan | None:
        """Ends what was cancelled or expired, admits what fits, plans. None: nothing to do, or a worker is missing."""
        now, scheduler = monotonic(), self.parts.scheduler
        if self.parts.kv:
            for request in self.parts.kv.settle():
                self.parts.recorder.loaded(request)
        with self._streams.lock:
            ended, admitted = scheduler.reap(now), scheduler.admit(now)
        self._streams.end(ended)
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
            self._streams.end_all(Unavailable(self.parts.workers.missing()))
        return False

    def _launch(self, plan: Plan) -> bool:
        """Starts a step. False when a worker was lost, or a prompt's rows are no numbers: nothing has changed then, the next
        plan holds the same tokens again, but for those prompts'."""
        stamps = self.parts.recorder.begin(self._step)
        try:
            flight = launch(self.parts, self._step, plan, stamps)
        except LinkDown:
            self._replay(plan)
            return False
        except NotFinite as error:
            self._streams.end([(plan.prefills[i].request, ForefetchError(BAD_LOGITS)) for i in error.chunks], remove=True)
            return False
        self.parts.scheduler.advance(plan)
        self._flights.append(flight)
        self._step += 1
        return True

    def _replay(self, plan: Plan) -> None:
        """A step was lost with a worker; its tokens will be planned again."""
        self._broken += 1
        for chunk in plan.chunks:
            chunk.request.replayed_steps += 1
        self.parts.recorder.replayed()

    def _break_off(self) -> None:
        """The oldest step in flight turned out lost: its requests, and those launched on it, stand before it again."""
        while self._flights:
            flight = self._flights.pop()
            self._void(flight, {chunk.request for chunk in flight.plan.chunks} - flight.void)
            self.parts.scheduler.land(flight.plan, [], flight.void)
            self._replay(flight.plan)

    def _land(self, flight: Flight) -> None:
        """Reads a step's tokens and hands them out. LinkDown: there are none, nothing has changed."""
        sampled = flight.read()
        if self.parts.hints:
            self.parts.hints.landed(sampled.ids)
        flight.commit(self.parts.trunk.cache)
        began, forwarded, ended = flight.times(self._landed_ns)
        self._landed_ns = ended
        sampling_ns = self.parts.trunk.timed(flight.step, flight.stamps, began, forwarded, ended)
        timings = flight.stamps.finish(ended, sampling_ns, len(flight.plan.chunks), flight.plan.tokens)
        if self.parts.hints:
            self.parts.hints.learn(timings)
        choosing = flight.plan.choosing
        if sampled.late and len(self._flights) > 1:
            self._void(self._flights[1], {choosing[row].request for row in sampled.late} - flight.void)
        self._publish(flight, sampled, timings)

    def _void(self, flight: Flight, late: set[Request]) -> None:
        """These rows count nothing: they were launched on tokens that were settled only now, or lost with a worker."""
        for chunk in flight.plan.chunks:
            if chunk.request in late:
                flight.void.add(chunk.request)
                self.parts.scheduler.void(chunk)

    def _publish(self, flight: Flight, sampled: Sampled, timings: Timings) -> None:
        """Adds the step's tokens to their requests and hands out its events."""
        plan, choosing = flight.plan, flight.plan.choosing
        dropped = flight.void | {chunk.request for chunk in plan.chunks if chunk.request not in self._streams}
        bad = {choosing[row].request for row in sampled.bad} - dropped
        kept = plan.without(dropped) if dropped else plan
        self.parts.recorder.stepped(flight.step, kept, timings)
        sealed = self.parts.scheduler.land(plan, sampled.ids, dropped | bad)
        if self.parts.kv:
            self.parts.kv.computed(kept, timings.total_ns)
            for request, first, behind in sealed:
                self.parts.kv.sealed(request, first, behind, self.parts.recorder.context(request))
        if bad:
            self._streams.end([(request, ForefetchError(BAD_LOGITS)) for request in bad], remove=True)
        deliveries: list[Delivery] = []
        for row, chunk in enumerate(choosing):
            if chunk.request not in dropped and chunk.request not in bad:
                deliveries += self._streams.token(chunk.request, sampled, row, timings)
        self.outgoing.add(deliveries)

    def _abandon(self) -> None:
        """After a defect, with all requests ended: what is in flight is waited for and counts nothing."""
        for flight in self._flights:
            with suppress(Exception):
                flight.read()
            self.parts.scheduler.land(flight.plan, [], {chunk.request for chunk in flight.plan.chunks})
        self._flights.clear()
