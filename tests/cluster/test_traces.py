"""One trace from a caller's own span through router, workers and KV service, as a collector receives it from the processes."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from cluster_calls import SMALL
from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from otlp_receiver import GrpcReceiver, Received

from forefetch.client import SyncClient
from forefetch.cluster import Cluster, ClusterConfig, Extra
from forefetch.telemetry import names


def test_a_callers_span_leads_to_every_process(checkpoint: Callable[[str], Path]) -> None:
    with GrpcReceiver() as receiver:
        config = ClusterConfig(
            model=str(checkpoint("qwen3")), workers=2, port=0, device="cpu", start_s=240.0, otlp_endpoint=receiver.endpoint
        )
        provider = TracerProvider(
            resource=Resource({"service.name": "app", "service.instance.id": "1", "service.version": "1"})
        )
        provider.add_span_processor(SimpleSpanProcessor(OTLPSpanExporter(receiver.endpoint, insecure=True)))
        with Cluster.start(config, extra=Extra(router=SMALL)) as cluster, SyncClient(cluster.address) as client:
            workers = {cluster.processes[name].address for name in cluster.worker_names}
            with provider.get_tracer("app").start_as_current_span("ask") as caller:
                completion = client.complete(list(range(3, 43)), max_tokens=8, ignore_eos=True, request_id="traced")
            quiet = client.complete([5, 6, 7], max_tokens=2, ignore_eos=True)
            trace = client.trace("traced")
            wanted = {(names.SERVICE_ROUTER, name) for name in (names.GENERATE, names.KV_FETCH, names.KV_PUT)}
            wanted |= {(names.SERVICE_KV, name) for name in (names.KV_LOOK_UP, names.KV_PUT)}
            wanted |= {(worker, names.EXPERT_FORWARD) for worker in workers} | {("app", "ask")}
            seen = receiver.wait(lambda spans: wanted <= whole([span for span in spans if span.trace == trace.trace_id]))
        provider.shutdown()
    assert quiet.text is not None
    assert trace.trace_id == f"{caller.get_span_context().trace_id:032x}"
    mine = [span for span in seen if span.trace == trace.trace_id]
    parents = {span.span: span for span in mine}

    def edges(name: str) -> set[tuple[str, str, str]]:
        """(service above, span above, service) of every span of that name."""
        found = [(parents[span.parent], span) for span in mine if span.name == name]
        return {(above.service, above.name, span.service) for above, span in found}

    router, expert, kv = names.SERVICE_ROUTER, names.SERVICE_EXPERT, names.SERVICE_KV
    assert edges(names.GENERATE) == {("app", "ask", router)}
    assert edges(names.PREFILL) == edges(names.DECODE_STEP) == {(router, names.GENERATE, router)}
    assert edges(names.EXPERT_CALL) == {(router, names.LAYER, router)}
    assert edges(names.EXPERT_FORWARD) == {(router, names.EXPERT_CALL, expert)}
    assert edges(names.KV_PUT) == {(router, names.GENERATE, router), (router, names.KV_PUT, kv)}
    assert edges(names.KV_FETCH) == {(router, names.GENERATE, router)}
    assert (router, names.KV_FETCH, kv) in edges(names.KV_LOOK_UP)
    assert {span.instance for span in mine if span.service == expert} == workers
    (request,) = [span for span in mine if span.name == names.GENERATE]
    assert request.attributes[names.OUTPUT_TOKENS] == len(completion.token_ids) == 8
    assert request.attributes[names.FINISH_REASONS] == ["length"]
    assert len([span for span in mine if span.name == names.DECODE_STEP]) == 7
    assert_nested(mine, parents)


def whole(spans: list[Received]) -> set[tuple[str, str]]:
    """Which spans have come, by service or process; nothing while one waits for its parent, as every process exports in
    batches of its own."""
    have = {span.span for span in spans} | {""}
    complete = all(span.parent in have for span in spans)
    return {(who, span.name) for span in spans for who in (span.service, span.instance)} if complete else set()


def assert_nested(spans: list[Received], parents: dict[str, Received]) -> None:
    """Children begin and end within their parents, but for hand-over, which goes on after its request."""
    for span in spans:
        above = parents.get(span.parent)
        if above and names.KV_PUT not in (span.name, above.name):
            assert above.start_ns <= span.start_ns <= span.end_ns <= above.end_ns, (above, span)
