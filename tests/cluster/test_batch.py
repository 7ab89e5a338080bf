"""What else is in the batch does not show in an answer, nor does a page pool so small that requests must wait."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
from cluster_calls import SMALL, Background, Router, Start
from reference_model import CASES, Oracle
from waiting import until

from forefetch.v1 import router_pb2

CASE = "qwen3"
TOKENS = 48


@pytest.fixture(scope="module")
def router(start: Start) -> Iterator[Router]:
    client = Router(start(CASE, link="grpc").address)
    yield client
    client.close()


def prompts() -> list[list[int]]:
    """Eight prompts of 3 to 87 tokens; the first is the case's own."""
    own = CASES[CASE].prompt
    return [own, *([(7 * i + 11 * j) % 300 + 4 for j in range(3 + 12 * i)] for i in range(1, 8))]


def test_greedy_answers_are_the_same_alone_and_among_seven_others(router: Router, oracle: Callable[[str], Oracle]) -> None:
    expected = [oracle(CASE).greedy(prompt, TOKENS) for prompt in prompts()]
    alone = [router.generate(prompt, TOKENS).tokens for prompt in prompts()]
    together = [Background(router, prompt, TOKENS) for prompt in prompts()]
    assert [stream.done().tokens for stream in together] == alone == expected


def test_seeded_answers_are_the_same_alone_and_among_others(router: Router) -> None:
    def sampled(seed: int) -> router_pb2.SamplingParams:
        return router_pb2.SamplingParams(temperature=1.1, top_p=0.95, top_k=50, min_p=0.01, seed=seed)

    alone = [router.generate(prompt, TOKENS, sampling=sampled(i)).tokens for i, prompt in enumerate(prompts())]
    together = [Background(router, prompt, TOKENS, sampling=sampled(i)) for i, prompt in enumerate(prompts())]
    assert [stream.done().tokens for stream in together] == alone
    other = router.generate(prompts()[0], TOKENS, sampling=sampled(99))
    assert other.tokens != alone[0]
    assert other.finish.seed == 99


def test_requests_that_must_wait_for_pages_answer_the_same(start: Start, oracle: Callable[[str], Oracle]) -> None:
    # 3 layers x (K and V) x 2 heads x 16 dims x 4 bytes = 768 bytes a token: 1 MiB holds 1,365 tokens, five requests of 250.
    tight = [flag for flag in SMALL if not flag.startswith("--kv-memory")]
    client = Router(start(CASE, workers=1, router=(*tight, "--kv-memory-mb=1")).address)
    own = CASES[CASE].prompt
    streams = [Background(client, own, 220) for _ in range(12)]
    expected = oracle(CASE).greedy(own, 220)
    assert [stream.done().tokens for stream in streams] == [expected] * 12
    until(lambda: client.stats().pages_used == 0)
    client.close()
