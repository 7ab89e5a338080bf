"""The core without a transport: order of the queue, times, defects."""

from __future__ import annotations

import dataclasses
import threading
import time

import numpy as np
import pytest
import torch
from torch import Tensor
from waiting import until

from expert_worker.core import Core, Turn, WorkerInfo
from expert_worker.residency import Copied
from forefetch import wire
from forefetch.errors import BadRequest, ForefetchError, Mismatch
from forefetch.frames import FrameBuffer
from forefetch.hints import ExpertHint
from forefetch.wire import LayerCall, Verified

INFO = WorkerInfo("digest", "model", 0, 1, {0: (0, 1)}, 4, torch.float32, "cpu", "instance", 8)


class Script:
    """Experts that wait, add one, or break."""

    load = torch.zeros(1, 2, dtype=torch.int64).numpy()
    weight_bytes = 0
    copied = Copied()

    def __init__(self) -> None:
        self.gate = threading.Event()
        self.gate.set()
        self.order: list[int] = []
        self.hinted: list[ExpertHint] = []
        self.error: Exception | None = None

    def forward(self, call: LayerCall, out: Tensor, source: str) -> tuple[int, Verified]:
        self.order.append(call.step)
        self.gate.wait(60.0)
        if self.error:
            raise self.error
        out.copy_(call.x + 1)
        return 7, Verified(hits=1, copied_bytes=2**40)

    def hint(self, hint: ExpertHint, source: str) -> bool:
        self.hinted.append(hint)
        if self.error:
            raise self.error
        return hint.layer == 0

    def resident(self, layer: int) -> list[int]:
        return []


def a_call(step: int = 1) -> LayerCall:
    return LayerCall(step, 0, torch.randn(2, 4), np.zeros(1, np.int32), np.ones(1, np.int32), np.ones(1, np.float32))


def answered(core: Core, call: LayerCall) -> wire.LayerReply:
    request, reply = FrameBuffer.allocate(INFO.request_room(8)), FrameBuffer.allocate(INFO.reply_room(8))
    return wire.decode_reply(reply, core.answer(request, wire.encode_request(request, call), reply), call)


def test_calls_are_answered_and_counted() -> None:
    core = Core(INFO, Script())
    call = a_call()
    reply = answered(core, call)
    assert torch.equal(reply.rows, call.x + 1)
    assert reply.copy_wait_ns == 7
    assert reply.verified[:3] == (1, 0, 0)
    assert (reply.verified.wasted_bytes, reply.verified.copied_bytes) == (0, 2**40)
    assert core.verified == Verified(hits=1, copied_bytes=2**40)
    assert core.copy_wait_ns == 7
    assert reply.compute_ns > 0
    assert (core.calls, core.rows, core.pairs, core.errors) == (1, 2, 1, 0)
    assert core.compute_ns == reply.compute_ns
    assert not core.busy


def test_the_queue_is_in_order_and_measured() -> None:
    script = Script()
    core = Core(INFO, script)
    script.gate.clear()
    replies: dict[int, wire.LayerReply] = {}
    routers = [threading.Thread(target=lambda n=n: replies.update({n: answered(core, a_call(n))})) for n in range(6)]
    began, waits = time.perf_counter_ns(), list[int]()  # when each was seen to wait, or to have its turn
    for waiting, router in enumerate(routers):
        router.start()
        until(lambda waiting=waiting: len(core.turn._waiting) + len(script.order) > waiting)  # type: ignore[misc]
        waits.append(time.perf_counter_ns())
    assert core.busy
    opened = time.perf_counter_ns()
    script.gate.set()
    for router in routers:
        router.join(60.0)
    assert script.order == list(range(6))
    assert 0 <= replies[0].queue_ns <= waits[0] - began, "nobody was before it"
    assert all(replies[n].queue_ns >= opened - waits[n] for n in range(1, 6))
    assert not core.busy


def test_a_turn_is_passed_on_after_an_error() -> None:
    turn = Turn()
    with pytest.raises(KeyError), turn:
        raise KeyError
    with turn:
        assert turn.taken
    assert not turn.taken


@pytest.mark.parametrize("error", [BadRequest("layer", "no such layer"), Mismatch("other"), ForefetchError("said")])
def test_refusals_travel(error: ForefetchError) -> None:
    script = Script()
    script.error = error
    core = Core(INFO, script)
    with pytest.raises(type(error), match=str(error)):
        answered(core, a_call())
    assert core.errors == 1
    script.error = None
    answered(core, a_call())


def test_a_defect_is_logged_and_not_told(caplog: pytest.LogCaptureFixture) -> None:
    script = Script()
    script.error = ZeroDivisionError("/secret/path")
    with pytest.raises(ForefetchError, match=r"^internal error$"):
        answered(Core(INFO, script), a_call())
    assert "/secret/path" in caplog.text


def test_a_reply_that_does_not_fit_the_link_is_refused() -> None:
    core = Core(INFO, Script())
    call = LayerCall(1, 0, torch.randn(8, 4), np.zeros(0, np.int32), np.zeros(0, np.int32), np.zeros(0, np.float32))
    request, reply = FrameBuffer.allocate(INFO.request_room(8)), FrameBuffer.allocate(200)
    size = core.answer(request, wire.encode_request(request, call), reply)
    with pytest.raises(BadRequest, match="rows"):
        wire.decode_reply(reply, size, call)


def test_hints_are_counted_and_cannot_do_harm(caplog: pytest.LogCaptureFixture) -> None:
    script = Script()
    core = Core(INFO, script)
    hint = ExpertHint(1, 0, 0, 0, np.array([1], dtype=np.int32), np.ones(1, dtype=np.float32), 0)
    core.hint(hint)
    core.hint(dataclasses.replace(hint, layer=1))
    core.hint(dataclasses.replace(hint, probabilities=np.full(1, np.nan, dtype=np.float32)))  # never reaches the experts
    assert script.hinted[0] is hint
    assert len(script.hinted) == 2
    script.error = ZeroDivisionError()
    core.hint(hint)
    assert "taking a hint" in caplog.text
    assert (core.hints, core.hints_dropped) == (1, 3)


def test_a_hint_does_not_wait_for_a_call() -> None:
    script = Script()
    core = Core(INFO, script)
    script.gate.clear()
    router = threading.Thread(target=lambda: answered(core, a_call()))
    router.start()
    until(lambda: script.order)
    core.hint(ExpertHint(1, 0, 0, 0, np.array([1], dtype=np.int32), np.ones(1, dtype=np.float32), 0))
    assert core.busy
    assert len(script.hinted) == 1
    script.gate.set()
    router.join(60.0)
