"""Steps that are launched before the last one is read: what ends, breaks or comes meanwhile changes no token."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from reference_model import CASES, Oracle

from forefetch.errors import Cancelled, DeadlineExceeded, ForefetchError, LinkDown
from forefetch.kernels.kv_codec import KvFormat
from forefetch.telemetry import names
from router_service import sampling
from router_service.admission import Admitted, SamplingParams
from router_service.answer import Answer, FinishOut, TokenOut
from router_service.scheduler import Plan, Request
from tests.router_service.test_captured import CapturedRig, Spy
from tests.router_service.test_captured_sealed import LANES, ON_GPU
from tests.router_service.test_captured_sealed import Rig as SealedRig
from tests.router_service.test_engine import PAGE, Rig, make_rig


def told(rig: Rig, name: str) -> list[int]:
    return [event.token_id for event in rig.events[name] if isinstance(event, TokenOut)]


def run(rig: Rig) -> None:
    for _ in range(200):
        if not rig.engine.step():
            return
    raise AssertionError("the engine does not come to rest")


def test_a_token_is_read_one_step_after_its_launch() -> None:
    rig = make_rig(ahead=True)
    rig.submit("a", prompt=3, max_tokens=3)
    rig.engine.step()
    assert (rig.trunk.steps, told(rig, "a")) == (1, [])
    rig.engine.step()
    assert (rig.trunk.steps, told(rig, "a")) == (2, [3])
    run(rig)
    assert told(rig, "a") == [3, 4, 5]
    assert rig.trunk.steps == 3  # nothing is launched for a request that will certainly have ended


def test_a_step_that_chooses_nothing_is_waited_for_all_the_same() -> None:
    rig = make_rig(ahead=True)
    rig.submit("a", prompt=40, max_tokens=2)  # three chunks, of which the last chooses
    for step in range(3):
        rig.engine.step()
        (flight,) = rig.engine._flights
        assert flight.step == step
        assert flight.choice is not None
    run(rig)
    assert told(rig, "a") == [40, 41]


def test_a_stop_token_costs_one_row_and_its_pages_are_kept_until_that_has_landed() -> None:
    rig = make_rig(ahead=True)
    rig.submit("a", prompt=3, max_tokens=9, stop=4)
    while not rig.ended["a"].is_set():
        rig.engine.step()
    assert (told(rig, "a"), rig.trunk.steps) == ([3, 4], 3)
    assert not rig.scheduler.running
    assert rig.scheduler.pool.used == 3  # the third step still writes there
    rig.submit("b", prompt=5)
    run(rig)
    assert told(rig, "b") == [5, 6, 7, 8]
    assert rig.scheduler.pool.used == 0


@pytest.mark.parametrize(("how", "error"), [("cancel", Cancelled), ("deadline", DeadlineExceeded), ("fail", ForefetchError)])
def test_a_request_that_ends_in_flight_gets_no_further_token(how: str, error: type[ForefetchError]) -> None:
    rig = make_rig(ahead=True)
    request, other = rig.submit("a", prompt=3, max_tokens=40), rig.submit("b", prompt=7, max_tokens=6)
    for _ in range(3):
        rig.engine.step()
    assert request.in_flight == 1
    if how == "cancel":
        rig.engine.cancel(request)
    elif how == "fail":
        rig.engine.fail(request, ForefetchError("taken over"))
    else:
        request.deadline = time.monotonic()
    seen = told(rig, "a")
    rig.engine.step()  # plans without it, and reads the step that it was in
    assert isinstance(rig.events["a"][-1], error)
    assert told(rig, "a") == seen == [3, 4]
    assert request not in {chunk.request for chunk in rig.engine._flights[0].plan.chunks}
    run(rig)
    assert told(rig, "b") == [7, 8, 9, 10, 11, 12]
    assert other.in_flight == request.in_flight == rig.scheduler.pool.used == 0


def test_a_lost_worker_leaves_the_step_in_flight_alone() -> None:
    rig = make_rig(ahead=True)
    request = rig.submit("a", prompt=3, max_tokens=5)
    rig.engine.step()
    rig.trunk.broken = [LinkDown(0, "gone"), LinkDown(0, "gone")]
    rig.engine.step()
    assert told(rig, "a") == [3]
    run(rig)
    assert told(rig, "a") == [3, 4, 5, 6, 7]
    assert request.replayed_steps == 2


def test_a_step_that_turns_out_lost_takes_the_one_behind_it_along() -> None:
    rig = make_rig(ahead=True)
    rig.trunk.lost = {1, 3}  # the steps behind are 2, which began before 1 was read, and 4
    request, ended = rig.submit("a", prompt=3, max_tokens=6), rig.submit("b", prompt=7, max_tokens=40)
    rig.engine.step()
    rig.engine.step()
    before = request.computed, request.owed, ended.computed
    rig.engine.cancel(ended)
    rig.engine.step()
    assert not rig.engine._flights
    assert (request.computed, request.owed, request.in_flight) == (before[0] - 1, 0, 0)
    assert isinstance(rig.events["b"][-1], Cancelled)
    assert rig.scheduler.pool.used == 2  # the pages of b went with the last step that had rows of it
    run(rig)
    assert told(rig, "a") == list(range(3, 9))
    assert request.replayed_steps == 4
    assert rig.scheduler.pool.used == 0


def test_a_defect_waits_for_what_is_in_flight_and_frees_everything(caplog: pytest.LogCaptureFixture) -> None:
    rig = make_rig(ahead=True)
    rig.submit("a", prompt=3, max_tokens=9)
    rig.submit("b", prompt=9, max_tokens=9)
    rig.engine.step()
    rig.trunk.broken = [RuntimeError("broken")]
    rig.engine.start()
    for name in "ab":
        assert type(rig.result(name)[1]) is ForefetchError
    rig.submit("c", prompt=4)
    assert rig.result("c")[0] == [4, 5, 6, 7]
    rig.engine.stop()
    assert rig.scheduler.pool.used == 0


def test_whoever_comes_while_a_step_is_in_flight_is_in_the_next_but_one() -> None:
    rig = make_rig(ahead=True)
    rig.submit("a", prompt=3, max_tokens=8)
    rig.engine.step()
    rig.engine.step()
    rig.submit("b", prompt=20, max_tokens=3)  # two chunks, beside a's rows
    rig.submit("c", prompt=2, max_tokens=1)
    run(rig)
    assert told(rig, "a") == list(range(3, 11))
    assert told(rig, "b") == [20, 21, 22]
    assert told(rig, "c") == [2]


def test_full_lanes_are_handed_on_only_when_nothing_writes_to_them() -> None:
    rig = make_rig(ahead=True)
    first = [rig.submit(f"r{n}", prompt=3, max_tokens=20, stop=4) for n in range(4)]
    late = rig.submit("late", prompt=5, max_tokens=2)
    while not rig.ended["r0"].is_set():
        rig.engine.step()
    assert late.started is None
    run(rig)
    assert told(rig, "late") == [5, 6]
    assert sorted(request.lane for request in first) == [0, 1, 2, 3]


@dataclass
class KvSpy:
    """What the engine would tell the KV services. Tokens of an offered block must be known."""

    blocks: dict[Request, list[int]] = field(default_factory=dict)

    def settle(self) -> list[Request]:
        return []

    def admitted(self, request: Request, trace: object) -> None:
        self.blocks[request] = []

    def sealed(self, request: Request, first: int, blocks: int, trace: object) -> None:
        assert len(request.tokens) >= blocks * PAGE
        self.blocks[request] += range(first, blocks)

    def computed(self, plan: Plan, total_ns: int) -> None:
        pass

    def ended(self, request: Request) -> None:
        pass

    def on_change(self, wake: object) -> None:
        pass


@pytest.mark.parametrize("ahead", [False, True])
def test_blocks_are_offered_once_in_order_and_with_their_tokens(ahead: bool) -> None:
    rig, kv = make_rig(ahead=ahead), KvSpy()
    rig.engine.parts.kv = kv  # type: ignore[assignment]
    request = rig.submit("a", prompt=9, max_tokens=12)
    run(rig)
    assert kv.blocks[request] == [0, 1, 2, 3, 4]


def put(rig: Rig, name: str, ids: tuple[int, ...], count: int, params: SamplingParams, stop: int = -1) -> None:
    """Submits a request for `count` tokens."""
    admitted = Admitted(ids, count, False, params, (), frozenset({stop}), name)
    request = Request(len(rig.events), name, ids, admitted, arrival=0.0)
    rig.events[name], rig.ended[name] = [], threading.Event()
    rig.engine.parts.recorder.arrive(request, None, names.TEXT_COMPLETION)
    rig.engine.submit(Answer(request, None), name)


def drawn(rig: Rig, seed: int) -> dict[str, tuple[list[int], list[Any]]]:
    """Random requests, many of whose draws are settled late; some are cancelled or reach a stop token."""
    draw, answers = random.Random(seed), dict[str, tuple[list[int], list[Any]]]()
    for n in range(8):
        params = SamplingParams(
            temperature=draw.choice([0.0, 1.0, 2.0]),
            top_p=draw.choice([1.0, 0.97]),
            top_logprobs=draw.choice([None, 2]),
            seed=draw.getrandbits(60),
        )
        ids = tuple(range(draw.randrange(1, 12)))
        put(rig, f"r{n}", ids, draw.randrange(2, 14), params, stop=draw.randrange(50))
        for _ in range(draw.randrange(4)):
            rig.engine.step()
    run(rig)
    for name, events in rig.events.items():
        assert isinstance(events[-1], FinishOut)
        answers[name] = told(rig, name), [event.tops for event in events[:-1]]
    assert rig.scheduler.pool.used == 0
    return answers


@pytest.mark.parametrize("seed", range(4))
def test_draws_that_are_settled_late_are_those_of_steps_in_turn(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sampling, "WIDTHS", (3, 20))  # one-hot logits over 50 tokens: a draw falls behind the third often
    voided, answers = list[Request](), []
    for ahead, lost in ((False, set()), (True, set()), (True, set(range(seed, 200, 5)))):
        rig = make_rig(ahead=ahead)
        rig.trunk.lost = lost
        void = rig.scheduler.void
        rig.scheduler.void = lambda chunk, void=void: (voided.append(chunk.request), void(chunk))[1]  # type: ignore[method-assign, misc]
        answers.append(drawn(rig, seed))
    assert answers[0] == answers[1] == answers[2]
    assert voided


class SealedEngine(SealedRig):
    """The engine over a small model whose decode steps are recorded and whose cache seals pages."""

    def __init__(self, format: KvFormat, device: torch.device, *, ahead: bool) -> None:
        from router_service.captured import CudaRecorder

        super().__init__(format, (), device, CudaRecorder(device) if device.type == "cuda" else Spy())
        self.model.ahead = ahead  # type: ignore[misc]
        self.rig = make_rig(ahead=ahead)
        parts = self.rig.engine.parts
        parts.trunk, parts.buffers, parts.scheduler, self.rig.scheduler = (
            self.model,
            self.buffers,
            self.scheduler,
            self.scheduler,
        )
        parts.recorder.ring = self.ring

    def answers(self, seed: int) -> list[list[int]]:
        """Six requests over four lanes, some cancelled or stopped while pages are sealed under way."""
        draw = random.Random(seed)
        for n in range(6):
            ids = tuple(draw.randrange(96) for _ in range(draw.choice([1, 20, 29, 64, 70])))
            params = SamplingParams(temperature=draw.choice([0.0, 0.8]), seed=draw.getrandbits(60))
            put(self.rig, f"r{n}", ids, draw.randrange(20, 70), params, stop=draw.randrange(96))
        run_long(self.rig)
        return [told(self.rig, f"r{n}") for n in range(6)]


def run_long(rig: Rig) -> None:
    while rig.engine.step():
        pass


@pytest.mark.parametrize("on", ["cpu", ON_GPU])
@pytest.mark.parametrize("recent", [0, 8])
def test_answers_over_pages_sealed_in_flight_are_those_of_steps_in_turn(
    on: str, recent: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sampling, "WIDTHS", (8, 40))
    head_dim, page = (16, 32) if on == "cpu" else (128, 128)
    format, answers = KvFormat("e2m0", head_dim=head_dim, page=page, sinks=2, recent=recent), []
    for ahead in (False, True):
        engine = SealedEngine(format, torch.device(on), ahead=ahead)
        answers.append(engine.answers(3))
        assert engine.scheduler.pool.used == 0
        assert len(engine.scheduler._lanes) == LANES
    assert answers[0] == answers[1]
    assert max(map(len, answers[0])) > 32


@pytest.mark.parametrize("on", ["cpu", ON_GPU])
def test_recorded_chunks_in_flight_follow_the_oracle(
    on: str, checkpoint: Callable[[str], Path], oracle: Callable[[str], Oracle]
) -> None:
    """Prompts in many chunks, most of which choose nothing, beside rows whose tokens are passed on the device."""
    recorded, rig = CapturedRig(checkpoint("qwen3"), Spy() if on == "cpu" else None, on), make_rig(ahead=True)
    parts = rig.engine.parts
    parts.trunk, parts.buffers, parts.scheduler = recorded.trunk, recorded.buffers, recorded.scheduler
    parts.recorder.ring, recorded.scheduler.max_step_tokens = recorded.ring, 9
    prompt = CASES["qwen3"].prompt
    prompts = [prompt[:7], prompt, prompt[: len(prompt) // 2], prompt[:1]]
    for n, ids in enumerate(prompts):
        put(rig, f"r{n}", tuple(ids), 8 + n, SamplingParams())
    run(rig)
    for n, ids in enumerate(prompts):
        assert told(rig, f"r{n}") == oracle("qwen3").greedy(ids, 8 + n)
    assert recorded.scheduler.pool.used == 0
