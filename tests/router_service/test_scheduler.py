"""Scenarios of admission, planning and endings; time is a number the test chooses."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from forefetch.errors import Cancelled, DeadlineExceeded, Overloaded
from router_service.admission import Admitted, SamplingParams
from router_service.pages import PagePool
from router_service.scheduler import Request, Scheduler

PAGE = 4


def make(pages: int = 32, max_batch: int = 4, max_step_tokens: int = 8, max_waiting: int = 3) -> Scheduler:
    return Scheduler(
        PagePool(pages + 1), page_size=PAGE, max_batch=max_batch, max_step_tokens=max_step_tokens, max_waiting=max_waiting
    )


def request(key: int, prompt: int = 5, max_tokens: int = 3, deadline: float | None = None) -> Request:
    ids = tuple(range(prompt))
    admitted = Admitted(ids, max_tokens, False, SamplingParams(), (), frozenset(), f"r{key}")
    return Request(key, f"r{key}", ids, admitted, arrival=0.0, deadline=deadline)


def run_step(scheduler: Scheduler) -> list[tuple[int, int, int, bool]]:
    """Plans and commits a step that samples token 7 everywhere -> (key, start, count, samples) per chunk."""
    plan = scheduler.plan()
    if plan is None:
        return []
    seen = [(c.request.key, c.start, c.count, c.samples) for c in plan.chunks]
    assert plan.tokens == sum(c.count for c in plan.chunks) <= scheduler.max_step_tokens
    scheduler.commit(plan, [7] * sum(c.samples for c in plan.chunks))
    for c in plan.chunks:
        if c.request.generated == c.request.admitted.max_tokens:
            scheduler.remove(c.request, 0.0)
    return seen


def test_a_long_prompt_is_computed_in_chunks_beside_decoding() -> None:
    scheduler = make()
    scheduler.submit(request(1, prompt=3, max_tokens=4))
    scheduler.submit(request(2, prompt=18, max_tokens=2))
    scheduler.admit(0.0)
    assert run_step(scheduler) == [(1, 0, 3, True), (2, 0, 5, False)]
    assert run_step(scheduler) == [(1, 3, 1, True), (2, 5, 7, False)]
    assert run_step(scheduler) == [(1, 4, 1, True), (2, 12, 6, True)]
    assert run_step(scheduler) == [(1, 5, 1, True), (2, 18, 1, True)]
    assert run_step(scheduler) == []
    assert scheduler.pool.used == 0


def test_planning_twice_gives_the_same_step() -> None:
    scheduler = make()
    scheduler.submit(request(1))
    scheduler.admit(0.0)
    assert scheduler.plan() == scheduler.plan()


def test_worst_case_pages_are_reserved_and_order_of_arrival_holds() -> None:
    scheduler = make(pages=5)
    scheduler.submit(request(1, prompt=5, max_tokens=8))  # 12 positions: 3 pages
    scheduler.submit(request(2, prompt=5, max_tokens=8))  # does not fit
    scheduler.submit(request(3, prompt=1, max_tokens=1))  # would fit, but must not overtake
    assert [r.key for r in scheduler.admit(0.0)] == [1]
    while run_step(scheduler):
        pass
    assert [r.key for r in scheduler.admit(1.0)] == [2, 3]


def test_the_last_token_needs_no_page() -> None:
    scheduler = make(pages=1)
    scheduler.submit(request(1, prompt=PAGE, max_tokens=1))
    assert [r.key for r in scheduler.admit(0.0)] == [1]
    assert run_step(scheduler) == [(1, 0, 4, True)]


def test_a_full_queue_says_when_to_come_back() -> None:
    scheduler = make(max_batch=3, max_waiting=2)
    for key in range(5):  # a burst: three that the next step starts, two that wait
        scheduler.submit(request(key))
    with pytest.raises(Overloaded, match="2 waiting") as caught:
        scheduler.submit(request(5))
    assert caught.value.retry_after_s > 0
    assert len(scheduler.admit(0.0)) == 3
    with pytest.raises(Overloaded):
        scheduler.submit(request(6))


def test_cancelled_and_expired_requests_free_their_pages_at_once() -> None:
    scheduler = make(max_batch=2)
    running, waiting, expiring = request(1), request(2), request(3, deadline=5.0)
    for r in (running, expiring, waiting):
        scheduler.submit(r)
    scheduler.admit(0.0)
    run_step(scheduler)
    running.cancelled = waiting.cancelled = True
    ended = scheduler.reap(5.0)
    assert {(r.key, type(e)) for r, e in ended} == {(1, Cancelled), (2, Cancelled), (3, DeadlineExceeded)}
    assert scheduler.pool.used == 0
    assert not scheduler.running
    assert not scheduler.waiting


def test_a_deadline_that_passed_is_no_cancellation_though_grpc_cancels_then() -> None:
    scheduler = make()
    scheduler.submit(late := request(1, deadline=5.0))
    late.cancelled = True
    assert [type(error) for _, error in scheduler.reap(5.0)] == [DeadlineExceeded]


def test_sealed_blocks_are_reported_once() -> None:
    scheduler = make()
    scheduler.submit(request(1, prompt=9, max_tokens=5))
    scheduler.admit(0.0)
    sealed = []
    while plan := scheduler.plan():
        sealed += [blocks for _, *blocks in scheduler.commit(plan, [7] * len(plan.choosing))]
        if plan.chunks[0].request.generated == 5:
            break
    assert sealed == [[0, 2], [2, 3]]  # 8 tokens at once, then position 11


@settings(max_examples=60)
@given(st.lists(st.tuples(st.integers(1, 30), st.integers(1, 9)), min_size=1, max_size=12), st.integers(5, 20))
def test_every_request_ends_with_all_its_tokens(sizes: list[tuple[int, int]], budget: int) -> None:
    scheduler = make(pages=12, max_step_tokens=budget, max_waiting=99)
    requests = [request(i, prompt, answer) for i, (prompt, answer) in enumerate(sizes)]
    for r in requests:
        scheduler.submit(r)
    for _ in range(2000):
        scheduler.admit(0.0)
        if not run_step(scheduler):
            break
    assert [r.generated for r in requests] == [answer for _, answer in sizes]
    assert scheduler.pool.used == 0


def test_prompts_take_few_rows_while_others_decode_and_all_they_can_get_otherwise() -> None:
    scheduler = Scheduler(PagePool(33), page_size=PAGE, max_batch=4, max_step_tokens=16, max_waiting=3, prompt_rows=3)
    scheduler.submit(request(1, prompt=20, max_tokens=3))
    scheduler.admit(0.0)
    assert run_step(scheduler) == [(1, 0, 16, False)]
    scheduler.submit(request(2, prompt=7, max_tokens=1))
    scheduler.admit(0.0)
    assert run_step(scheduler) == [(1, 16, 4, True), (2, 0, 7, True)]  # nobody decodes yet
    scheduler.submit(request(3, prompt=7, max_tokens=1))
    scheduler.admit(0.0)
    assert run_step(scheduler) == [(1, 20, 1, True), (3, 0, 3, False)]
    assert run_step(scheduler) == [(1, 21, 1, True), (3, 3, 3, False)]
    assert run_step(scheduler) == [(3, 6, 1, True)]


def test_pages_of_an_ended_request_are_free_when_its_last_step_has_landed() -> None:
    scheduler = make(max_batch=1)
    scheduler.submit(request(1, prompt=5, max_tokens=9))
    scheduler.admit(0.0)
    plans = []
    for _ in range(2):
        plan = scheduler.plan()
        assert plan is not None
        scheduler.advance(plan)
        plans.append(plan)
    assert [(c.start, c.count, c.samples) for plan in plans for c in plan.chunks] == [(0, 5, True), (5, 1, True)]
    (one,) = scheduler.running
    assert (one.computed, one.owed, one.in_flight, one.generated) == (6, 2, 2, 0)
    scheduler.land(plans[0], [7])
    one.cancelled = True
    assert [r.key for r, _ in scheduler.reap(0.0)] == [1]
    scheduler.submit(request(2))
    assert not scheduler.admit(0.0)  # no lane
    assert scheduler.pool.used == 4
    scheduler.land(plans[1], [8], {one})
    assert (scheduler.pool.used, one.tokens[5:]) == (0, [7])
    assert [r.key for r in scheduler.admit(0.0)] == [2]


def test_a_request_that_is_owed_its_last_token_is_not_planned() -> None:
    scheduler = make()
    scheduler.submit(request(1, prompt=2, max_tokens=1))
    scheduler.admit(0.0)
    plan = scheduler.plan()
    assert plan is not None
    scheduler.advance(plan)
    assert scheduler.plan() is None
