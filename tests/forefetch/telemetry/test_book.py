"""The request book: waterfalls out of shared steps, bounded memory, ids."""

from __future__ import annotations

import pytest

from forefetch.errors import BadRequest, NotFound
from forefetch.telemetry import book as book_module
from forefetch.telemetry.book import RequestBook
from forefetch.telemetry.context import SpanContext
from forefetch.telemetry.ring import StepRing

PARENT = SpanContext(b"t" * 16, b"s" * 8, sampled=True)


def run(ring: StepRing, step: int, start_ns: int, total_ns: int = 100, batch: int = 1) -> None:
    stamps = ring.begin(step, start_ns)
    stamps.layer(0, start_ns + 1, 10, 2, 50, 3)
    stamps.call(0, 1, 4, 48, 5, 6, 20)
    stamps.layer(1, start_ns + 70, 10, 0, 0, 9)
    stamps.finish(start_ns + total_ns, 4, batch, 4)


def test_a_request_from_arrival_to_trace() -> None:
    ring = StepRing(8, 2, 2)
    book = RequestBook(ring, 4, ["a:1", "b:2"])
    own = book.arrive("r", 5_000_000, 1_000, PARENT, sampled=True)
    assert own.trace_id == PARENT.trace_id
    assert own.span_id != PARENT.span_id
    assert book.trace("r").queued_ns == 0
    book.admitted("r", 1_250)
    for step, token, prefill in ((3, None, 4), (4, 0, 2), (5, 1, 0)):
        run(ring, step, 1_000 * step)
        book.worked("r", step, token, prefill)
    running = book.trace("r")
    record = book.finished("r", 9_000, "OK", prompt_tokens=6, completion_tokens=2)
    assert record is not None
    assert (record.duration_ns, record.queued_ns) == (8_000, 250)
    trace = book.trace("r")
    assert trace == running
    assert (trace.trace_id, trace.arrival_unix_ns, trace.queued_ns) == (PARENT.trace_id.hex(), 5_000_000, 250)
    assert list(trace.workers) == ["a:1", "b:2"]
    assert [step.step for step in trace.steps] == [3, 4, 5]
    assert [step.token_index if step.HasField("token_index") else None for step in trace.steps] == [None, 0, 1]
    assert [step.prefill_tokens for step in trace.steps] == [4, 2, 0]
    first = trace.steps[0]
    assert first.start_ns == 2_000
    assert (first.timings.total_ns, first.timings.link_ns, first.timings.expert_ns) == (100, 50 - 31, 20)
    assert [(layer.layer, layer.start_ns, len(layer.calls)) for layer in first.layers] == [(0, 1, 1), (1, 70, 0)]
    assert (first.layers[0].calls[0].worker, first.layers[0].calls[0].rows) == (1, 4)


def test_a_batch_shares_its_step() -> None:
    ring = StepRing(8, 2, 2)
    book = RequestBook(ring, 4)
    book.arrive("a", 0, 0, PARENT, sampled=True)
    book.arrive("b", 0, 0, None, sampled=False)
    book.arrive("c", 0, 0, None, sampled=True)
    run(ring, 0, 10, batch=3)
    for name in "abc":
        book.worked(name, 0, 0, 1)
    assert book.trace("a").steps[0] == book.trace("b").steps[0]
    assert [record.request_id for record in book.companions(0)] == ["a", "c"]
    assert book.companions(1) == []
    assert book.trace("b").trace_id == ""


def test_steps_that_left_the_ring_are_counted() -> None:
    ring = StepRing(4, 2, 2)
    book = RequestBook(ring, 4)
    book.arrive("r", 0, 0, None, sampled=False)
    for step in range(2, 12):
        run(ring, step, step)
        book.worked("r", step, step - 2, 0)
    trace = book.trace("r")
    assert [step.step for step in trace.steps] == [8, 9, 10, 11]
    assert trace.steps_lost == 6
    for step in range(12, 14):  # of other requests
        run(ring, step, step)
    assert [step.step for step in book.trace("r").steps] == [10, 11]
    ring.begin(14, 14)  # being overwritten right now
    trace = book.trace("r")
    assert [step.step for step in trace.steps] == [11]
    assert trace.steps_lost == 9


def test_a_request_skips_steps_of_others() -> None:
    ring = StepRing(8, 2, 2)
    book = RequestBook(ring, 4)
    book.arrive("r", 0, 0, None, sampled=False)
    for step in range(4):
        run(ring, step, step)
        if step != 2:
            book.worked("r", step, step, 0)
    trace = book.trace("r")
    assert [step.step for step in trace.steps] == [0, 1, 3]
    assert trace.steps_lost == 0


def test_finished_requests_are_bounded_and_running_ones_stay() -> None:
    book = RequestBook(StepRing(4, 1, 1), capacity=2)
    book.arrive("long", 0, 0, None, sampled=False)
    for index in range(5):
        book.arrive(f"r{index}", 0, 0, None, sampled=False)
        book.finished(f"r{index}", 1, "OK")
    assert book.trace("long").request_id == "long"
    assert book.trace("r4").request_id == "r4"
    for gone in ("r2", "never"):
        with pytest.raises(NotFound, match=gone):
            book.trace(gone)


def test_ids_are_unique_while_running_and_reusable_afterwards() -> None:
    book = RequestBook(StepRing(4, 1, 1), capacity=2)
    book.arrive("r", 1, 0, None, sampled=False)
    with pytest.raises(BadRequest, match="running"):
        book.arrive("r", 2, 0, None, sampled=False)
    book.finished("r", 1, "CANCELLED")
    book.arrive("r", 3, 0, None, sampled=False)
    assert book.trace("r").arrival_unix_ns == 3
    book.finished("r", 1, "OK")
    assert book.trace("r").arrival_unix_ns == 3
    assert book.finished("r", 1, "OK") is None
    book.admitted("r", 1)
    book.worked("r", 0, 0, 0)
    assert book.trace("r").steps_lost == 0


def test_details_are_kept_for_the_middle_and_the_slowest_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(book_module, "_DETAIL_RECORDS", 18)  # three steps of two layers with two workers
    ring = StepRing(8, 2, 2)
    book = RequestBook(ring, 4)
    book.arrive("r", 0, 0, None, sampled=False)
    for step, total in enumerate((100, 700, 300, 200, 600)):
        run(ring, step, 1_000 * step, total)
        book.worked("r", step, step, 0)
    assert [step.step for step in book.trace("r").steps if step.layers] == [1, 2, 4]
