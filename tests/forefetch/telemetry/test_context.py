"""W3C trace context: strict reading, exact writing, the 25-byte form of frames."""

from __future__ import annotations

import pytest

from forefetch.telemetry import context
from forefetch.telemetry.context import SpanContext

TRACE, SPAN = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"


def test_round_trips() -> None:
    parsed = context.parse(f"00-{TRACE}-{SPAN}-01")
    assert parsed == SpanContext(bytes.fromhex(TRACE), bytes.fromhex(SPAN), sampled=True)
    assert parsed.traceparent == f"00-{TRACE}-{SPAN}-01"
    assert len(parsed.to_bytes()) == context.SIZE
    assert context.from_bytes(parsed.to_bytes()) == parsed
    assert context.from_metadata([("x", b"y"), *context.to_metadata(parsed)]) == parsed
    detailed = SpanContext(parsed.trace_id, parsed.span_id, sampled=True, detail=True)
    assert context.from_metadata(context.to_metadata(detailed)) == detailed


def test_flags_and_later_versions() -> None:
    unsampled = context.parse(f"00-{TRACE}-{SPAN}-02")
    assert unsampled is not None
    assert not unsampled.sampled
    later = context.parse(f"cc-{TRACE}-{SPAN}-03-what-ever", "a=b, forefetch=detail")
    assert later is not None
    assert later.sampled
    assert later.detail


@pytest.mark.parametrize(
    "header",
    [
        "",
        f"00-{TRACE}-{SPAN}",
        f"00-{TRACE}-{SPAN}-01-more",
        f"00-{TRACE}-{SPAN}-01\n",
        f" 00-{TRACE}-{SPAN}-01",
        f"ff-{TRACE}-{SPAN}-01",
        f"cc-{TRACE}-{SPAN}-01.more",
        f"00-{TRACE.upper()}-{SPAN}-01",
        f"00-{'0' * 32}-{SPAN}-01",
        f"00-{TRACE}-{'0' * 16}-01",
        f"00-{TRACE}-{SPAN}-g1",
        f"0-{TRACE}-{SPAN}-01",
    ],
)
def test_anything_else_is_no_context(header: str) -> None:
    assert context.parse(header) is None


def test_no_context_in_metadata_or_bytes() -> None:
    assert context.from_metadata(None) is None
    assert context.from_metadata([("traceparent", b"00")]) is None
    assert context.to_metadata(None) == ()
    for data in (b"", bytes(25), bytes(16) + b"1" * 9, b"1" * 16 + bytes(9), b"1" * 24, b"1" * 26):
        assert context.from_bytes(data) is None


def test_new_spans() -> None:
    root = context.new_root(sampled=False)
    child = root.child()
    assert child.trace_id == root.trace_id
    assert child.span_id != root.span_id
    assert not child.sampled
    assert len({context.new_root(True).trace_id for _ in range(100)}) == 100
