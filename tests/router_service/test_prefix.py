"""Prefixes from real KV services into fake pages, through everything that the engine uses."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, cast

import pytest
from kv_rigs import BLOCK, PAGE, Rig, tokens
from waiting import until

from forefetch.errors import Unavailable
from forefetch.process import Process
from forefetch.settings import child_environment
from router_service.journal import Cursor
from router_service.live import Live

if TYPE_CHECKING:
    from router_service.journal import Turn


@pytest.fixture(scope="module")
def services() -> Iterator[list[Process]]:
    flags = ["--budget-mb=64", "--max-block-mb=8"]
    processes = [Process(f"kv-{i}", "kv_service", flags, child_environment(PYTHONWARNINGS="error")) for i in range(3)]
    for process in processes:
        process.spawn()
    for process in processes:
        process.wait_ready(240)
    yield processes
    for process in processes:
        process.end(20)


# Real services


@pytest.mark.parametrize("count", [1, PAGE - 1, PAGE, PAGE + 1, 2 * PAGE - 1, 2 * PAGE, 9 * PAGE, 9 * PAGE + 1])
def test_all_full_pages_are_loaded_and_the_last_token_is_computed(
    count: int, services: list[Process], make: Callable[..., Rig]
) -> None:
    rig = make([services[0].address])
    rig.fill(tokens(count))
    again = rig.admit(tokens(count))
    assert rig.loaded(again) == min(count // PAGE * PAGE, count - 1)
    assert rig.scheduler.plan().tokens == count - again.cached  # type: ignore[union-attr]
    assert rig.kv.status().blocks_loaded == count // PAGE
    assert rig.kv.status().bytes_loaded == count // PAGE * BLOCK
    rig.end(again)
    until(lambda: rig.settle() or rig.scheduler.pool.used == 0)


def test_another_router_of_the_same_model_gets_them_and_another_model_or_tenant_does_not(
    services: list[Process], make: Callable[..., Rig]
) -> None:
    first = make([services[0].address])
    first.fill(tokens(20), tenant="a")
    second, other = make([services[0].address], first.digest), make([services[0].address])
    assert second.loaded(second.admit(tokens(20), tenant="a")) == 19
    assert second.loaded(second.admit(tokens(20), tenant="b")) == 0
    assert other.loaded(other.admit(tokens(20), tenant="a")) == 0
    assert other.kv.status().prefix_misses["absent"] == 1


def test_a_longer_prompt_gets_the_common_part_and_hands_over_only_the_rest(
    services: list[Process], make: Callable[..., Rig]
) -> None:
    rig = make([services[0].address])
    rig.fill(tokens(12))
    sent = rig.kv.status().blocks_sent
    longer = rig.admit([*tokens(12), 5, 5, 5, 5, 5])
    assert rig.loaded(longer) == 12
    rig.compute(longer)
    until(lambda: rig.kv.status().blocks_sent == sent + 1)
    assert rig.kv.status().blocks_dropped == 0
    final = rig.admit([*tokens(12), 5, 5, 5, 5, 5])
    assert rig.loaded(final) == 16


def test_loaded_blocks_go_to_a_service_that_lost_them(services: list[Process], make: Callable[..., Rig]) -> None:
    rig = make([services[2].address])
    rig.fill(tokens(12))
    live = rig.admit(tokens(12))
    assert rig.loaded(live) == 11
    rig.compute(live)
    services[2].signal(signal.SIGKILL)
    services[2].end(5)
    until(lambda: not rig.kv.status().up)
    services[2].spawn()
    services[2].wait_ready(240)
    until(lambda: rig.kv.status().replicas[0].reconnects == 1 and rig.kv.status().blocks_waiting == 0)
    assert rig.loaded(rig.admit(tokens(12))) == 11


def test_a_cancelled_load_leaves_its_pages_alone_until_it_has_stopped(
    services: list[Process], make: Callable[..., Rig]
) -> None:
    rig = make([services[0].address], pages=8)
    rig.fill(tokens(16))
    rig.writing.clear()
    request = rig.admit(tokens(16))
    pages = set(request.pages)
    rig.end(request)
    rig.settle()
    held = 4  # the blocks that may still be written; the page for the answer is free at once
    assert rig.scheduler.pool.used == held
    taken = rig.scheduler.pool.allocate(3)
    assert taken is not None
    assert len(pages & set(taken)) <= len(pages) - held
    rig.writing.set()
    until(lambda: rig.settle() or rig.scheduler.pool.used == 3)
    assert request.computed == 0


def test_several_services_share_and_one_away_costs_its_share_only(services: list[Process], make: Callable[..., Rig]) -> None:
    addresses = [process.address for process in services[:2]]
    rig = make(addresses)
    prompts = [tokens(70 * PAGE + 1, seed) for seed in range(100, 108)]
    for prompt in prompts:
        rig.fill(prompt)
    sent = [service.blocks_sent for service in rig.kv.status().replicas]
    assert sum(sent) == 8 * 70
    assert min(sent) > 0
    for prompt in prompts:
        request = rig.admit(prompt)
        assert rig.loaded(request) == 70 * PAGE
        rig.end(request)
    services[1].signal(signal.SIGKILL)
    services[1].end(5)
    until(lambda: not rig.replicas.all[1].up)
    cached = []
    for prompt in prompts:
        keys = rig.kv.naming.extend([], "", prompt, 70)
        request = rig.admit(prompt)
        cached.append(rig.loaded(request))
        whose = [replica.address for replica, run in rig.replicas.runs(keys) for _ in run]
        lost = whose.index(addresses[1]) if addresses[1] in whose else 70
        assert cached[-1] == lost * PAGE
        rig.end(request)
    assert any(cached), cached
    services[1].spawn()
    services[1].wait_ready(240)


def test_sessions_are_spread_over_services_and_one_away_costs_its_own_only(
    services: list[Process], make: Callable[..., Rig]
) -> None:
    rig = make([process.address for process in services[:2]])
    sessions, prefix = rig.kv.sessions, os.urandom(4).hex()
    names = [f"{prefix}-{i}" for i in range(8)]
    holders = {name: rig.replicas.of_session(name).address for name in names}
    assert set(holders.values()) == {process.address for process in services[:2]}
    epochs = {name: sessions.claim(name, 5.0).epoch for name in names}
    services[1].signal(signal.SIGKILL)
    services[1].end(5)
    for name in names:
        if holders[name] == services[0].address:
            assert sessions.claim(name, 5.0).epoch == epochs[name] + 1
        else:
            with pytest.raises(Unavailable):
                sessions.claim(name, 1.0)
    services[1].spawn()
    services[1].wait_ready(240)


# Tails of sessions


@pytest.mark.parametrize(
    ("recent", "prefill_s", "copied"), [(0, 0.05, False), (0, 0.5, True), (0, None, True), (8, 0.05, True)]
)
def test_a_tail_is_copied_where_computing_it_takes_longer_than_the_log_lags(
    recent: int, prefill_s: float | None, copied: bool, services: list[Process], make: Callable[..., Rig]
) -> None:
    """Or where it is not known, or where without it more than the tail would be computed. The rig's log lags 0.1 s behind."""
    rig = make([services[0].address], recent=recent)
    request = rig.admit(tokens(2 * PAGE + 3))
    rig.loaded(request)
    rig.compute(request)
    request.tokens.append(5)
    assert rig.kv.prefix is not None
    if prefill_s is not None:
        rig.kv.prefix.cost.prefill.add(3, prefill_s)  # as many tokens as the tail has without a window
    live = Live("s", 1, rig.replicas.all[0], request, Cursor(cast("Turn", None), 0))
    rig.kv.sessions._wanted.append(live)
    rig.kv.settle()
    assert (live.snapshot is not None) == copied
