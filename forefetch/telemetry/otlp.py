"""Spans as OTLP messages, and the two ways to bring them to a collector.

Messages are built straight from `opentelemetry-proto`, not through OpenTelemetry's SDK: our spans are drawn after the fact,
with ids that already travelled in frames and a resource for each worker, and cost a fifth of what the SDK takes
(ARCHITECTURE.md, "Spans on their way out").
"""

from __future__ import annotations

import http.client
import urllib.error
import urllib.request
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeAlias

import grpc
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2_grpc import TraceServiceStub
from opentelemetry.proto.common.v1.common_pb2 import InstrumentationScope
from opentelemetry.proto.trace.v1 import trace_pb2

from forefetch.telemetry import names
from forefetch.telemetry.context import SpanContext
from forefetch.version import VERSION

INTERNAL, SERVER, CLIENT = trace_pb2.Span.SPAN_KIND_INTERNAL, trace_pb2.Span.SPAN_KIND_SERVER, trace_pb2.Span.SPAN_KIND_CLIENT

Kind: TypeAlias = "trace_pb2.Span.SpanKind.ValueType"
Value = int | str | Sequence[str]


class Resource(NamedTuple):
    """The process that a span is drawn under."""

    service: str
    instance: str


@dataclass(slots=True)
class Span:
    """A finished span. Times are nanoseconds since the epoch; `error` is an error type, empty when all went well."""

    context: SpanContext
    parent: SpanContext | None
    name: str
    start_ns: int
    end_ns: int
    resource: Resource
    kind: Kind = INTERNAL
    attributes: Mapping[str, Value] = field(default_factory=dict)
    links: Sequence[SpanContext] = ()
    error: str = ""


class SendError(Exception):
    """A batch was not taken. `again`: it may be, later."""

    def __init__(self, reason: str, again: bool) -> None:
        super().__init__(reason)
        self.again = again


class Batch:
    """An export request that grows by spans, grouped by resource. `size` is their number."""

    def __init__(self) -> None:
        self.request, self.size = ExportTraceServiceRequest(), 0
        self._groups: dict[Resource, trace_pb2.ScopeSpans] = {}

    def add(self, span: Span) -> None:
        """One more span, encoded now."""
        group = self._groups.get(span.resource)
        if group is None:
            group = self._groups[span.resource] = self._group(span.resource)
        _add(group, span)
        self.size += 1

    def _group(self, resource: Resource) -> trace_pb2.ScopeSpans:
        spans = self.request.resource_spans.add()
        identity = {names.SERVICE_NAME: resource.service, names.SERVICE_INSTANCE: resource.instance}
        _set(spans.resource.attributes, {**identity, names.SERVICE_VERSION: VERSION})
        return spans.scope_spans.add(scope=InstrumentationScope(name="forefetch", version=VERSION))


def _add(group: trace_pb2.ScopeSpans, span: Span) -> None:
    message = group.spans.add(
        trace_id=span.context.trace_id,
        span_id=span.context.span_id,
        parent_span_id=span.parent.span_id if span.parent else b"",
        flags=trace_pb2.SPAN_FLAGS_CONTEXT_HAS_IS_REMOTE_MASK | 1,
        name=span.name,
        kind=span.kind,
        start_time_unix_nano=span.start_ns,
        end_time_unix_nano=span.end_ns,
    )
    _set(message.attributes, span.attributes)
    for link in span.links:
        message.links.add(trace_id=link.trace_id, span_id=link.span_id)
    if span.error:
        _set(message.attributes, {names.ERROR_TYPE: span.error})
        message.status.code = trace_pb2.Status.STATUS_CODE_ERROR


def _set(attributes: Any, values: Mapping[str, Value]) -> None:
    """Appends key and value; filled in place, which takes a third of building messages and handing them over."""
    for key, value in values.items():
        item = attributes.add()
        item.key = key
        if isinstance(value, int):
            item.value.int_value = value
        elif isinstance(value, str):
            item.value.string_value = value
        else:
            for text in value:
                item.value.array_value.values.add().string_value = text


class Sender(ABC):
    """Brings batches to one collector."""

    @abstractmethod
    def send(self, request: ExportTraceServiceRequest, timeout_s: float) -> None:
        """Returns when the collector took the batch; SendError within about `timeout_s` seconds otherwise."""

    @abstractmethod
    def close(self) -> None:
        """Lets go of the connection; a running `send` ends soon."""


def sender(endpoint: str) -> Sender:
    """OTLP/gRPC for `host:port`, OTLP/HTTP with protobuf for an http or https address (`/v1/traces` unless it has a path)."""
    return HttpSender(endpoint) if endpoint.startswith(("http://", "https://")) else GrpcSender(endpoint)


class GrpcSender(Sender):
    """OTLP/gRPC without TLS."""

    _AGAIN = (
        grpc.StatusCode.UNAVAILABLE,
        grpc.StatusCode.DEADLINE_EXCEEDED,
        grpc.StatusCode.RESOURCE_EXHAUSTED,
        grpc.StatusCode.ABORTED,
        grpc.StatusCode.CANCELLED,
    )

    def __init__(self, endpoint: str) -> None:
        self._channel = grpc.insecure_channel(endpoint, options=[("grpc.max_reconnect_backoff_ms", 5_000)])
        self._stub = TraceServiceStub(self._channel)  # type: ignore[no-untyped-call]

    def send(self, request: ExportTraceServiceRequest, timeout_s: float) -> None:
        """See `Sender`."""
        try:
            self._stub.Export(request, timeout=timeout_s)
        except grpc.RpcError as error:
            raise SendError(error.code().name, error.code() in self._AGAIN) from None
        except ValueError:  # the channel was closed
            raise SendError("closed", again=False) from None

    def close(self) -> None:
        """See `Sender`."""
        self._channel.close()


class HttpSender(Sender):
    """OTLP/HTTP with protobuf bodies. Proxies of the environment are not asked."""

    _AGAIN = (429, 502, 503, 504)

    def __init__(self, endpoint: str) -> None:
        scheme, _, rest = endpoint.partition("://")
        host, _, path = rest.partition("/")
        self._url = f"{scheme}://{host}/{path or 'v1/traces'}"
        self._opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))

    def send(self, request: ExportTraceServiceRequest, timeout_s: float) -> None:
        """See `Sender`."""
        post = urllib.request.Request(self._url, request.SerializeToString(), {"Content-Type": "application/x-protobuf"})
        try:
            with self._opener.open(post, timeout=timeout_s):
                pass
        except urllib.error.HTTPError as error:
            error.close()
            raise SendError(f"HTTP {error.code}", error.code in self._AGAIN) from None
        except (OSError, http.client.HTTPException) as error:
            raise SendError(type(error).__name__, again=True) from None

    def close(self) -> None:
        """See `Sender`."""
        self._opener.close()
