"""Spans as real receivers see them: edges, nesting, links, resources; and collectors that are dead, slow or come back."""

from __future__ import annotations

import logging
import socket
import subprocess
import sys
import time
from collections.abc import Iterator

import pytest
from otlp_receiver import GrpcReceiver, OtelTap, Received, Receiver
from waiting import PATIENCE_S, kept_port, until

from forefetch.errors import Unavailable
from forefetch.settings import ServiceConfig
from forefetch.telemetry import context, names, spans
from forefetch.telemetry.book import RequestBook, RequestRecord
from forefetch.telemetry.context import SpanContext
from forefetch.telemetry.ring import StepRing
from forefetch.telemetry.spans import Exporter

MS = 1_000_000
WORKERS = ("10.0.0.1:1", "10.0.0.2:2")


@pytest.fixture(scope="module")
def receiver() -> Iterator[Receiver]:
    with GrpcReceiver() as running:
        yield running


class Router:
    """A router's telemetry on a clock of its own: three layers (the first dense), two workers."""

    def __init__(self, endpoint: str, ratio: float = 0.0) -> None:
        self.ring = StepRing(64, 3, 2)
        self.book = RequestBook(self.ring, 64, WORKERS)
        config = ServiceConfig(otlp_endpoint=endpoint, trace_ratio=ratio)
        self.exporter = Exporter(config, names.SERVICE_ROUTER, instance="router:1", book=self.book, model="tiny")
        self.now = 5_000 * MS
        self.epoch = time.time_ns() - self.now
        self.step = 0

    def arrive(self, name: str, parent: SpanContext | None = None) -> SpanContext:
        sampled = self.exporter.sampled(parent)
        own = self.book.arrive(name, self.epoch + self.now, self.now, parent, sampled, operation=names.CHAT)
        self.now += MS
        self.book.admitted(name, self.now)
        return own

    def work(self, *requests: str, token: int = 0, prefill: int = 0, total_ms: int = 10) -> None:
        start, stamps = self.now, self.ring.begin(self.step, self.now)
        for layer in range(3):
            at, unit = start + layer * total_ms * MS // 4, total_ms * MS // 40
            stamps.layer(layer, at, unit, unit, 6 * unit * (layer > 0), unit)
            for worker in range(2 if layer else 0):
                stamps.call(layer, worker, 1 + worker, 6 * unit, unit // 2, unit, 3 * unit)
        self.now = start + total_ms * MS
        stamps.finish(self.now, MS // 10, len(requests), len(requests))
        for name in requests:
            self.book.worked(name, self.step, token, prefill)
        self.step += 1

    def finish(self, name: str, status: str = "OK") -> RequestRecord:
        self.now += MS
        record = self.book.finished(name, self.now, status, finish_reason="LENGTH", prompt_tokens=3, completion_tokens=4)
        assert record is not None
        self.exporter.request_finished(record)
        return record


def children(of: Received, seen: list[Received]) -> list[Received]:
    return [span for span in seen if span.trace == of.trace and span.parent == of.span]


def by_name(seen: list[Received], trace: str = "") -> dict[str, list[Received]]:
    found: dict[str, list[Received]] = {}
    for span in seen:
        if not trace or span.trace == trace:
            found.setdefault(span.name, []).append(span)
    return found


def call_and_generate(endpoint: str) -> str:
    """One call through a client's, a router's and a KV service's exporter; returns the trace id."""
    router = Router(endpoint)
    client = Exporter(ServiceConfig(otlp_endpoint=endpoint, trace_ratio=1.0), "app", instance="cli:1")
    kv = Exporter(ServiceConfig(otlp_endpoint=endpoint), names.SERVICE_KV, instance="kv:1")
    with client.client_span("ask") as sent:
        assert sent is not None
        own = router.arrive("r", context.from_metadata(context.to_metadata(sent)))
        router.work("r", prefill=3, total_ms=40)
        for token, total in enumerate((10, 10, 90), start=1):
            router.work("r", token=token, total_ms=total)
        with router.exporter.client_span(names.KV_PUT, own) as put:
            with kv.server_span(context.to_metadata(put), names.KV_PUT):
                time.sleep(0.001)
        router.finish("r")
    for exporter in (client, router.exporter, kv):
        exporter.close(PATIENCE_S)
        assert exporter.dropped == 0
    return sent.trace_id.hex()


def test_edges_from_client_to_router_to_each_worker_and_to_the_kv_service(receiver: Receiver) -> None:
    trace = call_and_generate(receiver.endpoint)
    seen = [
        span for span in receiver.wait(lambda all_: len(by_name(all_, trace).get(names.KV_PUT, ())) == 2) if span.trace == trace
    ]
    spans_by_name = by_name(seen)
    (client,) = spans_by_name["ask"]
    (request,) = spans_by_name[names.GENERATE]
    assert (client.service, client.instance, client.kind, client.parent) == ("app", "cli:1", 3, "")
    assert (request.service, request.instance, request.kind, request.parent) == ("forefetch-router", "router:1", 2, client.span)
    assert sorted(span.name for span in children(request, seen)) == sorted(
        [names.QUEUE, names.PREFILL, *[names.DECODE_STEP] * 3, names.KV_PUT]
    )
    detailed = [step for step in spans_by_name[names.DECODE_STEP] if children(step, seen)]
    assert [step.attributes[names.TOKEN_INDEX] for step in detailed] == [3]  # only the step that was nine times the median
    layers = children(detailed[0], seen)
    assert [span.attributes[names.LAYER_INDEX] for span in layers] == [0, 1, 2]
    assert [len(children(layer, seen)) for layer in layers] == [0, 2, 2]
    for layer in layers[1:]:
        for call, worker in zip(children(layer, seen), WORKERS, strict=True):
            assert (call.name, call.service, call.kind) == (names.EXPERT_CALL, "forefetch-router", 3)
            (forward,) = children(call, seen)
            assert (forward.name, forward.service, forward.instance) == (names.EXPERT_FORWARD, "forefetch-expert", worker)
            assert forward.kind == 2
            assert (
                forward.attributes[names.WORKER_PART.format("compute")]
                == forward.attributes["forefetch.worker.copy_wait_ns"] * 3
            )
    put, served = sorted(spans_by_name[names.KV_PUT], key=lambda span: span.kind, reverse=True)
    assert (put.service, put.parent) == ("forefetch-router", request.span)
    assert (served.service, served.instance, served.parent) == ("forefetch-kv", "kv:1", put.span)


def test_children_lie_within_their_parents(receiver: Receiver) -> None:
    trace = call_and_generate(receiver.endpoint)
    seen = receiver.wait(lambda all_: len(by_name(all_, trace).get(names.KV_PUT, ())) == 2)
    nested = {span.span: span for span in seen if span.trace == trace and "kv" not in span.name}
    parents = 0
    for span in nested.values():
        assert span.start_ns <= span.end_ns
        parent = nested.get(span.parent)
        if parent and parent.name != "ask":  # the router's clock in this test runs ahead
            parents += 1
            assert parent.start_ns <= span.start_ns, (parent, span)
            assert span.end_ns <= parent.end_ns, (parent, span)
    assert parents > 10


def test_a_request_span_says_what_the_genai_conventions_ask(receiver: Receiver) -> None:
    router = Router(receiver.endpoint, ratio=1.0)
    own = router.arrive("who")
    router.finish("who", "UNAVAILABLE")
    router.exporter.close(PATIENCE_S)
    (span,) = [span for span in receiver.wait(lambda seen: by_name(seen, own.trace_id.hex())) if span.span == own.span_id.hex()]
    assert span.failed
    assert span.parent == ""
    assert span.attributes == {
        "gen_ai.operation.name": "chat",
        "gen_ai.provider.name": "forefetch",
        "gen_ai.request.model": "tiny",
        "gen_ai.response.id": "who",
        "gen_ai.response.finish_reasons": ["length"],
        "gen_ai.usage.input_tokens": 3,
        "gen_ai.usage.output_tokens": 4,
        "gen_ai.usage.cache_read.input_tokens": 0,
        "forefetch.replayed_steps": 0,
        "forefetch.steps_lost": 0,
        "error.type": "UNAVAILABLE",
    }


def test_a_shared_step_is_one_span_linked_to_each_sampled_request(receiver: Receiver) -> None:
    router = Router(receiver.endpoint)
    parents = {name: context.new_root(sampled=name != "quiet") for name in ("a", "b", "quiet")}
    own = {name: router.arrive(name, parent) for name, parent in parents.items()}
    router.work("a", "b", "quiet", token=1)
    router.work("a", token=2)
    for name in parents:
        router.finish(name)
    router.exporter.close(PATIENCE_S)
    ids = {name: span.trace_id.hex() for name, span in own.items()}
    seen = receiver.wait(lambda all_: {ids["a"], ids["b"]} <= {span.trace for span in all_})
    (shared,) = [span for span in seen if span.name == names.STEP]
    assert shared.links == tuple((ids[name], own[name].span_id.hex()) for name in ("a", "b"))
    assert shared.attributes[names.STEP_BATCH] == 3
    for name, steps in (("a", 2), ("b", 1)):
        decode = by_name(seen, ids[name])[names.DECODE_STEP]
        assert len(decode) == steps
        assert decode[0].links == ((shared.trace, shared.span),)
    assert ids["quiet"] not in {span.trace for span in seen}


def test_what_is_traced(receiver: Receiver) -> None:
    router = Router(receiver.endpoint)
    assert not router.exporter.sampled(None)
    assert router.exporter.sampled(context.new_root(sampled=True))
    assert not Exporter(ServiceConfig(), names.SERVICE_ROUTER).sampled(context.new_root(sampled=True))
    for index in range(25):
        router.arrive(f"fast{index}")
        router.work(f"fast{index}", total_ms=20 + index % 3)
        assert not router.finish(f"fast{index}").exported
    router.arrive("slow")
    router.work("slow", total_ms=100)
    router.arrive("failed")
    router.arrive("cancelled")
    assert router.finish("slow").exported
    assert router.finish("failed", "UNAVAILABLE").exported
    assert not router.finish("cancelled", "CANCELLED").exported
    assert router.book.trace("slow").trace_id
    router.exporter.close(PATIENCE_S)
    assert router.exporter.sent == 14 + 2  # slow: request, queue, step, 3 layers, 4 calls on both sides; failed: request, queue


def test_detail_draws_the_layers_of_every_step(receiver: Receiver) -> None:
    router = Router(receiver.endpoint)
    parent = context.from_metadata([("traceparent", context.new_root(True).traceparent), ("tracestate", "forefetch=detail")])
    own = router.arrive("r", parent)
    for token in range(3):
        router.work("r", token=token)
    router.finish("r")
    router.exporter.close(PATIENCE_S)
    found = by_name(receiver.wait(lambda seen: by_name(seen, own.trace_id.hex())), own.trace_id.hex())
    assert len(found[names.LAYER]) == 9


def test_spans_around_code_record_errors_and_pass_contexts_through(receiver: Receiver) -> None:
    exporter = Exporter(ServiceConfig(otlp_endpoint=receiver.endpoint), names.SERVICE_KV)
    parent = context.new_root(sampled=True)
    with pytest.raises(Unavailable), exporter.client_span(names.KV_GET, parent):
        raise Unavailable("gone")
    with exporter.server_span([("traceparent", context.new_root(sampled=False).traceparent)], names.KV_GET) as unsampled:
        assert unsampled is not None
    with exporter.server_span(None, names.KV_GET) as nothing:
        assert nothing is None
    exporter.close(PATIENCE_S)
    (span,) = by_name(receiver.wait(lambda seen: by_name(seen, parent.trace_id.hex())), parent.trace_id.hex())[names.KV_GET]
    assert span.failed
    assert span.attributes["error.type"] == "UNAVAILABLE"
    assert exporter.sent == 1
    off = Exporter(ServiceConfig(), names.SERVICE_KV)
    with off.client_span(names.KV_GET, parent) as same, off.server_span(context.to_metadata(parent), names.KV_GET) as again:
        assert same == again == parent
    off.close()


def test_over_http_to_a_receiver_that_is_not_ours() -> None:
    with OtelTap() as tap:
        trace = call_and_generate(tap.endpoint)
        seen = [
            span for span in tap.wait(lambda all_: len(by_name(all_, trace).get(names.KV_PUT, ())) == 2) if span.trace == trace
        ]
    found = by_name(seen)
    (client,), (request,) = found["ask"], found[names.GENERATE]
    assert request.parent == client.span
    for call in found[names.EXPERT_CALL]:
        assert [span.name for span in children(call, seen)] == [names.EXPERT_FORWARD]
    assert {span.attributes[names.WORKER_ADDRESS] for span in found[names.EXPERT_FORWARD]} == set(WORKERS)


@pytest.mark.parametrize("scheme", ["", "http://"])
def test_a_dead_collector_costs_one_line_and_no_time(scheme: str, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    with kept_port() as port:
        router = Router(f"{scheme}127.0.0.1:{port}", ratio=1.0)
        started = time.perf_counter()
        for index in range(3_000):
            router.arrive(f"r{index}")
            router.finish(f"r{index}")
        assert time.perf_counter() - started < 30.0, "it waits for nobody: tries to send are 0.25 s apart, and more"
        until(lambda: caplog.records)
        router.exporter.close()
    assert len(caplog.records) == 1, caplog.text
    assert router.exporter.dropped >= 900  # what the queue has no room for
    assert router.exporter.sent == 0


@pytest.mark.parametrize("scheme", ["", "http://"])
def test_a_collector_that_never_answers_does_not_hold_the_exit(scheme: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(spans, "_SEND_S", 60.0)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        router = Router(f"{scheme}127.0.0.1:{silent.getsockname()[1]}", ratio=1.0)
        router.arrive("r")
        router.finish("r")
        time.sleep(0.7)
        started = time.perf_counter()
        router.exporter.close()
        assert time.perf_counter() - started < 30.0, "it would wait for a minute"


def test_spans_wait_for_a_collector_that_comes_back(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    caplog.set_level(logging.INFO)
    monkeypatch.setattr(spans, "_BACKOFF_S", (0.1, 0.2))
    with kept_port() as port:
        router = Router(f"127.0.0.1:{port}", ratio=1.0)
        own = router.arrive("r")
        router.finish("r")
        until(lambda: caplog.records)
        with GrpcReceiver(port) as late:
            late.wait(lambda seen: by_name(seen, own.trace_id.hex()))
            router.exporter.close(PATIENCE_S)
    assert ["no spans" in caplog.messages[0], "again" in caplog.messages[-1], len(caplog.records)] == [True, True, 2]


def test_a_defect_in_drawing_is_logged_and_does_not_stop_the_rest(receiver: Receiver, caplog: pytest.LogCaptureFixture) -> None:
    router = Router(receiver.endpoint, ratio=1.0)
    router.exporter._put(lambda: 1 / 0)  # type: ignore[arg-type, return-value]
    own = router.arrive("r")
    router.finish("r")
    router.exporter.close(PATIENCE_S)
    receiver.wait(lambda seen: by_name(seen, own.trace_id.hex()))
    assert "could not be built" in caplog.text


def test_without_an_endpoint_nothing_of_opentelemetry_is_loaded() -> None:
    script = (
        "import sys; from forefetch.settings import ServiceConfig; from forefetch.telemetry.spans import Exporter\n"
        "Exporter(ServiceConfig(), 'forefetch-kv').close()\n"
        "print([name for name in sys.modules if name.split('.')[0] in ('opentelemetry', 'torch', 'prometheus_client')])"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_the_callers_own_opentelemetry_span_is_found() -> None:
    script = (
        "from forefetch.telemetry import context\nassert context.current() is None\n"
        "from opentelemetry import trace\nassert context.current() is None\n"
        "flags = trace.TraceFlags(trace.TraceFlags.SAMPLED)\n"
        "span = trace.NonRecordingSpan(trace.SpanContext(0xabc, 0xdef, False, flags))\n"
        "with trace.use_span(span): print(context.current().traceparent)"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == f"00-{0xABC:032x}-{0xDEF:016x}-01"
