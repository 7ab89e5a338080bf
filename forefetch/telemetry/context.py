"""Which trace a request belongs to: W3C trace context as text (gRPC metadata) and as 25 bytes (frames)."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Iterable
from dataclasses import dataclass

TRACEPARENT = "traceparent"
TRACESTATE = "tracestate"
SIZE = 25
_SAMPLED = 0x01
_TRACEPARENT = re.compile(r"([0-9a-f]{2})-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})(-.*)?")


@dataclass(frozen=True, slots=True)
class SpanContext:
    """A span's identity. `trace_id` 16 bytes and `span_id` 8, neither all zero; `detail` asks for layers of every step."""

    trace_id: bytes
    span_id: bytes
    sampled: bool = True
    detail: bool = False

    def child(self) -> SpanContext:
        """A new span of the same trace."""
        return SpanContext(self.trace_id, new_id(8), self.sampled, self.detail)

    @property
    def traceparent(self) -> str:
        """The header's text."""
        return f"00-{self.trace_id.hex()}-{self.span_id.hex()}-{int(self.sampled):02x}"

    def to_bytes(self) -> bytes:
        """Trace id, span id, flags: 25 bytes, as frames carry them."""
        return self.trace_id + self.span_id + bytes((int(self.sampled),))


def new_id(size: int) -> bytes:
    """`size` random bytes, not all zero."""
    while not any(drawn := os.urandom(size)):
        pass
    return drawn


def new_root(sampled: bool) -> SpanContext:
    """The first span of a new trace."""
    return SpanContext(new_id(16), new_id(8), sampled)


def from_bytes(data: bytes) -> SpanContext | None:
    """Inverse of `to_bytes`; None unless it is 25 bytes that name a span."""
    if len(data) != SIZE or not any(data[:16]) or not any(data[16:24]):
        return None
    return SpanContext(bytes(data[:16]), bytes(data[16:24]), bool(data[24] & _SAMPLED))


def parse(traceparent: str, tracestate: str = "") -> SpanContext | None:
    """The context in a header, or None when it is not exactly what W3C allows: then a new trace begins.

    A later version than 00 may have more fields, which are ignored. `tracestate` may hold `forefetch=detail`.
    """
    match = _TRACEPARENT.fullmatch(traceparent)
    if not match:
        return None
    version, trace_id, span_id, flags, rest = match.groups()
    if version == "ff" or (version == "00" and rest) or not int(trace_id, 16) or not int(span_id, 16):
        return None
    detail = "forefetch=detail" in (member.strip() for member in tracestate.split(","))
    return SpanContext(bytes.fromhex(trace_id), bytes.fromhex(span_id), bool(int(flags, 16) & _SAMPLED), detail)


def from_metadata(metadata: Iterable[tuple[str, str | bytes]] | None) -> SpanContext | None:
    """The caller's context out of gRPC invocation metadata."""
    found = {key: value for key, value in metadata or () if key in (TRACEPARENT, TRACESTATE)}
    traceparent, tracestate = found.get(TRACEPARENT), found.get(TRACESTATE, "")
    return parse(traceparent, tracestate if isinstance(tracestate, str) else "") if isinstance(traceparent, str) else None


def current() -> SpanContext | None:
    """The span that this process's own OpenTelemetry has open here; None when that is not loaded or has none."""
    api = sys.modules.get("opentelemetry.trace")
    span = api.get_current_span().get_span_context() if api else None
    if span is None or not span.is_valid:
        return None
    return SpanContext(span.trace_id.to_bytes(16, "big"), span.span_id.to_bytes(8, "big"), span.trace_flags.sampled)


def to_metadata(context: SpanContext | None) -> tuple[tuple[str, str], ...]:
    """gRPC metadata that makes `context` the parent of what the callee does; empty for None."""
    if context is None:
        return ()
    state = ((TRACESTATE, "forefetch=detail"),) if context.detail else ()
    return ((TRACEPARENT, context.traceparent), *state)
