"""What the engine tells telemetry: the step ring, the request book, metrics, and spans of finished requests."""

from __future__ import annotations

from time import perf_counter_ns, time_ns

from prometheus_client import CollectorRegistry

from forefetch.rpc.auth import ANONYMOUS
from forefetch.telemetry.book import RequestBook, RequestRecord
from forefetch.telemetry.context import SpanContext
from forefetch.telemetry.metrics import RouterMetrics
from forefetch.telemetry.ring import StepRing, StepStamps, Timings
from forefetch.telemetry.spans import Exporter
from forefetch.v1 import router_pb2
from router_service.scheduler import Plan, Request


def _name(request_id: str, tenant: str) -> str:
    """What the book knows a request by: tenants never meet, and no caller's id has a slash."""
    return request_id if tenant in ("", ANONYMOUS) else f"{tenant}/{request_id}"


def _name_of(request: Request) -> str:
    return _name(request.request_id, request.tenant)


class Recorder:
    """One per router."""

    def __init__(
        self,
        ring: StepRing,
        book: RequestBook,
        *,
        model: str,
        registry: CollectorRegistry,
        exporter: Exporter,
    ) -> None:
        self.ring, self.book, self.exporter = ring, book, exporter
        self.metrics = RouterMetrics(registry, model, ring)
        self._contexts: dict[Request, SpanContext] = {}
        self._operations: dict[Request, str] = {}
        self._last_token: dict[Request, int] = {}

    # ---- requests ----

    def check_free(self, request_id: str, tenant: str) -> None:
        """BadRequest when a running request of this tenant has that id."""
        self.book.check_free(_name(request_id, tenant))

    def trace(self, request_id: str, tenant: str) -> router_pb2.GetTraceResponse:
        """The waterfall of a tenant's running or remembered request. NotFound otherwise."""
        return self.book.trace(_name(request_id, tenant))

    def arrive(self, request: Request, parent: SpanContext | None, operation: str) -> int:
        """A request was read from the wire; returns its arrival on the monotonic clock, nanoseconds."""
        now = perf_counter_ns()
        sampled = self.exporter.sampled(parent)
        context = self.book.arrive(_name_of(request), time_ns(), now, parent, sampled, operation=operation)
        self._contexts[request] = context
        self._operations[request], self._last_token[request] = operation, now
        return now

    def admitted(self, request: Request) -> None:
        """It left the queue."""
        self.book.admitted(_name_of(request), perf_counter_ns())

    def loaded(self, request: Request) -> None:
        """Its cached prefix is there, as far as it comes."""
        self.book.loaded(_name_of(request), perf_counter_ns(), request.cached)

    def token(self, request: Request) -> None:
        """It got a token."""
        now = perf_counter_ns()
        since, self._last_token[request] = now - self._last_token[request], now
        if request.first:
            self.metrics.first_token(self._operations[request], since)
        else:
            self.metrics.token(self._operations[request], since)

    def finished(self, request: Request, status: str, reason: str = "") -> None:
        """It ended; its spans are built now if they are wanted."""
        if self._contexts.pop(request, None) is None:
            return
        record: RequestRecord | None = self.book.finished(
            _name_of(request),
            perf_counter_ns(),
            status,
            finish_reason=reason,
            prompt_tokens=len(request.prompt),
            completion_tokens=request.generated,
            cached_tokens=request.cached,
            replayed_steps=request.replayed_steps,
        )
        operation = self._operations.pop(request)
        self._last_token.pop(request)
        if record is not None:
            self.metrics.request_finished(operation, record.duration_ns, status)
            self.exporter.request_finished(record)

    # ---- steps ----

    def begin(self, step: int) -> StepStamps:
        """Opens the step's slot in the ring."""
        return self.ring.begin(step, perf_counter_ns())

    def replayed(self) -> None:
        """A step has to be run again."""
        self.metrics.step_replayed()

    def stepped(self, step: int, plan: Plan, timings: Timings) -> None:
        """A step is done; called before its tokens are appended to the requests."""
        prompt_tokens = 0
        for chunk in plan.chunks:
            prefill = max(0, min(chunk.start + chunk.count, len(chunk.request.prompt)) - chunk.start)
            prompt_tokens += prefill
            index = chunk.request.generated if chunk.samples else None
            self.book.worked(_name_of(chunk.request), step, index, prefill)
            chunk.request.shadow_experts += timings.shadow_experts
        completion = sum(chunk.samples for chunk in plan.chunks)
        self.metrics.step_finished(timings, prompt_tokens=prompt_tokens, completion_tokens=completion)

    def context(self, request: Request) -> SpanContext | None:
        """The request's span, if it is sampled."""
        context = self._contexts.get(request)
        return context if context is not None and context.sampled else None

    def trace_of(self, plan: Plan) -> bytes:
        """The context that the step's frames carry: that of its first sampled request, or none."""
        for chunk in plan.chunks:
            if context := self.context(chunk.request):
                return context.to_bytes()
        return b""
