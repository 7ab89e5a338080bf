"""OTLP receivers as processes of their own, for tests that assert on spans.

`GrpcReceiver` serves the protocol's own TraceService (this file run as a program); `OtelTap` is the third-party receiver of
that name, for OTLP/HTTP. It does not pass on resources, so `service` and `instance` stay empty there.
"""

from __future__ import annotations

import json
import subprocess
import sys
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from concurrent import futures
from dataclasses import dataclass
from typing import Any

import grpc
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2 as messages
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2_grpc as services
from waiting import PATIENCE_S, kept_port


@dataclass(frozen=True)
class Received:
    service: str
    instance: str
    trace: str
    span: str
    parent: str
    name: str
    kind: int
    start_ns: int
    end_ns: int
    attributes: dict[str, Any]
    links: tuple[tuple[str, str], ...]
    failed: bool


class Receiver(ABC):
    """Starts the process, collects what it prints. `endpoint` is what goes into otlp_endpoint."""

    endpoint: str

    def __init__(self, command: Sequence[str]) -> None:
        self._spans: list[Received] = []
        self._changed = threading.Condition()
        self._process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        assert self._process.stdout is not None
        self._lines = iter(self._process.stdout)
        self._start(next(self._lines))
        self._thread = threading.Thread(target=self._collect, daemon=True)
        self._thread.start()

    @abstractmethod
    def _start(self, line: str) -> None:
        """Reads the process's first line."""

    @abstractmethod
    def _parse(self, line: str) -> Iterator[Received]:
        """Reads any other line."""

    def _collect(self) -> None:
        for line in self._lines:
            with self._changed:
                self._spans.extend(self._parse(line))
                self._changed.notify_all()

    def wait(self, enough: Callable[[list[Received]], Any], timeout_s: float = PATIENCE_S) -> list[Received]:
        """All spans so far, as soon as `enough` of them holds. AssertionError with their names when that takes too long."""
        with self._changed:
            held = self._changed.wait_for(lambda: enough(self._spans), timeout_s)
            assert held, [(span.service, span.name) for span in self._spans]
            return list(self._spans)

    def close(self) -> None:
        self._process.terminate()
        self._process.wait(60)
        self._thread.join(60)
        assert self._process.stdout is not None
        self._process.stdout.close()

    def __enter__(self) -> Receiver:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class GrpcReceiver(Receiver):
    def __init__(self, port: int = 0) -> None:
        super().__init__([sys.executable, __file__, str(port)])

    def _start(self, line: str) -> None:
        self.endpoint = f"127.0.0.1:{int(line)}"

    def _parse(self, line: str) -> Iterator[Received]:
        for resource in messages.ExportTraceServiceRequest.FromString(bytes.fromhex(line)).resource_spans:
            process = {item.key: item.value.string_value for item in resource.resource.attributes}
            assert process["service.version"]
            for scope in resource.scope_spans:
                for span in scope.spans:
                    yield Received(
                        service=process["service.name"],
                        instance=process["service.instance.id"],
                        trace=span.trace_id.hex(),
                        span=span.span_id.hex(),
                        parent=span.parent_span_id.hex(),
                        name=span.name,
                        kind=span.kind,
                        start_ns=span.start_time_unix_nano,
                        end_ns=span.end_time_unix_nano,
                        attributes={item.key: _plain(item.value) for item in span.attributes},
                        links=tuple((link.trace_id.hex(), link.span_id.hex()) for link in span.links),
                        failed=span.status.code == 2,
                    )


def _plain(value: Any) -> Any:
    kind = value.WhichOneof("value")
    return [_plain(item) for item in value.array_value.values] if kind == "array_value" else getattr(value, kind)


class OtelTap(Receiver):
    def __init__(self) -> None:
        with kept_port() as port:  # it cannot take port 0
            self.endpoint = f"http://127.0.0.1:{port}"
            super().__init__([sys.executable, "-u", "-m", "oteltap", "--port", str(port)])

    def _start(self, line: str) -> None:
        assert "Listening" in line

    def _parse(self, line: str) -> Iterator[Received]:
        span = json.loads(line)
        yield Received(
            service="",
            instance="",
            trace=span["traceId"],
            span=span["spanId"],
            parent=span["parentSpanId"],
            name=span["name"],
            kind=span["kind"],
            start_ns=int(span["startTimeUnixNano"]),
            end_ns=int(span["endTimeUnixNano"]),
            attributes={item["key"]: next(iter(item["value"].values())) for item in span["attributes"]},
            links=tuple((link["traceId"], link["spanId"]) for link in span["links"]),
            failed=(span["status"] or {}).get("code") == 2,
        )


class _TraceService(services.TraceServiceServicer):
    def Export(self, request: messages.ExportTraceServiceRequest, context: grpc.ServicerContext) -> Any:
        print(request.SerializeToString().hex(), flush=True)
        return messages.ExportTraceServiceResponse()


def main() -> None:
    server = grpc.server(futures.ThreadPoolExecutor(1))
    services.add_TraceServiceServicer_to_server(_TraceService(), server)
    port = server.add_insecure_port(f"127.0.0.1:{sys.argv[1]}")
    server.start()
    print(port, flush=True)
    while True:
        time.sleep(600)


if __name__ == "__main__":
    main()
