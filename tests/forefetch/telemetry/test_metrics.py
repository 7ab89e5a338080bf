"""Prometheus: what a scrape over HTTP shows, and the windows behind GetStats."""

from __future__ import annotations

import urllib.request

import pytest
from prometheus_client import CollectorRegistry
from prometheus_client.parser import text_string_to_metric_families

from forefetch.settings import ServiceConfig
from forefetch.telemetry import metric_rows, metrics, names
from forefetch.telemetry.ring import StepRing, Timings
from forefetch.telemetry.spans import Exporter
from forefetch.v1 import expert_pb2, kv_pb2, router_pb2


def scrape(registry: CollectorRegistry) -> dict[tuple[str, frozenset[tuple[str, str]]], float]:
    server = metrics.start_http("127.0.0.1:0", registry)
    assert server is not None
    try:
        with urllib.request.urlopen(f"http://{server.address}/metrics", timeout=60) as answer:
            text = answer.read().decode()
    finally:
        server.close()
    return {
        (sample.name, frozenset(sample.labels.items())): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def labels(**values: str) -> frozenset[tuple[str, str]]:
    return frozenset(values.items())


def test_router() -> None:
    registry, ring = metrics.new_registry(), StepRing(4, 1, 2)
    router = metrics.RouterMetrics(registry, "tiny", ring)
    stamps = ring.begin(0, 0)
    stamps.layer(0, 0, 0, 0, 4_000_000, 0)
    stamps.call(0, 1, 1, 3_000_000, 0, 0, 2_000_000)
    timings = stamps.finish(5_000_000, 500_000, 1, 1)
    router.first_token(names.CHAT, 30_000_000)
    router.token(names.CHAT, 1_500_000)
    router.step_finished(timings, prompt_tokens=7, completion_tokens=1)
    router.step_finished(timings, prompt_tokens=0, completion_tokens=1)
    router.step_replayed()
    router.request_finished(names.CHAT, 35_000_000, "OK")
    router.request_finished(names.TEXT_COMPLETION, 1_000_000, "UNAVAILABLE")

    def stats() -> router_pb2.GetStatsResponse:
        message = router_pb2.GetStatsResponse(
            running=3,
            pages_total=9,
            workers=[router_pb2.WorkerStatus(address="a:1", up=True), router_pb2.WorkerStatus(address="b:2", pairs=5)],
            kv=router_pb2.KvStatus(address="k:1", up=True, blocks_dropped=2),
        )
        router.fill(message)
        return message

    router.export(stats)
    message = stats()
    assert (message.requests_ok, dict(message.requests_failed)) == (1, {"UNAVAILABLE": 1})
    assert (message.prompt_tokens, message.completion_tokens, message.steps, message.replayed_steps) == (7, 2, 2, 1)
    assert (message.ttft.p50_ns, message.tpot.p99_ns, message.step.count) == (30_000_000, 1_500_000, 1)
    assert (message.mean_step.total_ns, message.mean_step.batch, message.mean_step.link_ns) == (5_000_000, 1, 2_000_000)

    seen = scrape(registry)
    gen_ai = {"gen_ai_operation_name": "chat", "gen_ai_provider_name": "forefetch", "gen_ai_request_model": "tiny"}
    for below, count in (("0.001", 0), ("0.002", 1), ("0.005", 1)):
        assert seen["gen_ai_server_time_per_output_token_seconds_bucket", labels(**gen_ai, le=below)] == count
    assert seen["gen_ai_server_time_to_first_token_seconds_count", labels(**gen_ai, error_type="")] == 1
    assert seen["gen_ai_server_request_duration_seconds_sum", labels(**gen_ai, error_type="")] == pytest.approx(0.035)
    assert seen["forefetch_router_requests_total", labels(status="UNAVAILABLE")] == 1
    assert seen["forefetch_router_running", labels()] == 3
    assert seen["forefetch_router_worker_up", labels(worker="a:1")] == 1
    assert seen["forefetch_router_worker_pairs_total", labels(worker="b:2")] == 5
    assert seen["forefetch_router_worker_seconds_total", labels(worker="b:2", part="compute")] == pytest.approx(0.002)
    assert seen["forefetch_router_step_part_seconds_total", labels(part="link")] == pytest.approx(0.004)
    assert seen["forefetch_router_step_duration_seconds_count", labels(kind="decode")] == 1
    assert seen["forefetch_router_kv_blocks_dropped_total", labels()] == 2
    assert ("process_resident_memory_bytes", labels()) in seen


def test_router_without_kv_service_shows_none() -> None:
    registry = CollectorRegistry()
    metrics.RouterMetrics(registry, "tiny", StepRing(4, 1, 0)).export(router_pb2.GetStatsResponse)
    assert not [name for name, _ in scrape(registry) if "_kv_" in name]


def test_expert_worker() -> None:
    registry = CollectorRegistry()
    load = expert_pb2.ExpertLoad(layer=3, experts=[0, 5], pairs=[7, 9])
    stats = expert_pb2.ExpertServiceGetStatsResponse(calls=4, compute_ns=2_000_000_000, load=[load])
    metrics.ExpertMetrics(registry, lambda: stats)
    seen = scrape(registry)
    assert seen["forefetch_expert_calls_total", labels()] == 4
    assert seen["forefetch_expert_compute_seconds_total", labels()] == 2.0
    assert seen["forefetch_expert_load_pairs_total", labels(layer="3", expert="5")] == 9


def test_kv_service() -> None:
    registry = CollectorRegistry()
    metrics.KvMetrics(registry, lambda: kv_pb2.KvServiceGetStatsResponse(blocks=2, conflicts=1))
    seen = scrape(registry)
    assert (seen["forefetch_kv_blocks", labels()], seen["forefetch_kv_conflicts_total", labels()]) == (2, 1)


def test_spans() -> None:
    registry, exporter = CollectorRegistry(), Exporter(ServiceConfig(), names.SERVICE_KV)
    metrics.SpanMetrics(registry, exporter)
    exporter.dropped = 3
    assert scrape(registry)["forefetch_spans_dropped_total", labels()] == 3


def test_every_row_reads_a_real_field_and_every_counter_is_named_so() -> None:
    for rows, message in (
        (metric_rows.ROUTER, router_pb2.GetStatsResponse()),
        (metric_rows.EXPERT, expert_pb2.ExpertServiceGetStatsResponse()),
        (metric_rows.KV, kv_pb2.KvServiceGetStatsResponse()),
    ):
        for metric, value in rows:
            assert metric.name.startswith("forefetch_")
            value(message)


def test_no_address_no_server_and_a_taken_port_says_so() -> None:
    assert metrics.start_http("", CollectorRegistry()) is None
    server = metrics.MetricsServer("127.0.0.1:0", CollectorRegistry())
    try:
        with pytest.raises(OSError, match="in use"):
            metrics.MetricsServer(server.address, CollectorRegistry())
    finally:
        server.close()


def test_window_keeps_the_last_and_counts_all() -> None:
    window = metrics.Window(size=100)
    assert window.quantile(0.5) == 0
    for value in range(1_000, 0, -1):
        window.add(value)
    assert (window.quantile(0.5), window.quantile(0.99), window.quantile(1.0), window.count) == (51, 100, 100, 1_000)


def test_timings_have_the_fields_of_the_proto() -> None:
    assert list(Timings.__slots__) == [field.name for field in router_pb2.StepTimings.DESCRIPTOR.fields]
    assert {part + "_ns" for part in names.PARTS} | {
        "total_ns",
        "batch",
        "tokens",
        "lookahead_hidden_ns",
        "shadow_experts",
    } == set(Timings.__slots__)
