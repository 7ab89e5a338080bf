"""Prompts whose beginning another router computed: the cold run's answer, from bytes that really came from the KV service."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from cluster_calls import SMALL, Answer, Background, Router, Start
from reference_model import CASES, Oracle
from waiting import stop, until

from forefetch.cluster import Cluster
from forefetch.v1 import router_pb2

CASE = "qwen3"
PAGE = 16  # SMALL's
PROMPT = (CASES[CASE].prompt * 9)[: 12 * PAGE + 1]
N = 12
# Cold and warm runs sum the same float32 products in chunks of other sizes. Logits here are below 40 in size and sums have at
# most 64 terms: 64 * 2**-24 * 40 = 1.5e-4 for the head alone; layers before it add less. Wrong KV changes them by over 0.1.
TOLERANCE = 5e-4


@pytest.fixture(scope="module")
def cold(start: Start) -> Cluster:
    return start(CASE, link="local", kv=True)


@pytest.fixture(scope="module")
def flags(cold: Cluster) -> tuple[str, ...]:
    return (*SMALL, f"--kv={cold.processes['kv'].address}")


@pytest.fixture(scope="module")
def warm(start: Start, flags: tuple[str, ...]) -> Cluster:
    return start(CASE, link="local", router=(*flags, "--kv-fetch-s=60"))


@pytest.fixture
def routers(cold: Cluster, warm: Cluster) -> Iterator[tuple[Router, Router]]:
    both = Router(cold.address), Router(warm.address)
    until(lambda: all(router.stats().kv.up for router in both))
    yield both
    for router in both:
        until(lambda router=router: router.stats().pages_used == 0)  # type: ignore[misc]
        router.close()


def fill(router: Router, prompt: list[int], **more: Any) -> Answer:
    """Answers and waits until the service holds the blocks."""
    answer = router.generate(prompt, N, **more)
    until(lambda: router.stats().kv.blocks_waiting == 0)
    return answer


def loaded(router: Router) -> int:
    return int(router.stats().kv.blocks_loaded)


@pytest.mark.parametrize(
    "length", [PAGE - 1, PAGE, PAGE + 1, 2 * PAGE - 1, 2 * PAGE, 3 * PAGE, 11 * PAGE + 5, 12 * PAGE, 12 * PAGE + 1]
)
def test_a_warm_prefix_gives_the_cold_run_s_answer(
    length: int, routers: tuple[Router, Router], oracle: Callable[[str], Oracle]
) -> None:
    cold, warm = routers
    prompt = [4 + length, *PROMPT[: length - 1]]  # a beginning of its own, so that no other test filled it
    first = fill(cold, prompt, top_logprobs=5)
    before, computed = loaded(warm), warm.stats().prompt_tokens
    second = warm.generate(prompt, N, top_logprobs=5, request_id=f"warm-{length}")
    assert first.tokens == second.tokens == oracle(CASE).greedy(prompt, N)
    assert first.finish.usage.cached_tokens == 0
    assert second.finish.usage.cached_tokens == min(length // PAGE * PAGE, length - 1)
    assert loaded(warm) - before == length // PAGE, "the bytes came from the service"
    assert warm.stats().prompt_tokens - computed == length - second.finish.usage.cached_tokens
    trace = warm.stub.GetTrace(router_pb2.GetTraceRequest(request_id=f"warm-{length}"), timeout=60)
    assert trace.cached_tokens == second.finish.usage.cached_tokens
    assert (trace.load_ns > 0) == (length >= PAGE)
    for one, other in zip(first.events, second.events, strict=True):
        assert [top.token_id for top in one.top_logprobs] == [top.token_id for top in other.top_logprobs]
        for a, b in zip(one.top_logprobs, other.top_logprobs, strict=True):
            assert a.logprob == pytest.approx(b.logprob, abs=TOLERANCE)


def test_blocks_of_the_answer_are_found_too(routers: tuple[Router, Router], oracle: Callable[[str], Oracle]) -> None:
    cold, warm = routers
    prompt = [100, *PROMPT[:20]]
    answer = cold.generate(prompt, 50).tokens
    until(lambda: cold.stats().kv.blocks_waiting == 0)
    conversation = [*prompt, *answer, 7, 8, 9]
    second = warm.generate(conversation, N)
    assert second.finish.usage.cached_tokens == (len(prompt) + 50 - 1) // PAGE * PAGE
    assert second.tokens == oracle(CASE).greedy(conversation, N)


def test_a_service_killed_during_a_fetch_is_a_miss(
    cold: Cluster, routers: tuple[Router, Router], oracle: Callable[[str], Oracle]
) -> None:
    filler, warm = routers
    prompt, kv = [101, *PROMPT[:150]], cold.processes["kv"]
    fill(filler, prompt)
    misses = dict(warm.stats().kv.prefix_misses)
    stop(kv)
    stream = Background(warm, prompt, N)
    until(lambda: warm.stats().running == 1)
    cold.kill("kv")
    assert stream.done().tokens == oracle(CASE).greedy(prompt, N)
    assert stream.finish.usage.cached_tokens == 0
    after = warm.stats().kv.prefix_misses
    assert {reason for reason in after if after[reason] > misses.get(reason, 0)} <= {"unavailable", "late", "broken"}
    assert sum(after.values()) == sum(misses.values()) + 1
    cold.restart("kv")
    until(lambda: filler.stats().kv.up and warm.stats().kv.up)


def test_a_service_that_hangs_costs_no_more_than_the_bound(
    start: Start, cold: Cluster, flags: tuple[str, ...], oracle: Callable[[str], Oracle]
) -> None:
    prompt, kv = [102, *PROMPT[:100]], cold.processes["kv"]
    router = Router(start(CASE, link="local", router=(*flags, "--kv-fetch-s=1")).address)
    until(lambda: router.stats().kv.up)
    stop(kv)
    try:
        answer = router.generate(prompt, N)
    finally:
        kv.signal(signal.SIGCONT)
    assert answer.tokens == oracle(CASE).greedy(prompt, N)
    misses = router.stats().kv.prefix_misses
    assert set(misses) <= {"late", "unavailable"}, "the latter where its heartbeat noticed first"
    assert sum(misses.values()) == 1
    router.close()


def test_a_request_cancelled_while_its_prefix_is_fetched_leaves_nothing(
    cold: Cluster, routers: tuple[Router, Router], oracle: Callable[[str], Oracle]
) -> None:
    (_, warm), prompt = routers, [103, *PROMPT[:100]]
    kv = cold.processes["kv"]
    stop(kv)
    try:
        stream = Background(warm, prompt, N)
        until(lambda: warm.stats().running == 1)
        stream.call.cancel()
        stream.done()
        until(lambda: warm.stats().running == 0)
    finally:
        kv.signal(signal.SIGCONT)
    until(lambda: warm.stats().pages_used == 0)
    until(lambda: warm.stats().kv.up)
    assert warm.generate(prompt, N).tokens == oracle(CASE).greedy(prompt, N)


@pytest.mark.parametrize("change", ["--page-size=8", "--kv-format=float16"])
def test_another_page_size_or_format_misses(
    change: str, start: Start, flags: tuple[str, ...], routers: tuple[Router, Router], oracle: Callable[[str], Oracle]
) -> None:
    filler, _ = routers
    prompt = [104, *PROMPT[:60]]
    fill(filler, prompt)
    other = Router(start(CASE, link="local", router=(*flags, change)).address)
    until(lambda: other.stats().kv.up)
    answer = other.generate(prompt, N)
    assert answer.finish.usage.cached_tokens == 0
    assert dict(other.stats().kv.prefix_misses) == {"absent": 1}
    assert answer.tokens == oracle(CASE).greedy(prompt, N)
    other.close()
