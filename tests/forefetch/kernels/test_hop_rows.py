"""What crosses a lane, in Triton's interpreter, beside the plain form of the same calls. Signals are plain loads and stores."""

from __future__ import annotations

import pytest
import torch
import triton
from torch import Tensor
from triton import language as tl

from forefetch import shm
from forefetch.kernels.gate import choose
from forefetch.kernels.hop import triton as hop
from forefetch.p2p.host import HostLanes, HostPort
from forefetch.p2p.lane import TOLD, TOLD_WORDS, LaneShape

pytestmark = [
    pytest.mark.skipif(torch.cuda.is_available(), reason="the interpreter is off"),
    pytest.mark.skipif(bool(shm.unsupported()), reason=shm.unsupported()),
]
ROWS, HIDDEN, TOP, LAYERS, EXPERTS = 5, 24, 3, 2, 10
SHAPE = LaneShape(ROWS, HIDDEN, TOP, LAYERS, 4)
AT = hop.Offsets(SHAPE.ids, 4 * ROWS * TOP, SHAPE.weights, SHAPE.x, SHAPE.results)
SECOND = 1_000_000_000


@triton.jit
def plain_look(flag):  # type: ignore[no-untyped-def]
    return tl.load(flag.to(tl.pointer_type(tl.int32)))


@triton.jit
def plain_signal(flag, number):  # type: ignore[no-untyped-def]
    tl.store(flag.to(tl.pointer_type(tl.int32)), number)


@pytest.fixture(autouse=True)
def _plain(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hop, "_look", plain_look)
    monkeypatch.setattr(hop, "_signal", plain_signal)
    monkeypatch.setattr(hop, "_now", plain_now)


@triton.jit
def plain_now():  # type: ignore[no-untyped-def]
    return 0


class Lanes:
    """Lanes of kernels and of the plain form, over memory of their own."""

    def __init__(self, count: int, owners: Tensor) -> None:
        self.ports, self.plain_ports = ([_port() for _ in range(count)] for _ in range(2))
        table = torch.tensor([[_address(port.segment.request), _address(port.segment.reply)] for port in self.ports])
        counts, one = torch.zeros(2, count, dtype=torch.int32), torch.zeros(1, dtype=torch.int32)
        self.state = hop.State(table, counts, one.clone(), owners.int(), one + len(owners))
        self.plain = HostLanes(lambda logits: choose(logits, TOP, "topk_softmax", False), 0.1)
        self.plain.attach(self.plain_ports, owners)

    def put(self, place: int, first: int, x: Tensor, logits: Tensor, idle: Tensor) -> None:
        hop.put(self.state, AT, place, first, x, logits, idle, TOP, True)
        self.plain.put(place, first, x, logits, idle[:, None])


def _port() -> HostPort:
    return HostPort(shm.Segment.create(SHAPE.inbox_bytes, SHAPE.outbox_bytes), SHAPE, torch.float32)


def _address(area: memoryview) -> int:
    return torch.frombuffer(area, dtype=torch.uint8).data_ptr()


def _flag(area: memoryview) -> int:
    return int(torch.frombuffer(area, dtype=torch.int32, count=1))


@pytest.mark.parametrize(("lanes", "turns"), [(1, 1), (3, 1), (3, 2)])
def test_inboxes_get_what_the_plain_form_gives_them(lanes: int, turns: int) -> None:
    draw = torch.Generator().manual_seed(lanes + turns)
    owners = torch.randint(lanes, (turns, LAYERS, EXPERTS), generator=draw)
    both = Lanes(lanes, owners)
    for number, (first, count) in enumerate(((0, 3), (3, 2)), 1):
        x, logits = torch.randn(count, HIDDEN, generator=draw), torch.randn(count, EXPERTS, generator=draw)
        idle = torch.zeros(count, dtype=torch.bool)
        idle[-1] = number == 2
        both.put(1, first, x, logits, idle)
        for port, plain in zip(both.ports, both.plain_ports, strict=True):
            rows = slice(first, first + count)
            assert torch.equal(port.x[rows], plain.x[rows])
            assert torch.equal(port.ids[1, rows], plain.ids[1, rows])
            assert torch.allclose(port.weights[rows], plain.weights[rows], rtol=1e-6)
            assert _flag(port.segment.request) == number
    assert both.state.counts.tolist() == [[2] * lanes, [0] * lanes], "every lane counted its calls, and is ready for the next"


def test_results_are_summed_behind_their_signals() -> None:
    both = Lanes(3, torch.zeros(1, LAYERS, EXPERTS).long())
    both.put(0, 1, torch.zeros(2, HIDDEN), torch.randn(2, EXPERTS), torch.zeros(2, dtype=torch.bool))
    for number, port in enumerate(both.ports, 1):
        port.results[:] = torch.arange(ROWS)[:, None] * 10.0**number
        torch.frombuffer(port.segment.reply, dtype=torch.int32, count=1)[0] = 1
    out = torch.full((2, HIDDEN), float("nan"))
    hop.take(both.state, AT, 1, out, 0, SECOND)
    assert torch.equal(out, torch.tensor([[1110.0], [2220.0]]).expand(2, HIDDEN))
    assert int(both.state.fault) == 0


def test_a_lane_of_ones_own_is_summed_in_its_place_and_awaited_by_nobody() -> None:
    both = Lanes(3, torch.zeros(1, LAYERS, EXPERTS).long())
    both.put(0, 1, torch.zeros(2, HIDDEN), torch.randn(2, EXPERTS), torch.zeros(2, dtype=torch.bool))
    values = [1.0, 2.0**-24, 2.0**-24]  # in another order the small ones would count
    for port, value in zip(both.ports, values, strict=True):
        port.results[:] = value
    for port in (both.ports[0], both.ports[2]):
        torch.frombuffer(port.segment.reply, dtype=torch.int32, count=1)[0] = 1
    out = torch.full((2, HIDDEN), float("nan"))
    hop.take(both.state, AT, 1, out, 0, SECOND, own=1)
    assert (out == 1.0).all()
    assert int(both.state.fault) == 0


def test_a_fault_silences_what_follows() -> None:
    both = Lanes(2, torch.zeros(1, LAYERS, EXPERTS).long())
    both.state.fault.fill_(2)
    hop.put(both.state, AT, 0, 0, torch.ones(2, HIDDEN), torch.randn(2, EXPERTS), torch.zeros(2, dtype=torch.bool), TOP, True)
    assert [_flag(port.segment.request) for port in both.ports] == [0, 0]
    assert all((port.x == 0).all() for port in both.ports)
    hop.take(both.state, AT, 0, torch.empty(2, HIDDEN), 0, SECOND)
    assert int(both.state.fault) == 2, "who broke it first is kept"


def test_without_lanes_nothing_is_sent_and_zeros_come_back() -> None:
    both = Lanes(2, torch.zeros(1, LAYERS, EXPERTS).long())
    both.state.table.zero_()
    hop.put(both.state, AT, 0, 0, torch.ones(2, HIDDEN), torch.randn(2, EXPERTS), torch.zeros(2, dtype=torch.bool), TOP, True)
    out = torch.full((2, HIDDEN), float("nan"))
    hop.take(both.state, AT, 0, out, 0, SECOND)
    assert (out == 0).all()
    assert both.state.counts.sum() == 0


def test_a_worker_counts_calls_and_holds_the_lock_between() -> None:
    asked, answered, state, lock = (torch.zeros(size, dtype=torch.int32) for size in (1, 1, 3, 1))
    asked[0] = 2
    hop.turn(asked, answered, state, lock, SECOND, answer=False, wait=True)
    assert (state.tolist(), int(lock), int(answered)) == ([1, 0, 1], 1, 0)
    hop.turn(asked, answered, state, lock, SECOND, answer=True, wait=True)
    assert (state.tolist(), int(lock), int(answered)) == ([2, 0, 1], 1, 1)
    hop.turn(asked, answered, state, lock, SECOND, answer=True, wait=False)
    assert (state.tolist(), int(lock), int(answered)) == ([2, 0, 0], 0, 2)
    state[1] = 1
    hop.turn(asked, answered, state, lock, SECOND, answer=True, wait=False)
    asked[0] = 3
    assert int(answered) == 2, "nobody answers behind a fault"


def test_the_lock_can_be_taken_without_a_lane() -> None:
    lock = torch.zeros(1, dtype=torch.int32)
    nothing, state = lock[:0], torch.zeros(3, dtype=torch.int32)
    hop.turn(nothing, nothing, state, lock, SECOND, answer=False, wait=True)
    assert int(lock) == 1
    hop.turn(nothing, nothing, state, lock, SECOND, answer=True, wait=False)
    assert (int(lock), state.tolist()) == (0, [0, 0, 0])


def test_a_lock_that_was_not_had_is_not_given_back() -> None:
    """Behind a fault a lane goes on without it; who holds it keeps it."""
    lock = torch.ones(1, dtype=torch.int32)
    nothing, state = lock[:0], torch.zeros(3, dtype=torch.int32)
    hop.turn(nothing, nothing, state, lock, 0, answer=False, wait=True)
    assert state.tolist() == [0, 2, 0]
    hop.turn(nothing, nothing, state, lock, 0, answer=True, wait=False)
    assert int(lock) == 1


def test_a_router_reads_what_its_workers_have_told() -> None:
    both = Lanes(2, torch.zeros(1, 1, EXPERTS))
    for lane, port in enumerate(both.ports):
        port.told.copy_(torch.arange(TOLD_WORDS) + 100 * lane)
    found = torch.zeros(2, TOLD_WORDS, dtype=torch.int64)
    hop.told(both.state, TOLD, found)
    assert torch.equal(found, torch.stack([port.told for port in both.ports]))
    both.state.table.zero_()
    hop.told(both.state, TOLD, found)
    assert not found.any(), "nobody is there"
