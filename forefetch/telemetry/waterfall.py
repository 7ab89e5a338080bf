"""A finished request -> its spans. Pure but for the ids it draws.

    forefetch.generate                      the request; parent: the caller's span
    |- forefetch.queue
    |- forefetch.prefill                    a step that computed prompt tokens, one span each
    `- forefetch.decode_step                any other step; linked to forefetch.step when others shared it
       `- forefetch.layer                   of outlier steps, or of every step when the caller asked for detail
          `- forefetch.expert_call          a worker's part, as the router saw it
             `- forefetch.expert_forward    the same under the worker's resource, from the durations in its reply
    forefetch.step                          a shared step, in a trace of its own, linked to each traced request's span

Workers report durations, never times, so clocks that differ do no harm: their span is centred in the router's.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator
from statistics import median

from forefetch.telemetry import names
from forefetch.telemetry.book import RequestBook, RequestRecord, Work
from forefetch.telemetry.context import SpanContext, new_root
from forefetch.telemetry.otlp import CLIENT, SERVER, Resource, Span, Value
from forefetch.telemetry.ring import HINT_COUNTS, VERIFIED, StepRecord

# Steps whose layers are drawn: 48 layers and 2 workers make 240 spans of each.
_OUTLIERS = 8
_DETAILED = 64
_OUTLIER_FACTOR = 3
_LAYER_PARTS = ("attention", "gate", "experts", "combine", "lookahead", "lookahead_hidden")
# FinishReason -> what the GenAI conventions' users expect.
_REASONS = {"STOP_TOKEN": "stop", "STOP_STRING": "stop", "LENGTH": "length", "CONTEXT": "length"}


class Waterfall:
    """Draws requests of one router. Used by one thread."""

    def __init__(
        self, book: RequestBook, model: str, resource: Resource, paced: Callable[[Iterator[Work]], Iterator[Work]] = iter
    ) -> None:
        """`paced` slows down the reading of steps."""
        self._book, self._model, self._resource, self._paced = book, model, resource, paced
        self._workers: dict[str, Resource] = {}
        self._shared: OrderedDict[int, SpanContext] = OrderedDict()

    def draw(self, record: RequestRecord) -> Iterator[Span]:
        """The request's span, then its children."""
        epoch = record.arrival_unix_ns - record.arrival_ns
        works = list(self._paced(self._book.works(record)))
        yield self._request(record, epoch, len(works))
        if record.queued_ns:
            left = record.arrival_ns + record.queued_ns
            yield self._child(record.context, names.QUEUE, epoch + record.arrival_ns, epoch + left)
        detailed = _detailed(works, _DETAILED if record.context.detail else _OUTLIERS, record.context.detail)
        for work in works:
            yield from self._step(record, work, epoch, work.step.step in detailed)

    def _request(self, record: RequestRecord, epoch: int, steps: int) -> Span:
        attributes: dict[str, Value] = {
            names.OPERATION: record.operation,
            names.PROVIDER_NAME: names.PROVIDER,
            names.REQUEST_MODEL: self._model,
            names.RESPONSE_ID: record.request_id,
            names.INPUT_TOKENS: record.prompt_tokens,
            names.OUTPUT_TOKENS: record.completion_tokens,
            names.CACHED_TOKENS: record.cached_tokens,
            names.REPLAYED_STEPS: record.replayed_steps,
            names.STEPS_LOST: max(record.steps - steps, 0),
        }
        if record.finish_reason:
            attributes[names.FINISH_REASONS] = [_REASONS.get(record.finish_reason, record.finish_reason.lower())]
        return Span(
            context=record.context,
            parent=record.parent,
            name=names.GENERATE,
            start_ns=record.arrival_unix_ns,
            end_ns=epoch + record.finished_ns,
            resource=self._resource,
            kind=SERVER,
            attributes=attributes,
            error="" if record.status == "OK" else record.status,
        )

    def _step(self, record: RequestRecord, work: Work, epoch: int, detailed: bool) -> Iterator[Span]:
        step = work.step
        links: tuple[SpanContext, ...] = ()
        if step.timings.batch > 1:
            if step.step not in self._shared:
                yield self._share(step, epoch)
            links = (self._shared[step.step],)
        attributes = {**_step_attributes(step), names.PREFILL_TOKENS: work.prefill_tokens}
        if work.token_index is not None:
            attributes[names.TOKEN_INDEX] = work.token_index
        start, name = epoch + step.start_ns, names.PREFILL if work.prefill_tokens else names.DECODE_STEP
        span = self._child(record.context, name, start, start + step.timings.total_ns, attributes, links)
        yield span
        if detailed:
            yield from self._layers(span, step)

    def _share(self, step: StepRecord, epoch: int) -> Span:
        """The span that a batch shares; requests that turn out slow or failed later link to it, but not it to them."""
        context = self._shared[step.step] = new_root(sampled=True)
        if len(self._shared) > self._book.ring.capacity:
            self._shared.popitem(last=False)
        start = epoch + step.start_ns
        links = [companion.context for companion in self._book.companions(step.step)]
        end = start + step.timings.total_ns
        return Span(context, None, names.STEP, start, end, self._resource, attributes=_step_attributes(step), links=links)

    def _layers(self, parent: Span, step: StepRecord) -> Iterator[Span]:
        for layer, (stamps, calls) in enumerate(zip(step.layers.tolist(), step.calls.tolist(), strict=True)):
            offset, *parts = stamps
            if not any(stamps):
                continue
            heads, hidden, *counts = step.hints[layer].tolist()
            spent = zip(_LAYER_PARTS, (*parts, heads, hidden), strict=True)
            attributes: dict[str, Value] = {names.LAYER_INDEX: layer}
            attributes |= {names.LAYER_PART.format(part): ns for part, ns in spent}
            if counts[0]:
                attributes |= {names.LAYER_COUNT.format(what): n for what, n in zip(HINT_COUNTS[:3], counts, strict=False)}
            start = parent.start_ns + offset
            span = self._child(parent.context, names.LAYER, start, start + sum(parts) + heads, attributes)
            yield span
            for worker, call in enumerate(calls):
                if call[1]:
                    verified = step.verified[layer, worker].tolist()
                    yield from self._call(span, start + parts[0] + parts[1], worker, call, verified)

    def _call(self, parent: Span, start: int, worker: int, call: list[int], verified: list[int]) -> Iterator[Span]:
        rows, round_trip, *reported = call
        address = self._book.workers[worker]  # which may be another one than some requests ago
        resource = self._workers.setdefault(address, Resource(names.SERVICE_EXPERT, address))
        attributes: dict[str, Value] = {names.WORKER_ADDRESS: resource.instance, names.WORKER_ROWS: rows}
        attributes |= {names.WORKER_COUNT.format(what): n for what, n in zip(VERIFIED, verified, strict=True) if n}
        sent = self._child(parent.context, names.EXPERT_CALL, start, start + round_trip, attributes)
        sent.kind = CLIENT
        yield sent
        for part, ns in zip(("queue", "copy_wait", "compute"), reported, strict=True):
            attributes = {**attributes, names.WORKER_PART.format(part): ns}
        busy = min(sum(reported), round_trip)
        begun = start + (round_trip - busy) // 2
        context = sent.context.child()
        yield Span(context, sent.context, names.EXPERT_FORWARD, begun, begun + busy, resource, SERVER, attributes)

    def _child(
        self,
        parent: SpanContext,
        name: str,
        start_ns: int,
        end_ns: int,
        attributes: dict[str, Value] | None = None,
        links: tuple[SpanContext, ...] = (),
    ) -> Span:
        return Span(parent.child(), parent, name, start_ns, end_ns, self._resource, attributes=attributes or {}, links=links)


def _step_attributes(step: StepRecord) -> dict[str, Value]:
    timings = step.timings
    parts: dict[str, Value] = {names.STEP_PART.format(part): getattr(timings, part + "_ns") for part in names.PARTS}
    return {names.STEP_NUMBER: step.step, names.STEP_BATCH: timings.batch, names.STEP_TOKENS: timings.tokens, **parts}


def _detailed(works: list[Work], most: int, everything: bool) -> set[int]:
    """Numbers of the steps to draw layer by layer: of the prefill and of the decode steps the slowest and those over three
    times the median (or all), at most `most` of each, slowest first."""
    chosen: set[int] = set()
    for prefill in (True, False):
        steps = [work.step for work in works if bool(work.prefill_tokens) == prefill]
        steps.sort(key=lambda step: step.timings.total_ns, reverse=True)
        if steps:
            bound = 0 if everything else _OUTLIER_FACTOR * median(step.timings.total_ns for step in steps)
            chosen.update(step.step for step in steps[:most] if step is steps[0] or step.timings.total_ns > bound)
    return chosen
