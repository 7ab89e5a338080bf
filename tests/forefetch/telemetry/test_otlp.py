"""Our encoding of spans against that of OpenTelemetry's own exporter, message by message."""

from __future__ import annotations

from typing import Any

import pytest
from opentelemetry.exporter.otlp.proto.common.trace_encoder import encode_spans
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.util.instrumentation import InstrumentationScope
from opentelemetry.trace import Link, SpanContext, SpanKind, Status, StatusCode, TraceFlags

from forefetch.telemetry import names, otlp
from forefetch.telemetry.context import new_root
from forefetch.version import VERSION

ROOT = new_root(True)
ROUTER, WORKER = otlp.Resource("forefetch-router", "h:1"), otlp.Resource("forefetch-expert", "h:2")
CHILD, LINKED = ROOT.child(), new_root(True)
SPANS = [
    otlp.Span(ROOT, None, "forefetch.generate", 10**18, 10**18 + 5, ROUTER, otlp.SERVER, {"a": 1, "b": "text"}),
    otlp.Span(CHILD, ROOT, "forefetch.decode_step", 10**18 + 1, 10**18 + 4, ROUTER, links=(LINKED,)),
    otlp.Span(CHILD.child(), CHILD, "forefetch.expert_call", 10**18 + 2, 10**18 + 3, WORKER, otlp.CLIENT, {"c": ["x", "y"]}),
    otlp.Span(CHILD.child(), CHILD, "forefetch.kv_fetch", 10**18 + 2, 10**18 + 3, ROUTER, error="UNAVAILABLE"),
]


def theirs(span: otlp.Span) -> ReadableSpan:
    def context(ours: Any) -> SpanContext:
        ids = (int.from_bytes(part, "big") for part in (ours.trace_id, ours.span_id))
        return SpanContext(*ids, is_remote=False, trace_flags=TraceFlags(1))

    identity = {names.SERVICE_NAME: span.resource.service, names.SERVICE_INSTANCE: span.resource.instance}
    error = {names.ERROR_TYPE: span.error} if span.error else {}
    return ReadableSpan(
        name=span.name,
        context=context(span.context),
        parent=context(span.parent) if span.parent else None,
        resource=Resource({**identity, names.SERVICE_VERSION: VERSION}),
        attributes={**span.attributes, **error},  # type: ignore[dict-item]
        links=[Link(context(link)) for link in span.links],
        kind={otlp.SERVER: SpanKind.SERVER, otlp.CLIENT: SpanKind.CLIENT}.get(span.kind, SpanKind.INTERNAL),
        status=Status(StatusCode.ERROR) if span.error else Status(StatusCode.UNSET),
        start_time=span.start_ns,
        end_time=span.end_ns,
        instrumentation_scope=InstrumentationScope("forefetch", VERSION),
    )


def plain(request: Any) -> dict[str, Any]:
    """Service -> its resource, scope and spans, in an order that does not depend on who encoded them. Set aside: that ours say
    in their flags that they were sampled, theirs of links that they are not remote, and write down an empty status."""
    found: dict[str, Any] = {}
    for group in request.resource_spans:
        attributes = {item.key: item.value.SerializeToString() for item in group.resource.attributes}
        service = next(item.value.string_value for item in group.resource.attributes if item.key == names.SERVICE_NAME)
        (scope,) = group.scope_spans
        spans = []
        for span in scope.spans:
            for link in span.links:
                link.flags = 0
            span.flags &= ~1
            if not span.status.ByteSize():
                span.ClearField("status")
            span.attributes.sort(key=lambda item: item.key)
            spans.append(span.SerializeToString(deterministic=True))
        found[service] = attributes, scope.scope.SerializeToString(), sorted(spans)
    return found


def test_a_batch_is_what_the_library_would_send() -> None:
    batch = otlp.Batch()
    for span in SPANS:
        batch.add(span)
    assert plain(batch.request) == plain(encode_spans([theirs(span) for span in SPANS]))


@pytest.mark.parametrize("wrong", [{"end_ns": 1}, {"name": "x"}, {"kind": otlp.CLIENT}, {"error": "OTHER"}, {"links": ()}])
def test_the_comparison_bites(wrong: dict[str, Any]) -> None:
    from dataclasses import replace

    batch = otlp.Batch()
    batch.add(replace(SPANS[1], **wrong))
    assert plain(batch.request) != plain(encode_spans([theirs(SPANS[1])]))
