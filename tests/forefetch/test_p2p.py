"""Lanes in one process: layout, ring, counters, what replicas get."""

from __future__ import annotations

import os
import threading
import time

import pytest
import torch
from torch import Tensor

from forefetch import shm
from forefetch.errors import LinkDown, Mismatch, Unavailable
from forefetch.p2p.host import HostLanes, HostPort
from forefetch.p2p.lane import LaneShape, Step, behind
from forefetch.p2p.memory import Meeting, visit
from forefetch.p2p.ring import PLACES, RING_BYTES, Announcer, Listener

pytestmark = pytest.mark.skipif(bool(shm.unsupported()), reason=shm.unsupported())
SHAPE = LaneShape(rows=6, hidden=4, top_k=2, layers=3, itemsize=4)


def choose(logits: Tensor) -> tuple[Tensor, Tensor]:
    weights, ids = torch.topk(logits, SHAPE.top_k)
    return ids, weights


def port() -> HostPort:
    return HostPort(shm.Segment.create(SHAPE.inbox_bytes, SHAPE.outbox_bytes), SHAPE, torch.float32)


def test_areas_do_not_overlap() -> None:
    ends = [SHAPE.ids + 4 * 3 * 6 * 2, SHAPE.weights + 4 * 6 * 2, SHAPE.x + 4 * 6 * 4]
    assert SHAPE.ids >= 4
    assert ends[0] <= SHAPE.weights
    assert ends[1] <= SHAPE.x
    assert ends[2] <= SHAPE.inbox_bytes
    assert all(offset % 16 == 0 for offset in (SHAPE.ids, SHAPE.weights, SHAPE.x, SHAPE.results))


@pytest.mark.parametrize(("rows", "parts", "cuts"), [(5, 1, [(0, 5)]), (6, 2, [(0, 3), (3, 3)]), (5, 2, [(0, 3), (3, 2)])])
def test_a_step_is_cut_into_all_its_rows(rows: int, parts: int, cuts: list[tuple[int, int]]) -> None:
    assert list(Step(rows, parts).cuts()) == cuts


def test_counters_wrap() -> None:
    assert behind(0xFFFFFFFF, 0)
    assert not behind(0, 0xFFFFFFFF)
    assert not behind(7, 7)


def test_announced_steps_come_in_order_and_lost_ones_are_noticed() -> None:
    segment = shm.Segment.create(RING_BYTES, 0)
    announcer, listener = Announcer(segment), Listener(segment)
    assert list(listener.steps(0)) == []
    steps = [Step(rows, 1 + rows % 2) for rows in range(2, 12)]
    for step in steps:
        announcer.announce(step, step.rows)
    assert list(listener.steps(0)) == [(step, step.rows) for step in steps]
    for _ in range(PLACES + 1):
        announcer.announce(Step(1, 1), 0)
    with pytest.raises(LinkDown, match="not in the ring"):
        list(listener.steps(0))


def test_replicas_share_rows_as_over_other_links_and_padding_goes_to_nobody() -> None:
    """Row t's pair with expert e goes to owners[(t + e) % R]; rows of the second half count from their place in the step."""
    ports, lanes = [port(), port()], HostLanes(choose, 1.0)
    owners = torch.stack((torch.zeros(3, 4), torch.ones(3, 4))).long()
    lanes.attach(ports, owners)
    logits = torch.randn(3, 4, generator=torch.Generator().manual_seed(1))
    lanes.put(1, 3, torch.randn(3, 4), logits, torch.tensor([[False], [False], [True]]))
    ids = choose(logits)[0]
    for row in range(2):
        for column in range(2):
            expert = int(ids[row, column])
            owner = (3 + row + expert) % 2
            assert int(ports[owner].ids[1, 3 + row, column]) == expert
            assert int(ports[1 - owner].ids[1, 3 + row, column]) == -1
    assert (torch.stack([one.ids[1, 5] for one in ports]) == -1).all()


def test_results_are_summed_in_the_order_of_workers() -> None:
    ports, lanes = [port() for _ in range(3)], HostLanes(choose, 60.0)
    lanes.attach(ports, torch.zeros(1, 3, 4).long())
    lanes.put(0, 0, torch.zeros(2, 4), torch.randn(2, 4), torch.zeros(2, 1, dtype=torch.bool))
    values = [1.0, 2.0**-24, 2.0**-24]  # in another order the small ones would count

    def answer() -> None:
        for one, value in reversed(list(zip(ports, values, strict=True))):
            one.results[:2] = value
            one.segment.reply_bell.ring(1)

    threading.Timer(0.05, answer).start()
    out = torch.empty(2, 4)
    lanes.take(0, out, 0)
    assert (out == 1.0).all()


def test_waits_are_bounded_and_name_the_worker() -> None:
    ports, lanes = [port(), port()], HostLanes(choose, 0.1)
    lanes.attach(ports, torch.zeros(1, 3, 4).long())
    lanes.put(0, 0, torch.zeros(1, 4), torch.randn(1, 4), torch.zeros(1, 1, dtype=torch.bool))
    ports[0].segment.reply_bell.ring(1)
    lanes.take(0, torch.empty(1, 4), 0)
    assert int(lanes.verdict) == 0, "the step has not ended"
    lanes.mirror()
    assert int(lanes.verdict) == 1 + 1
    assert "no signal within 0.1 s" in lanes.reason(1)
    began = time.monotonic()
    for _ in range(200):  # what follows falls through
        lanes.put(0, 0, torch.zeros(1, 4), torch.randn(1, 4), torch.zeros(1, 1, dtype=torch.bool))
        lanes.take(0, torch.empty(1, 4), 0)
    assert time.monotonic() - began < 0.1 * 200 / 2
    assert ports[0].segment.request_bell.value == 1, "nobody writes behind a fault"


def test_a_worker_that_is_gone_ends_the_wait_and_new_lanes_begin_afresh() -> None:
    lanes, one = HostLanes(choose, 60.0), torch.zeros(1, 1, dtype=torch.bool)
    lanes.attach([port()], torch.zeros(1, 3, 4).long())
    lanes.put(0, 0, torch.zeros(1, 4), torch.randn(1, 4), one)
    lanes.abort(0, "it was killed")
    lanes.take(0, torch.empty(1, 4), 0)
    lanes.mirror()
    assert (int(lanes.verdict), lanes.reason(0)) == (1, "it was killed")
    second = port()
    second.segment.reply_bell.ring(1)
    lanes.attach([second], torch.zeros(1, 3, 4).long())
    assert int(lanes.verdict) == 0
    lanes.put(0, 0, torch.zeros(1, 4), torch.randn(1, 4), one)
    lanes.take(0, torch.empty(1, 4), 0)
    lanes.mirror()
    assert int(lanes.verdict) == 0


def test_a_meeting_that_nobody_comes_to_ends() -> None:
    meeting = Meeting(0.1)
    read, write = os.pipe()
    with pytest.raises(Unavailable, match="did not come"):
        meeting.host(write)
    meeting.close()
    with pytest.raises(Mismatch, match="cannot be reached on this node"):
        visit(meeting.name, read, 0.1)


def test_two_processes_descriptors_change_hands() -> None:
    meeting, got = Meeting(60.0), list[int]()
    (host_read, host_write), (guest_read, guest_write) = os.pipe(), os.pipe()
    guest = threading.Thread(target=lambda: got.append(visit(meeting.name, guest_write, 60.0)))
    guest.start()
    got.append(meeting.host(host_write))
    guest.join()
    for fd in got:
        os.write(fd, b"x")
    assert os.read(host_read, 1) == os.read(guest_read, 1) == b"x"
    for fd in (*got, host_read, guest_read):
        os.close(fd)
    meeting.close()
