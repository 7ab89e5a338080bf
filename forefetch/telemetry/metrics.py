"""Prometheus metrics. Each process makes a registry and hands it on; there is no global one.

Counters and gauges are read at scrape time out of the same GetStats message that operators get, so the hot path pays only for
its histograms: 0.8 us an observation.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Generic

from prometheus_client import CollectorRegistry, Histogram, ProcessCollector, start_http_server
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from forefetch.telemetry import metric_rows, names
from forefetch.telemetry.metric_rows import Message, Row, Value
from forefetch.telemetry.ring import StepRing, Timings
from forefetch.telemetry.spans import Exporter
from forefetch.v1 import expert_pb2, kv_pb2, router_pb2

_WINDOW = 1024
_STEP_WINDOW = 256
_DURATIONS = (0.01, 0.02, 0.04, 0.08, 0.16, 0.32, 0.64, 1.28, 2.56, 5.12, 10.24, 20.48, 40.96, 81.92)
_FIRST_TOKEN = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0)
# The convention starts at 10 ms; 1, 2 and 5 ms are ours.
_OUTPUT_TOKEN = (0.001, 0.002, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5)
_STEP = (0.0005, 0.001, 0.002, 0.003, 0.005, 0.0075, 0.01, 0.015, 0.02, 0.03, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5)


def new_registry() -> CollectorRegistry:
    """A registry with the process's own metrics (CPU, memory, descriptors)."""
    registry = CollectorRegistry()
    ProcessCollector(registry=registry)
    return registry


class MetricsServer:
    """`/metrics` over HTTP. `address` is the bound host:port."""

    def __init__(self, listen: str, registry: CollectorRegistry) -> None:
        """OSError when `listen` (host:port, port 0 takes a free one) cannot be bound."""
        host, _, port = listen.rpartition(":")
        self._server, self._thread = start_http_server(int(port), host.strip("[]"), registry)
        self.address = f"{host}:{self._server.server_port}"

    def close(self) -> None:
        """Stops serving."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join(timeout=2.0)


def start_http(listen: str, registry: CollectorRegistry) -> MetricsServer | None:
    """The process's `/metrics`, or None when `listen` is empty."""
    return MetricsServer(listen, registry) if listen else None


class Window:
    """The last `size` of a series of durations, in nanoseconds. One thread adds, any thread asks."""

    def __init__(self, size: int = _WINDOW) -> None:
        self._values: deque[int] = deque(maxlen=size)
        self.count = 0

    def add(self, ns: int) -> None:
        """One more observation."""
        self._values.append(ns)
        self.count += 1

    def quantile(self, q: float) -> int:
        """Nearest rank, `q` in [0, 1]; 0 when empty."""
        values = sorted(self._values.copy())
        return values[min(int(q * len(values)), len(values) - 1)] if values else 0

    def message(self) -> router_pb2.Quantiles:
        """The proto form."""
        return router_pb2.Quantiles(p50_ns=self.quantile(0.5), p99_ns=self.quantile(0.99), count=self.count)


class _Reader(Collector, Generic[Message]):
    """Turns one message into metric families when Prometheus asks."""

    def __init__(self, read: Callable[[], Message], rows: Sequence[Row[Message]]) -> None:
        self._read, self._rows = read, rows

    def collect(self) -> Iterator[Metric]:
        message = self._read()
        for metric, value in self._rows:
            yield _family(metric, value(message))


def _family(metric: names.Metric, value: float | Iterable[Value]) -> Metric:
    kind = CounterMetricFamily if metric.name.endswith("_total") else GaugeMetricFamily
    family = kind(metric.name, metric.help, labels=metric.labels)
    for labels, number in [((), value)] if isinstance(value, int | float) else value:
        family.add_metric(labels, number)
    return family


class RouterMetrics:
    """What the router counts. One instance; `step_finished` and `token` belong to the engine's thread."""

    def __init__(self, registry: CollectorRegistry, model: str, ring: StepRing) -> None:
        def histogram(metric: names.Metric, buckets: Sequence[float]) -> Histogram:
            return Histogram(metric.name, metric.help, metric.labels, buckets=buckets, registry=registry)

        self._registry, self._model, self._ring = registry, model, ring
        self._duration = histogram(names.REQUEST_DURATION, _DURATIONS)
        self._first = histogram(names.TIME_TO_FIRST_TOKEN, _FIRST_TOKEN)
        per_token = histogram(names.TIME_PER_OUTPUT_TOKEN, _OUTPUT_TOKEN)
        step = histogram(names.STEP_DURATION, _STEP)
        self._per_token = {kind: per_token.labels(kind, names.PROVIDER, model) for kind in (names.CHAT, names.TEXT_COMPLETION)}
        self._step = {True: step.labels("decode"), False: step.labels("prefill")}
        self._ttft, self._tpot, self._steps = Window(), Window(), Window()
        self._recent: deque[Timings] = deque(maxlen=_STEP_WINDOW)
        self._parts = dict.fromkeys(names.PARTS, 0)
        self._ended: Counter[str] = Counter()
        self._prompt_tokens = self._completion_tokens = self._step_count = self._replayed = 0

    def token(self, operation: str, since_previous_ns: int) -> None:
        """A token after the first reached its stream."""
        self._per_token[operation].observe(since_previous_ns * 1e-9)
        self._tpot.add(since_previous_ns)

    def first_token(self, operation: str, ttft_ns: int) -> None:
        """A first token reached its stream, `ttft_ns` after its request arrived."""
        self._first.labels(operation, names.PROVIDER, self._model, "").observe(ttft_ns * 1e-9)
        self._ttft.add(ttft_ns)

    def step_finished(self, timings: Timings, *, prompt_tokens: int, completion_tokens: int) -> None:
        """A step was committed; it computed and generated so many tokens."""
        self._step_count += 1
        self._prompt_tokens += prompt_tokens
        self._completion_tokens += completion_tokens
        self._step[prompt_tokens == 0].observe(timings.total_ns * 1e-9)
        if prompt_tokens == 0:
            self._steps.add(timings.total_ns)
        self._recent.append(timings)
        for part in names.PARTS:
            self._parts[part] += getattr(timings, part + "_ns")

    def step_replayed(self) -> None:
        """A step broke and will run again."""
        self._replayed += 1

    def request_finished(self, operation: str, duration_ns: int, status: str) -> None:
        """A request ended in the gRPC status named `status`."""
        error = "" if status == "OK" else status
        self._duration.labels(operation, names.PROVIDER, self._model, error).observe(duration_ns * 1e-9)
        self._ended[status] += 1

    def fill(self, stats: router_pb2.GetStatsResponse) -> None:
        """Sets what this object knows: requests, tokens, steps, quantiles, the mean step."""
        ended = dict(self._ended)
        stats.requests_ok = ended.pop("OK", 0)
        stats.requests_failed.update(ended)
        stats.prompt_tokens, stats.completion_tokens = self._prompt_tokens, self._completion_tokens
        stats.steps, stats.replayed_steps = self._step_count, self._replayed
        for field, window in (("ttft", self._ttft), ("tpot", self._tpot), ("step", self._steps)):
            getattr(stats, field).CopyFrom(window.message())
        recent = list(self._recent)
        for name in Timings.__slots__ if recent else ():
            setattr(stats.mean_step, name, round(sum(getattr(timings, name) for timings in recent) / len(recent)))

    def export(self, stats: Callable[[], router_pb2.GetStatsResponse]) -> None:
        """Registers everything that `stats` knows. Call once; `stats` is called at each scrape, from another thread."""
        self._registry.register(_Reader(stats, (*metric_rows.ROUTER, (names.STEP_SECONDS, self._part_seconds))))
        self._registry.register(_Reader(stats, ((names.WORKER_SECONDS, self._worker_seconds),)))

    def _part_seconds(self, _: router_pb2.GetStatsResponse) -> Iterator[Value]:
        return (((part,), ns * 1e-9) for part, ns in self._parts.items())

    def _worker_seconds(self, stats: router_pb2.GetStatsResponse) -> Iterator[Value]:
        for worker, totals in zip(stats.workers, self._ring.worker_totals().tolist(), strict=False):
            for part, ns in zip(("round_trip", "queue", "copy_wait", "compute"), totals[2:], strict=True):
                yield (worker.address, part), ns * 1e-9


class ExpertMetrics:
    """An expert worker's metrics, all read from its GetStats."""

    def __init__(self, registry: CollectorRegistry, stats: Callable[[], expert_pb2.ExpertServiceGetStatsResponse]) -> None:
        registry.register(_Reader(stats, metric_rows.EXPERT))


class KvMetrics:
    """A KV service's metrics, all read from its GetStats."""

    def __init__(self, registry: CollectorRegistry, stats: Callable[[], kv_pb2.KvServiceGetStatsResponse]) -> None:
        registry.register(_Reader(stats, metric_rows.KV))


class SpanMetrics:
    """What became of the spans of a process."""

    def __init__(self, registry: CollectorRegistry, exporter: Exporter) -> None:
        registry.register(_Reader(lambda: exporter, metric_rows.SPANS))
