"""What probes and monitoring see of real processes: health over its own port, name by name, while workers and requests come and
go; and that every metric which the dashboard and the alerts name is exported."""

from __future__ import annotations

import json
import re
import signal
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path

import grpc
import pytest
import yaml
from cluster_calls import SMALL, Background, Router, Start, caught
from grpc_health.v1 import health_pb2, health_pb2_grpc
from prometheus_client.parser import text_string_to_metric_families
from reference_model import CASES
from waiting import stop, until

from forefetch import rpc
from forefetch.cluster import Cluster
from forefetch.v1 import router_pb2, router_pb2_grpc

CASE = "qwen3"
PROBES = ("--health-listen=127.0.0.1:0", "--metrics-listen=127.0.0.1:0")
OBSERVABILITY = Path(__file__).resolve().parents[2] / "deploy" / "observability"
SERVING, NOT_SERVING = health_pb2.HealthCheckResponse.SERVING, health_pb2.HealthCheckResponse.NOT_SERVING


@pytest.fixture(scope="module")
def cluster(start: Start) -> Cluster:
    return start(CASE, link="grpc", kv=True, router=(*SMALL, *PROBES), worker=PROBES, kv_flags=PROBES)


@pytest.fixture
def state(cluster: Cluster) -> Callable[[str, str], int]:
    """state(process, name): what that process says over its health port now."""

    def ask(process: str, name: str) -> int:
        with rpc.channel(cluster.processes[process].health) as channel:
            return int(
                health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(service=name), timeout=60).status
            )

    return ask


def test_idle_services_live_and_are_ready(cluster: Cluster, state: Callable[[str, str], int]) -> None:
    for process in cluster.processes:
        assert {state(process, name) for name in ("startup", "liveness", "readiness", "")} == {SERVING}


def test_the_health_port_serves_health_alone(cluster: Cluster) -> None:
    with rpc.channel(cluster.processes["router"].health) as channel:
        with pytest.raises(grpc.RpcError) as caught:
            router_pb2_grpc.RouterServiceStub(channel).Describe(router_pb2.DescribeRequest(), timeout=60)
    assert caught.value.code() == grpc.StatusCode.UNIMPLEMENTED


def test_readiness_goes_off_with_a_worker_and_liveness_does_not(cluster: Cluster, state: Callable[[str, str], int]) -> None:
    """The router is idle: nothing but the broken connection tells it."""
    cluster.kill("worker-1")
    until(lambda: state("router", "readiness") == NOT_SERVING)
    assert state("router", "forefetch.v1.RouterService") == NOT_SERVING
    assert state("router", "liveness") == SERVING
    assert state("router", "startup") == SERVING
    cluster.restart("worker-1")
    until(lambda: state("router", "readiness") == SERVING)


def test_a_stream_that_pauses_for_a_worker_leaves_the_router_alive(cluster: Cluster, state: Callable[[str, str], int]) -> None:
    router = Router(cluster.address)
    stream = Background(router, CASES[CASE].prompt, 150)
    stream.wait_for(5)
    cluster.kill("worker-0")
    until(lambda: state("router", "readiness") == NOT_SERVING)
    assert state("router", "liveness") == SERVING
    cluster.restart("worker-0")
    assert len(stream.done().tokens) == 150
    until(lambda: state("router", "readiness") == SERVING)
    router.close()


def expressions() -> Iterator[str]:
    """Every PromQL expression of the rules and the dashboard."""
    for group in yaml.safe_load((OBSERVABILITY / "rules.yaml").read_text())["groups"]:
        yield from (rule["expr"] for rule in group["rules"])
    for panel in json.loads((OBSERVABILITY / "dashboard.json").read_text())["panels"]:
        yield from (target["expr"] for target in panel.get("targets", ()))


METRIC = re.compile(r"\b((?:forefetch|gen_ai)_\w+)(?:\{([^}]*)\})?")
SCRAPED = {"namespace", "instance", "job"}  # labels that Prometheus adds


def exported(cluster: Cluster) -> dict[str, set[str]]:
    """Sample name -> label names, over /metrics of every process."""
    found: dict[str, set[str]] = {}
    for process in cluster.processes.values():
        with urllib.request.urlopen(f"http://{process.metrics}/metrics", timeout=60) as reply:
            for family in text_string_to_metric_families(reply.read().decode()):
                for sample in family.samples:
                    found.setdefault(sample.name, set()).update(sample.labels)
    return found


def test_every_metric_that_is_shown_or_alerted_on_is_exported(cluster: Cluster) -> None:
    router = Router(cluster.address)
    router.generate(CASES[CASE].prompt, 20)
    router.close()
    samples = exported(cluster)
    named = [found for expression in expressions() for found in METRIC.findall(expression)]
    assert len({name for name, _ in named}) > 25
    for name, matchers in named:
        assert name in samples, name
        assert set(re.findall(r"(\w+)(?:=|!)", matchers)) <= samples[name] | SCRAPED, f"{name}{{{matchers}}}"
    for expression in expressions():
        labels = {label for name, _ in METRIC.findall(expression) for label in samples[name]} | SCRAPED
        for by in re.findall(r"\bby \(([^)]*)\)", expression):
            assert set(re.findall(r"\w+", by)) <= labels, expression


def test_a_draining_router_is_alive_and_not_ready(cluster: Cluster) -> None:
    """Ends the module's router, so it comes last."""
    router, worker = Router(cluster.address), cluster.processes["worker-0"]
    (stream,) = caught(  # so that the drain does not end before it is looked at
        lambda: [Background(router, CASES[CASE].prompt, 200)],
        3,
        strike=lambda: stop(worker),
        undo=lambda: worker.signal(signal.SIGCONT),
    )
    with rpc.channel(cluster.processes["router"].health) as channel:
        stub = health_pb2_grpc.HealthStub(channel)
        cluster.processes["router"].signal(signal.SIGTERM)
        said = health_pb2.HealthCheckRequest(service="readiness")
        until(lambda: stub.Check(said, timeout=60).status == NOT_SERVING, every=0.005)
        assert stub.Check(health_pb2.HealthCheckRequest(service="liveness"), timeout=60).status == SERVING
    worker.signal(signal.SIGCONT)
    assert len(stream.done().tokens) == 200
    router.close()
