"""Requests and the steps that worked on them, from which a request's waterfall is built when somebody asks.

Memory is fixed: the last `capacity` finished requests, and beside each step of the ring the requests of its batch. Nothing is
copied per request; a step shared by a batch is stored once, in the ring. Times are nanoseconds.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from threading import Lock
from typing import NamedTuple

from forefetch.errors import BadRequest, NotFound
from forefetch.telemetry import names
from forefetch.telemetry.context import SpanContext, new_root
from forefetch.telemetry.ring import StepRecord, StepRing, Timings
from forefetch.v1 import router_pb2

# Layers and calls of one answer, so that building it takes some 0.1 s and 1 MB at most.
_DETAIL_RECORDS = 30_000
RUNNING = "is the id of a request that is running"


@dataclass(slots=True, eq=False)
class RequestRecord:
    """A request as the book knows it. Times on the monotonic clock unless named unix; 0 = not yet."""

    request_id: str
    context: SpanContext
    parent: SpanContext | None
    arrival_unix_ns: int
    arrival_ns: int
    operation: str = names.TEXT_COMPLETION
    admitted_ns: int = 0
    loaded_ns: int = 0
    finished_ns: int = 0
    status: str = ""
    finish_reason: str = ""
    prompt_tokens: int = 0
    completion_tokens: int = 0
    cached_tokens: int = 0
    replayed_steps: int = 0
    first_step: int = -1
    last_step: int = -1
    steps: int = 0
    exported: bool = False

    @property
    def duration_ns(self) -> int:
        """Arrival to end; 0 while it runs."""
        return self.finished_ns - self.arrival_ns if self.finished_ns else 0

    @property
    def queued_ns(self) -> int:
        """Arrival to admission, or to the end if it was never admitted; 0 while it waits."""
        left = self.admitted_ns or self.finished_ns
        return left - self.arrival_ns if left else 0


class Work(NamedTuple):
    """A step, the index of the token it produced for a request (None: not the end of its prompt), and the prompt tokens of
    that request that it computed."""

    step: StepRecord
    token_index: int | None
    prefill_tokens: int


@dataclass(slots=True)
class _Batch:
    """Who took part in a step: record -> (index of the token it got or None, prompt tokens computed for it)."""

    step: int
    work: dict[RequestRecord, tuple[int | None, int]] = field(default_factory=dict)


class RequestBook:
    """Safe from any thread; `worked` is the engine's and takes no lock. Ids here may begin with a tenant and a slash."""

    def __init__(self, ring: StepRing, capacity: int, workers: Sequence[str] = ()) -> None:
        """`capacity`: finished requests remembered. `workers`: addresses, in the ring's order."""
        self.ring, self.capacity = ring, capacity
        self.workers: Sequence[str] = workers or [f"worker {index}" for index in range(ring.workers)]
        self._running: dict[str, RequestRecord] = {}
        self._done: dict[str, RequestRecord] = {}
        self._batches: list[_Batch | None] = [None] * ring.capacity
        self._lock = Lock()

    def check_free(self, request_id: str) -> None:
        """BadRequest when a running request has that id."""
        if request_id in self._running:
            raise BadRequest("request_id", RUNNING)

    def arrive(
        self,
        request_id: str,
        unix_ns: int,
        mono_ns: int,
        parent: SpanContext | None,
        sampled: bool,
        *,
        operation: str = names.TEXT_COMPLETION,
    ) -> SpanContext:
        """Opens a request and returns its span's context. BadRequest when a running request has that id."""
        detail = parent is not None and parent.detail
        context = new_root(sampled) if parent is None else SpanContext(parent.trace_id, parent.child().span_id, sampled, detail)
        record = RequestRecord(_own_id(request_id), context, parent, unix_ns, mono_ns, operation)
        with self._lock:
            if self._running.setdefault(request_id, record) is not record:
                raise BadRequest("request_id", RUNNING)
            self._done.pop(request_id, None)
        return context

    def admitted(self, request_id: str, mono_ns: int) -> None:
        """The request left the queue."""
        if record := self._running.get(request_id):
            record.admitted_ns = mono_ns

    def loaded(self, request_id: str, mono_ns: int, tokens: int) -> None:
        """The request's cached prefix was loaded: so many tokens of it."""
        if record := self._running.get(request_id):
            record.loaded_ns, record.cached_tokens = mono_ns, tokens

    def worked(self, request_id: str, step: int, token_index: int | None, prefill_tokens: int) -> None:
        """The committed step `step` computed `prefill_tokens` of its prompt and produced token `token_index` of its answer."""
        record = self._running.get(request_id)
        if record is None:
            return
        slot = step % self.ring.capacity
        batch = self._batches[slot]
        if batch is None or batch.step != step:
            batch = self._batches[slot] = _Batch(step)
        if record not in batch.work:
            record.steps += 1
        batch.work[record] = (token_index, prefill_tokens)
        record.first_step = step if record.first_step < 0 else record.first_step
        record.last_step = step

    def finished(
        self,
        request_id: str,
        mono_ns: int,
        status: str,
        *,
        finish_reason: str = "",
        prompt_tokens: int = 0,
        completion_tokens: int = 0,
        cached_tokens: int = 0,
        replayed_steps: int = 0,
    ) -> RequestRecord | None:
        """Closes a request. `status` is the gRPC status's name, "OK" or not; `finish_reason` a FinishReason's, without prefix.
        None when it is not running."""
        with self._lock:
            record = self._running.pop(request_id, None)
            if record is None:
                return None
            record.finished_ns, record.status, record.finish_reason = mono_ns, status, finish_reason
            record.prompt_tokens, record.completion_tokens = prompt_tokens, completion_tokens
            record.cached_tokens, record.replayed_steps = cached_tokens, replayed_steps
            self._done[request_id] = record
            while len(self._done) > self.capacity:
                del self._done[next(iter(self._done))]
        return record

    def trace(self, request_id: str) -> router_pb2.GetTraceResponse:
        """The waterfall of a running or remembered request. NotFound otherwise."""
        with self._lock:
            record = self._running.get(request_id) or self._done.get(request_id)
        if record is None:
            raise NotFound(f"no request {_own_id(request_id)!r} is running or remembered")
        return self.build(record)

    def build(self, record: RequestRecord) -> router_pb2.GetTraceResponse:
        """The waterfall of `record`, with layers for as many steps as the bound on an answer allows, slowest first."""
        works = list(self.works(record))
        detailed = self._detailed([work.step for work in works])
        return router_pb2.GetTraceResponse(
            request_id=record.request_id,
            trace_id=record.context.trace_id.hex() if record.context.sampled or record.exported else "",
            arrival_unix_ns=record.arrival_unix_ns,
            queued_ns=record.queued_ns,
            load_ns=max(record.loaded_ns - record.admitted_ns, 0),
            cached_tokens=record.cached_tokens,
            steps=[_step(work, record.arrival_ns, work.step.step in detailed) for work in works],
            workers=self.workers,
            steps_lost=max(record.steps - len(works), 0),
        )

    def companions(self, step: int) -> list[RequestRecord]:
        """The requests of a step's batch that are sampled or exported, in batch order."""
        batch = self._batches[step % self.ring.capacity]
        if batch is None or batch.step != step:
            return []
        return [record for record in list(batch.work) if record.context.sampled or record.exported]

    def works(self, record: RequestRecord) -> Iterator[Work]:
        """The steps of `record` that are still in the ring, oldest first."""
        last = record.last_step
        for number in range(max(record.first_step, last - self.ring.capacity + 1, 0), last + 1):
            batch = self._batches[number % self.ring.capacity]
            work = batch.work.get(record) if batch and batch.step == number else None
            step = self.ring.read(number) if work else None
            if work and step:
                yield Work(step, *work)

    def _detailed(self, steps: list[StepRecord]) -> set[int]:
        allowed = max(_DETAIL_RECORDS // (self.ring.layers * (1 + self.ring.workers)), 1)
        slowest = sorted(steps, key=lambda step: step.timings.total_ns, reverse=True)
        middle = slowest[len(slowest) // 2 :][:1]
        return {step.step for step in (middle + slowest)[:allowed]}


def _own_id(request_id: str) -> str:
    """What its caller knows it by."""
    return request_id.rpartition("/")[2]


def timings_message(timings: Timings) -> router_pb2.StepTimings:
    """The proto form."""
    return router_pb2.StepTimings(**{name: getattr(timings, name) for name in Timings.__slots__})


def _step(work: Work, arrival_ns: int, detailed: bool) -> router_pb2.StepTrace:
    step = work.step
    return router_pb2.StepTrace(
        step=step.step,
        start_ns=max(step.start_ns - arrival_ns, 0),
        timings=timings_message(step.timings),
        token_index=work.token_index,
        prefill_tokens=work.prefill_tokens,
        layers=_layers(step) if detailed else (),
    )


def _layers(step: StepRecord) -> Iterator[router_pb2.LayerTrace]:
    rows = zip(step.layers.tolist(), step.calls.tolist(), step.hints.tolist(), step.verified.tolist(), strict=True)
    for layer, (stamps, calls, (heads, hidden, chosen, named, found, *_), verified) in enumerate(rows):
        start, attention, gate, experts, combine = stamps
        if any(stamps):
            yield router_pb2.LayerTrace(
                layer=layer,
                start_ns=start,
                attention_ns=attention,
                gate_ns=gate,
                experts_ns=experts,
                combine_ns=combine,
                calls=[_call(worker, call, verified[worker]) for worker, call in enumerate(calls) if call[1]],
                lookahead_ns=heads,
                lookahead_hidden_ns=hidden,
                chosen=chosen,
                named=named,
                found=found,
            )


def _call(worker: int, call: list[int], verified: list[int]) -> router_pb2.WorkerCall:
    rows, round_trip, queue, copy_wait, compute = call
    hits, late, misses, _, _, copied_bytes, copy_ns, shadowed = verified
    return router_pb2.WorkerCall(
        worker=worker,
        rows=rows,
        round_trip_ns=round_trip,
        queue_ns=queue,
        copy_wait_ns=copy_wait,
        compute_ns=compute,
        hits=hits,
        late=late,
        misses=misses,
        copied_bytes=copied_bytes,
        copy_ns=copy_ns,
        shadowed=shadowed,
    )
