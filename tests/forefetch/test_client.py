from __future__ import annotations

import asyncio
import subprocess
import sys
from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import pytest
from opentelemetry import trace
from opentelemetry.sdk.trace import TracerProvider

from forefetch import Client, SyncClient, answers, errors, messages
from forefetch.client import Completion, StepTimings, Token
from forefetch.v1 import router_pb2
from tests.forefetch.fake_router import ERRORS, FINISHED, FakeRouter, both, run, served


@pytest.fixture
def router() -> Iterator[tuple[FakeRouter, str]]:
    with served() as both_of_it:
        yield both_of_it


@both
def test_generate_streams_tokens_then_the_finish(kind: str, router: tuple[FakeRouter, str]) -> None:
    *tokens, finish = run(kind, router[1], "generate", [5, 6, 7], top_logprobs=1)
    assert finish == FINISHED
    assert [(t.index, t.token_id, t.text) for t in tokens] == [(0, 5, "<5>"), (1, 6, "<6>"), (2, 7, "<7>")]
    assert tokens[0].timings == StepTimings(3.0, 1.5, 0, 0, 0.5, 0, 0, 0, 0, 2, 5)
    assert (tokens[0].logprob, tokens[0].top_logprobs) == (-0.5, ((9, -0.25),))
    assert 0 < tokens[0].at_ms < tokens[1].at_ms < tokens[2].at_ms


@both
def test_complete_collects(kind: str, router: tuple[FakeRouter, str]) -> None:
    done = run(kind, router[1], "complete", [5, 6, 7])
    assert (done.text, done.token_ids, done.finish_reason) == ("<5><6><7>!", [5, 6, 7], "stop_string")
    assert done.usage == FINISHED.usage
    assert len(done.timings) == 3
    assert done.ttft_ms == done.tokens[0].at_ms
    arrived = [token.at_ms for token in done.tokens]
    gaps = sorted(later - earlier for earlier, later in pairwise(arrived))
    assert [done.tpot_ms_p50, done.tpot_ms_p99] == pytest.approx(gaps)


def test_percentiles_are_nearest_rank_over_gaps() -> None:
    def completion(arrivals: list[float]) -> Completion:
        step = StepTimings(0, 0, 0, 0, 0, 0, 0, 0, 0, 1, 1)
        return Completion(tuple(Token(i, i, "", at, step, None, ()) for i, at in enumerate(arrivals)), FINISHED)

    even = completion([7.0, *(10.0 + i for i in range(101))])  # gaps: 3, then 100 of 1
    assert (even.ttft_ms, even.tpot_ms_p50, even.tpot_ms_p99) == (7.0, 1.0, 1.0)
    few = completion([0.0, 1.0, 3.0, 7.0])
    assert (few.tpot_ms_p50, few.tpot_ms_p99) == (2.0, 4.0)
    assert completion([5.0]).tpot_ms_p50 is None


@both
def test_options_reach_their_fields(kind: str, router: tuple[FakeRouter, str]) -> None:
    fake, address = router
    chat = [{"role": "system", "content": "brief"}, {"role": "user", "content": "hi"}]
    run(
        kind,
        address,
        "generate",
        chat,
        max_tokens=4,
        temperature=0.0,
        top_k=0,
        top_p=0.5,
        min_p=0.25,
        seed=0,
        stop=["a", "b"],
        stop_token_ids=[3],
        ignore_eos=True,
        top_logprobs=0,
        request_id="me",
    )
    expected = router_pb2.GenerateRequest(
        chat=router_pb2.ChatPrompt(messages=[router_pb2.ChatMessage(**turn) for turn in chat]),
        sampling=router_pb2.SamplingParams(temperature=0.0, top_k=0, top_p=0.5, min_p=0.25, seed=0),
        stop=router_pb2.StopParams(max_tokens=4, strings=["a", "b"], token_ids=[3], ignore_eos=True),
        top_logprobs=0,
        request_id="me",
    )
    assert fake.requests[-1] == expected
    run(kind, address, "generate", "hello", stop="ab", temperature=None)
    assert fake.requests[-1] == router_pb2.GenerateRequest(text="hello", stop=router_pb2.StopParams(strings=["ab"]))


def test_every_option_has_a_field() -> None:
    assert messages._FIELDS.keys() == answers.Options.__annotations__.keys()


def test_an_unknown_option_is_a_type_error() -> None:
    with pytest.raises(TypeError, match="warmth"):
        SyncClient("127.0.0.1:1").generate("x", warmth=1.0)  # type: ignore[call-arg]


def test_an_empty_list_is_an_empty_token_prompt() -> None:
    assert messages.generate_request([], {}).WhichOneof("prompt") == "tokens"


@both
@pytest.mark.parametrize(
    ("prompt", "options", "name"),
    [
        ([1, -1], {}, "tokens.ids"),
        ([1, 1 << 32], {}, "tokens.ids"),
        ([1, "x"], {}, "tokens.ids"),
        ("\ud800", {}, "text"),
        ([{"role": "user"}], {}, "chat.messages"),
        ([{"role": "user", "content": None}], {}, "chat.messages.content"),
        ([{"role": "user", "content": "x"}, 5], {}, "chat.messages"),
        ("x", {"temperature": "warm"}, "sampling.temperature"),
        ("x", {"max_tokens": -1}, "stop.max_tokens"),
        ("x", {"seed": 1 << 64}, "sampling.seed"),
        ("x", {"stop": 5}, "stop.strings"),
        ("x", {"top_logprobs": 1.5}, "top_logprobs"),
    ],
)
def test_what_fits_no_field_is_refused_without_a_call(kind: str, prompt: Any, options: dict[str, Any], name: str) -> None:
    with pytest.raises(errors.BadRequest) as caught:
        run(kind, "127.0.0.1:1", "complete", prompt, **options)
    assert caught.value.field == name


@both
@pytest.mark.parametrize("name", ERRORS)
def test_errors_are_forefetchs_own(kind: str, name: str, router: tuple[FakeRouter, str]) -> None:
    meant = ERRORS[name]
    expected = type(meant) if isinstance(meant, errors.ForefetchError) else errors.ForefetchError
    with pytest.raises(errors.ForefetchError) as caught:
        run(kind, router[1], "complete", name)
    assert type(caught.value) is expected
    assert str(caught.value) == ("internal error" if name == "defect" else str(meant))
    assert caught.value.__cause__ is None
    if isinstance(caught.value, errors.Overloaded):
        assert caught.value.retry_after_s == 1.5
    if isinstance(caught.value, errors.BadRequest):
        assert caught.value.field == "sampling.top_p"


@both
def test_a_stream_without_finish_is_no_answer(kind: str, router: tuple[FakeRouter, str]) -> None:
    with pytest.raises(errors.Unavailable, match="finish"):
        run(kind, router[1], "complete", "cut")


@both
def test_nobody_there_is_unavailable(kind: str) -> None:
    for method, args in (("complete", ["x"]), ("describe", [])):
        with pytest.raises(errors.Unavailable, match=r"127\.0\.0\.1:1"):
            run(kind, "127.0.0.1:1", method, *args, timeout=60.0)


def test_many_streams_at_once(router: tuple[FakeRouter, str]) -> None:
    async def many() -> list[Completion]:
        async with Client(router[1]) as client:
            return await asyncio.gather(*(client.complete([i, i + 1]) for i in range(8)))

    assert [done.token_ids for done in asyncio.run(many())] == [[i, i + 1] for i in range(8)]


@both
def test_unary_calls(kind: str, router: tuple[FakeRouter, str]) -> None:
    address = router[1]
    assert run(kind, address, "tokenize", "ab") == [97, 98]
    assert run(kind, address, "tokenize", [{"role": "user", "content": "b"}]) == [98]
    assert run(kind, address, "describe").model == "fake"
    assert run(kind, address, "stats").steps == 7
    with pytest.raises(errors.NotFound, match="no request r9"):
        run(kind, address, "trace", "r9")


@both
def test_the_current_span_becomes_the_parent(kind: str, router: tuple[FakeRouter, str]) -> None:
    fake, address = router
    run(kind, address, "complete", [1])
    assert "traceparent" not in fake.metadata[-1]
    with trace.use_span(TracerProvider().get_tracer("test").start_span("mine")) as _:
        here = trace.get_current_span().get_span_context()
        run(kind, address, "complete", [1])
        streamed = fake.metadata[-1]["traceparent"]
        run(kind, address, "describe")
    assert streamed == fake.metadata[-1]["traceparent"] == f"00-{here.trace_id:032x}-{here.span_id:016x}-01"


def test_the_client_needs_no_torch_and_no_numpy() -> None:
    code = (
        "import sys, forefetch; forefetch.SyncClient; print(sorted({'torch', 'numpy', 'opentelemetry'} & sys.modules.keys()))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout == "[]\n"
