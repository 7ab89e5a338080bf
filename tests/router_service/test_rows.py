"""Float16 rows behind blocks: named, found, loaded with their blocks or not at all; and dropped where there is no room."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from kv_rigs import PAGE, Rig, page_of, tokens
from waiting import until

from forefetch.errors import Unavailable
from forefetch.process import Process
from forefetch.settings import child_environment
from kv_service.client import KvClient, chain
from router_service.admission import Admitted, SamplingParams
from router_service.live import Snapshot
from router_service.naming import rows_key
from router_service.pages import PagePool
from router_service.rows import Rows
from router_service.scheduler import Plan, Request, Scheduler

RECENT = 3


@pytest.fixture(scope="module")
def services() -> Iterator[list[str]]:
    flags = ["--budget-mb=64", "--max-block-mb=8"]
    processes = [Process(f"kv-{i}", "kv_service", flags, child_environment(PYTHONWARNINGS="error")) for i in range(2)]
    for process in processes:
        process.spawn()
    for process in processes:
        process.wait_ready(240)
    yield [process.address for process in processes]
    for process in processes:
        process.end(20)


def given_rows(rig: Rig, prompt: list[int]) -> None:
    """Computes a prompt and waits until blocks and rows are there."""
    request = rig.admit(prompt)
    rig.loaded(request)
    compute(rig, request)
    until(lambda: not rig.kv.status().blocks_waiting)
    rig.end(request)
    until(lambda: not rig.kv.status().blocks_waiting and (rig.settle() or not rig.scheduler.pool._pins))


def compute(rig: Rig, request: Any) -> None:
    """The prompt in the steps that the scheduler plans."""
    while request.computed < len(request.prompt):
        plan = rig.scheduler.plan()
        assert plan is not None
        (chunk,) = plan.chunks
        before, request_tokens = request.computed, len(request.tokens)
        end = chunk.start + chunk.count
        rig.cache.lanes[request.lane] = list(request.tokens)
        for block in range(before // PAGE, end // PAGE):
            rig.memory[request.pages[block]] = page_of(request.prompt[: (block + 1) * PAGE])
        landed = rig.scheduler.commit(plan, [1] if end == request_tokens else [])
        rig.kv.computed(plan, 1)
        for sealed, first, behind in landed:
            rig.kv.sealed(sealed, first, behind, None)


@pytest.mark.parametrize("count", range(2 * PAGE, 4 * PAGE + 1))
@pytest.mark.parametrize(("recent", "replicas"), [(RECENT, 1), (PAGE + 2, 2)])
def test_a_prefix_comes_with_its_rows(
    count: int, recent: int, replicas: int, services: list[str], make: Callable[..., Rig]
) -> None:
    rig = make(services[:replicas], recent=recent)
    prompt = tokens(count, seed=1)
    given_rows(rig, prompt)
    again = rig.admit(prompt)
    reached = (count - 1) // PAGE * PAGE
    assert rig.loaded(again) == reached, rig.kv.status()
    start = rig.cache.tail_start(reached, 0)
    assert rig.cache.written == (start, reached, prompt[start:reached])
    assert again.loaded_blocks == start // PAGE
    status = rig.kv.status()
    assert (status.rows_loaded, status.rows_dropped, dict(status.prefix_misses)["absent"]) == (1, 0, 1)


@pytest.mark.parametrize("answer", range(1, 8))
@pytest.mark.parametrize("committed", [True, False])
@pytest.mark.parametrize("recent", [1, RECENT, PAGE + 1])
def test_rows_are_right_while_a_later_step_is_under_way(
    answer: int, committed: bool, recent: int, services: list[str], make: Callable[..., Rig]
) -> None:
    """The engine launches a step before it reads the one before. A request ends before or after the later one is committed."""
    rig = make(services[:1], recent=recent)
    request = rig.admit(tokens(2 * PAGE + 1, seed=7))
    rig.loaded(request)
    flights: list[Plan] = []

    def commit() -> None:
        for plan in flights:
            rig.cache.committed[request.lane] = plan.chunks[0].end

    def land(plan: Plan) -> None:
        sealed = rig.scheduler.land(plan, [500 + len(request.tokens)] if plan.choosing else [])
        rig.cache.lanes[request.lane] = list(request.tokens)
        rig.kv.computed(plan, 1)
        for of, first, behind in sealed:
            for block in range(first, behind):
                rig.memory[of.pages[block]] = page_of(tuple(of.tokens[: (block + 1) * PAGE]))
            rig.kv.sealed(of, first, behind, None)

    while request.generated < answer:
        commit()
        plan = rig.scheduler.plan()
        assert plan is not None
        rig.scheduler.advance(plan)
        flights.append(plan)
        if len(flights) > 1:
            land(flights.pop(0))
    if committed:
        commit()
    pages, conversation = request.pages, list(request.tokens)
    rig.end(request)
    assert pages
    until(lambda: not rig.kv.status().blocks_waiting)
    rig.scheduler.land(flights.pop(), [1], {request})
    rig.cache.committed.clear()
    following = rig.admit([*conversation, 9])
    until(lambda: rig.settle() or not following.loading)
    assert following.cached in (2 * PAGE, (len(conversation) - 1) // PAGE * PAGE)
    assert rig.cache.written is not None
    start, end, rows = rig.cache.written
    assert (start, end, rows) == (rig.cache.tail_start(end, 0), following.cached, conversation[start:end])


def test_without_rows_nothing_is_taken_and_rows_are_left_where_prompts_part(
    services: list[str], make: Callable[..., Rig]
) -> None:
    rig = make(services[:1], recent=RECENT)
    common = tokens(3 * PAGE, seed=2)
    given_rows(rig, [*common, 1, *tokens(PAGE, seed=3)])
    second = rig.admit([*common, 2, *tokens(PAGE, seed=4)])
    assert rig.loaded(second) == 0
    assert second.rows_due == [3 * PAGE, 4 * PAGE]
    assert rig.kv.status().prefix_misses["rows"] == 1
    compute(rig, second)
    rig.end(second)
    until(lambda: not rig.kv.status().blocks_waiting)
    third = rig.admit([*common, 3, *tokens(PAGE, seed=5)])
    assert rig.loaded(third) == 3 * PAGE
    assert third.rows_due == [4 * PAGE]


@pytest.mark.parametrize("damage", ["another position", "another size", "no rows at all"])
def test_rows_that_are_not_as_they_should_be_are_a_miss(damage: str, services: list[str], make: Callable[..., Rig]) -> None:
    rig = make(services[:1], recent=RECENT)
    prompt = tokens(3 * PAGE + 1, seed=6)
    request = rig.admit(prompt)
    rig.loaded(request)
    request.rows_due = []
    rig.compute(request)
    until(lambda: not rig.kv.status().blocks_waiting)
    keys = rig.kv.naming.extend([], "", prompt, 3)
    start, end, rows = 2 * PAGE, 3 * PAGE, torch.zeros(4 * PAGE, dtype=torch.uint8)
    snapshot = {
        "another position": Snapshot(start, end - 1, PAGE, rows),
        "another size": Snapshot(start, end, PAGE, rows[:-1]),
        "no rows at all": Snapshot(start, end, PAGE, rows[:0]),
    }[damage]
    client = KvClient(services[0])
    assert client.put([(rows_key(keys[2]), snapshot.tail().encode())]) == (1, 0)
    client.close()
    assert rig.loaded(rig.admit(prompt)) == 0
    assert rig.cache.written is None


class Holder:
    """A replica that counts."""

    def __init__(self, up: bool = True) -> None:
        self.up, self.go, self.put_keys, self.fails = up, threading.Event(), list[Any](), False

    def connect(self) -> Holder:
        return self

    def look_up(self, keys: Any, timeout_s: float) -> int:
        self.go.wait(10)
        if self.fails:
            raise Unavailable("gone")
        return 0

    def put(self, pairs: Any) -> tuple[int, int]:
        self.put_keys += [key for key, _ in pairs]
        return 1, 0

    def close(self) -> None:
        self.go.set()


@pytest.mark.parametrize(("how", "sent"), [("", 4), ("away", 0), ("fails", 0)])
def test_what_waits_is_bounded_and_everything_is_counted(how: str, sent: int) -> None:
    holder: Any = Holder(up=how != "away")
    holder.fails = how == "fails"
    rows, keys = Rows(300), chain(bytes(32), [[i] for i in range(10)])
    if how == "away":
        holder.go.set()
    for key in keys:
        rows.offer(holder, key, Snapshot(0, 1, 1, torch.zeros(75, dtype=torch.uint8)))
        assert rows.waiting <= 4
    holder.go.set()
    until(lambda: not rows.waiting)
    rows.close(5.0)
    rows.offer(holder, keys[0], Snapshot(0, 1, 1, torch.zeros(1, dtype=torch.uint8)))
    assert rows.sent + rows.dropped == 11
    assert (rows.sent == sent) if how != "away" else rows.sent == 0
    assert holder.put_keys == [rows_key(key) for key in keys[: rows.sent]]


@given(st.integers(1, 200), st.integers(1, 9), st.integers(0, 20), st.integers(2, 50), st.data())
def test_wherever_rows_are_due_the_tail_still_holds_them_after_a_step(
    length: int, size: int, recent: int, step: int, data: st.DataObject
) -> None:
    scheduler = Scheduler(PagePool(300), page_size=size, max_batch=1, max_step_tokens=step, max_waiting=1, recent=recent)
    admitted = Admitted(tuple(range(length)), 1, False, SamplingParams(), (), frozenset(), "r")
    request = Request(1, "r", admitted.prompt, admitted, arrival=0.0)
    due = sorted(data.draw(st.sets(st.integers(1, max(1, (length - 1) // size)), max_size=3)))
    request.rows_due = [block * size for block in due if block * size < length]
    left = list(request.rows_due)
    scheduler.submit(request)
    scheduler.admit(0.0)
    while request.computed < length:
        plan = scheduler.plan()
        assert plan is not None
        scheduler.commit(plan, [1] if plan.chunks[0].samples else [])
        while left and left[0] <= request.computed:
            assert scheduler.sealed(left[0]) == scheduler.sealed(request.computed)
            left.pop(0)
    assert not left
