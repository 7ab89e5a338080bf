"""The step ring: sums, replays, what is lost, and readers that race with the writer."""

from __future__ import annotations

import sys
import threading
import time

import pytest

from forefetch.telemetry.ring import LAYER_TOTALS, StepRing, Timings


def test_parts_are_disjoint_and_the_slowest_worker_of_each_layer_counts() -> None:
    ring = StepRing(capacity=4, layers=3, workers=2)
    stamps = ring.begin(7, start_ns=1_000)
    stamps.layer(0, 1_010, 100, 10, 500, 20)  # worker 1 is the slowest: 30 + 40 + 300
    stamps.call(0, 0, 3, 490, 1, 2, 200)
    stamps.call(0, 1, 2, 495, 30, 40, 300)
    stamps.layer(1, 1_700, 100, 0, 0, 50)  # dense
    stamps.layer(2, 1_900, 100, 10, 400, 20)  # only worker 0 has rows
    stamps.call(2, 0, 1, 390, 5, 0, 250)
    stamps.head(77)
    timings = stamps.finish(end_ns=3_000, sampling_ns=33, batch=2, tokens=5)
    link = (500 - 370) + (400 - 255)
    assert timings == Timings(2_000, 300 + 77, 20, link, 550, 40, 35, 90, 33, batch=2, tokens=5)
    parts = timings.attention_ns + timings.gate_ns + timings.combine_ns + timings.sampling_ns
    assert parts + link + timings.queue_ns + timings.copy_wait_ns + timings.expert_ns <= timings.total_ns

    record = ring.read(7)
    assert record is not None
    assert (record.step, record.start_ns, record.timings) == (7, 1_000, timings)
    assert record.layers[2].tolist() == [900, 100, 10, 400, 20]
    assert record.calls[2].tolist() == [[1, 390, 5, 0, 250], [0, 0, 0, 0, 0]]
    assert ring.worker_totals().tolist() == [[2, 4, 880, 6, 2, 450], [1, 2, 495, 30, 40, 300]]


def test_heads_and_hints_are_added_up_by_layer() -> None:
    ring = StepRing(capacity=2, layers=2, workers=2)
    for step in (0, 1):
        stamps = ring.begin(step, 0)
        stamps.lookahead(0, 7, 30)
        stamps.lookahead(1, 2, 1)
        stamps.hints(1, 8, 10, 7, 9, 6, 5, 4, 3, 2)
        stamps.call(1, 0, 1, 100, 0, 40, 50)
        stamps.call(1, 1, 1, 100, 0, 60, 20)
        stamps.verified(1, 0, 3, 1, 0, 0, 512, 1024, 70, 0)
        stamps.verified(1, 1, 0, 0, 4, 0, 0, 2048, 30, 3)
        timings = stamps.finish(500, 0, 1, 1)
        assert (timings.lookahead_ns, timings.lookahead_hidden_ns, timings.shadow_experts) == (9, 31, 3)
    ring.begin(2, 0).lookahead(0, 99, 99)  # not finished, so not counted
    record = ring.read(1)
    assert record is not None
    assert record.hints.tolist() == [[7, 30, *[0] * 9], [2, 1, 8, 10, 7, 9, 6, 5, 4, 3, 2]]
    assert record.verified[1].tolist() == [[3, 1, 0, 0, 512, 1024, 70, 0], [0, 0, 4, 0, 0, 2048, 30, 3]]
    totals = dict(zip(LAYER_TOTALS, ring.layer_totals()[1].tolist(), strict=True))
    assert totals["chosen"] == 16
    assert (totals["named"], totals["found"]) == (20, 14)
    assert [totals[f"{kind}_found"] for kind in ("next", "second", "refined")] == [12, 8, 4]
    assert [totals[name] for name in ("hits", "late", "misses", "resident")] == [6, 2, 8, 0]
    assert (totals["wasted_bytes"], totals["copied_bytes"]) == (1024, 6144)
    assert totals["stall_ns"] == 120  # the slower of two workers that wait side by side
    assert not ring.layer_totals()[0].any()


def test_a_worker_that_reports_more_than_the_wait_leaves_no_negative_link() -> None:
    ring = StepRing(2, 2, 1)
    stamps = ring.begin(0, 0)
    for layer, compute in ((0, 150), (1, 40)):
        stamps.layer(layer, 0, 0, 0, 100, 0)
        stamps.call(layer, 0, 1, 100, 0, 0, compute)
    assert stamps.finish(1_000, 0, 1, 1).link_ns == 60


def test_without_workers_all_parts_but_the_link_stay() -> None:
    stamps = StepRing(2, 1, 0).begin(0, 0)
    stamps.layer(0, 0, 10, 0, 0, 20)
    assert stamps.finish(50, 5, 1, 1) == Timings(total_ns=50, attention_ns=10, combine_ns=20, sampling_ns=5, batch=1, tokens=1)


def test_replay_starts_over_and_open_or_overwritten_steps_are_lost() -> None:
    ring = StepRing(capacity=2, layers=2, workers=1)
    broken = ring.begin(5, 100)
    broken.layer(1, 150, 9, 9, 9, 9)
    broken.call(1, 0, 9, 9, 9, 9, 9)
    assert ring.read(5) is None
    again = ring.begin(5, 200)
    again.layer(0, 210, 1, 1, 1, 1)
    assert ring.read(5) is None
    again.finish(300, 0, 1, 1)
    record = ring.read(5)
    assert record is not None
    assert record.layers.tolist() == [[10, 1, 1, 1, 1], [0] * 5]
    assert not record.calls.any()
    assert ring.read(3) is None
    assert ring.read(4) is None
    ring.begin(7, 400)
    assert ring.read(5) is None
    ring.begin(5, 500).finish(600, 0, 1, 1)
    assert ring.read(5) is not None
    assert ring.read(7) is None


def test_never_written_slots_hold_no_step() -> None:
    assert StepRing(3, 1, 1).read(0) is None


@pytest.mark.parametrize("sizes", [(0, 1, 1), (1, 0, 1), (1, 1, -1)])
def test_impossible_sizes_are_refused(sizes: tuple[int, int, int]) -> None:
    with pytest.raises(ValueError, match="cannot be"):
        StepRing(*sizes)


def test_memory_is_what_the_module_says() -> None:
    assert StepRing(16, 48, 2).nbytes == 16 * 8 * (8 + 16 * 48 + 13 * 48 * 2)


def test_a_racing_reader_sees_whole_steps_or_nothing() -> None:
    """Every value of step n is n, so that any mixture shows. Large slots make numpy copy without the interpreter's lock."""
    ring = StepRing(capacity=2, layers=40, workers=8)
    stop, seen, mixed = threading.Event(), [0], []

    def read() -> None:
        while not stop.is_set():
            for step in range(newest[0] - 1, newest[0] + 1):
                record = ring.read(step)
                if record is not None:
                    seen[0] += 1
                    if {*record.calls.ravel().tolist(), *record.layers[:, 1:].ravel().tolist(), record.step} != {step}:
                        mixed.append(record)

    newest = [1]
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    reader = threading.Thread(target=read)
    reader.start()
    try:
        least, most = time.monotonic() + 1.5, time.monotonic() + 60
        while (now := time.monotonic()) < least or (seen[0] <= 10 and now < most):
            step = newest[0] + 1
            stamps = ring.begin(step, 0)
            for layer in range(40):
                stamps.layer(layer, 0, step, step, step, step)
                for worker in range(8):
                    stamps.call(layer, worker, step, step, step, step, step)
            stamps.finish(step, step, step, step)
            newest[0] = step
    finally:
        stop.set()
        reader.join()
        sys.setswitchinterval(interval)
    assert seen[0] > 10
    assert not mixed
