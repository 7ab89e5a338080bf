"""Sealed KV pages end to end: real processes, chunked prompts, a KV service that gives the same bytes back."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise

import pytest
from cluster_calls import Background, Router, Start
from reference_model import CASES
from waiting import until

from forefetch.cluster import Cluster

CASE = "qwen3"
PAGE = 32
FLAGS = (f"--page-size={PAGE}", "--max-batch=8", "--max-step-tokens=20", "--kv-memory-mb=8", "--kv-format=e2m0")
PROMPT = (CASES[CASE].prompt * 12)[: 5 * PAGE + 1]
N = 40


@pytest.fixture(scope="module")
def exact(start: Start) -> Cluster:
    """No window: what lies behind a cached prefix is computed as without the cache."""
    return start(CASE, workers=1, link="shm", kv=True, router=(*FLAGS, "--kv-recent=0", "--worker-grace-s=60"))


@pytest.fixture
def router(exact: Cluster) -> Iterator[Router]:
    client = Router(exact.address)
    yield client
    until(lambda: client.stats().pages_used == 0)
    client.close()


def test_answers_name_the_format_and_do_not_depend_on_the_batch(router: Router) -> None:
    alone = router.generate(PROMPT[3:], N)
    assert alone.finish.approximations.kv_format == "e2m0"
    others = [Background(router, [5 + i, *PROMPT[: 10 * i]], 30) for i in range(1, 5)]
    assert router.generate(PROMPT[3:], N).tokens == alone.tokens
    for other in others:
        other.done()
        assert other.error is None
    described = router.describe()
    assert described.kv_format == "e2m0"
    assert described.kv_parameters == "codec=2 outliers=1 thirds=0 sinks=4 recent=0 exempt=none"


@pytest.mark.parametrize("length", [2 * PAGE, 3 * PAGE + 1, 5 * PAGE])
def test_a_cached_prefix_gives_the_cold_run_s_answer(length: int, start: Start, exact: Cluster, router: Router) -> None:
    prompt = [4 + length % 50, *PROMPT[: length - 1]]
    cold = router.generate(prompt, N)
    until(lambda: router.stats().kv.blocks_waiting == 0)
    before = router.stats().kv.blocks_loaded
    warm = router.generate(prompt, N)
    assert warm.tokens == cold.tokens
    # The block of the last token is computed again: its row chooses the next token, and a sealed block is never written to.
    assert router.stats().kv.blocks_loaded - before == (length - 1) // PAGE
    assert warm.finish.usage.cached_tokens == (length - 1) // PAGE * PAGE


WINDOW = 20
WINDOWED = (*FLAGS, f"--kv-recent={WINDOW}", "--kv-fetch-s=60")


@pytest.fixture(scope="module")
def windowed(start: Start) -> Cluster:
    """Newest tokens stay float16, which is where warm and cold could differ."""
    return start(CASE, link="local", kv=True, router=WINDOWED)


@pytest.fixture
def pair(windowed: Cluster, start: Start) -> Iterator[tuple[Router, Router]]:
    """A router with a KV service, and one that computes everything."""
    both = Router(windowed.address), Router(_alone(start).address)
    until(lambda: both[0].stats().kv.up)
    yield both
    until(lambda: both[0].stats().pages_used == 0)
    for one in both:
        one.close()


_ALONE: list[Cluster] = []


def _alone(start: Start) -> Cluster:
    if not _ALONE:
        _ALONE.append(start(CASE, link="local", router=WINDOWED))
    return _ALONE[0]


def filled(router: Router, prompt: list[int], count: int = N) -> list[int]:
    tokens = router.generate(prompt, count).tokens
    until(lambda: router.stats().kv.blocks_waiting == 0)
    return tokens


# Where the prompt ends within the last page decides whether its tail still holds the rows behind the last full page: it does up
# to WINDOW tokens behind it; else the prompt's last chunk but one ends there.
@pytest.mark.parametrize("length", [PAGE, PAGE + 1, 2 * PAGE, 2 * PAGE + WINDOW - 1, 2 * PAGE + WINDOW, 3 * PAGE - 1, 5 * PAGE])
def test_behind_a_window_too_a_warm_answer_is_the_cold_one(length: int, pair: tuple[Router, Router]) -> None:
    router, alone = pair
    prompt = [40 + length % 50, *PROMPT[: length - 1]]
    cold = alone.generate(prompt, N)
    assert filled(router, prompt) == cold.tokens
    before = router.stats().kv
    warm = router.generate(prompt, N)
    after = router.stats().kv
    assert warm.tokens == cold.tokens
    pages = (length - 1) // PAGE
    assert warm.finish.usage.cached_tokens == pages * PAGE
    # The last page before where it goes on came as rows, the others as blocks.
    assert after.rows_loaded - before.rows_loaded == (pages > 0)
    assert after.blocks_loaded - before.blocks_loaded == max(0, pages - 1)


def test_a_conversation_without_a_session_goes_on_behind_its_last_answer(pair: tuple[Router, Router]) -> None:
    router, alone = pair
    conversation, cached = [91, *PROMPT[: 2 * PAGE]], []
    for turn in range(3):
        answer = alone.generate(conversation, N).tokens
        warm = router.generate(conversation, N)
        assert warm.tokens == answer, turn
        cached.append(warm.finish.usage.cached_tokens)
        until(lambda: router.stats().kv.blocks_waiting == 0)
        conversation += [*answer, 5 + turn, 6]
    assert cached[0] == 0
    assert all(later > earlier for earlier, later in pairwise(cached)), cached


def test_where_prompts_part_the_third_one_is_warm(pair: tuple[Router, Router]) -> None:
    """The second finds blocks without rows, computes everything, and leaves rows where it parted from the first."""
    router, alone = pair
    common, misses = [92, *PROMPT[: 3 * PAGE - 1]], router.stats().kv.prefix_misses.get("rows", 0)
    for turn, cached in enumerate((0, 0, 3 * PAGE, 3 * PAGE)):
        prompt = [*common, *(PROMPT[turn + 7 :][: PAGE + 9])]
        warm = router.generate(prompt, N)
        assert warm.tokens == alone.generate(prompt, N).tokens
        assert warm.finish.usage.cached_tokens == cached, turn
        until(lambda: router.stats().kv.blocks_waiting == 0)
    assert router.stats().kv.prefix_misses["rows"] == misses + 1


def test_the_window_matters_else_the_tests_before_would_prove_nothing(start: Start, pair: tuple[Router, Router]) -> None:
    other = Router(start(CASE, link="local", router=(*FLAGS, "--kv-recent=0")).address)
    prompts = [[93 + i, *PROMPT[: 2 * PAGE]] for i in range(4)]
    assert any(other.generate(prompt, N).tokens != pair[1].generate(prompt, N).tokens for prompt in prompts)
    other.close()


def test_a_worker_lost_in_a_stream_changes_no_token(exact: Cluster, router: Router) -> None:
    expected = router.generate(PROMPT, 2 * PAGE).tokens
    stream = Background(router, PROMPT, 2 * PAGE)
    stream.wait_for(5)
    exact.kill("worker-0")
    exact.restart("worker-0")
    assert stream.done().tokens == expected


def test_a_cancelled_stream_leaves_its_lane_clean(router: Router) -> None:
    expected = router.generate(PROMPT, 20).tokens
    for cut in (1, 3):
        stream = Background(router, [9, *PROMPT], 60)
        stream.wait_for(cut)
        stream.call.cancel()
        stream.done()
    assert router.generate(PROMPT, 20).tokens == expected


@pytest.mark.parametrize("kv_format", ["asym3", "fp4"])
def test_other_formats_serve(kv_format: str, start: Start) -> None:
    flags = (*(flag for flag in FLAGS if "kv-format" not in flag), f"--kv-format={kv_format}", "--kv-exempt-layers=0")
    client = Router(start(CASE, link="local", router=flags).address)
    answer = client.generate(PROMPT, N)
    assert (len(answer.tokens), answer.finish.approximations.kv_format) == (N, kv_format)
    client.close()
