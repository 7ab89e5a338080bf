"""Conversations that go on on another router, or on the same one after a kill. `test_crashes.py` kills at any point."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from typing import Any

import grpc
import pytest
from cluster_calls import SMALL, TRIES, Answer, Background, Router, Start, assert_fit_for_a_client
from reference_model import CASES, Oracle
from waiting import until

from forefetch.cli import main
from forefetch.client import Finish, SyncClient
from forefetch.cluster import Cluster
from forefetch.v1 import router_pb2

CASE = "qwen3"
PROMPT = CASES[CASE].prompt
LONG = 150
START, CONTINUE, RESUME = router_pb2.SESSION_MODE_START, router_pb2.SESSION_MODE_CONTINUE, router_pb2.SESSION_MODE_RESUME
SAMPLING = {
    "greedy": router_pb2.SamplingParams(temperature=0.0),
    "seeded": router_pb2.SamplingParams(temperature=0.8, seed=7, top_p=0.95),
}


@pytest.fixture(scope="module")
def clusters(start: Start) -> tuple[Cluster, Cluster]:
    """Two routers over one KV service."""
    first = start(CASE, link="local", kv=True)
    kv = first.processes["kv"].address
    return first, start(CASE, link="local", router=(*SMALL, f"--kv={kv}"))


@pytest.fixture
def routers(clusters: tuple[Cluster, Cluster]) -> Iterator[tuple[Router, Router]]:
    both = Router(clusters[0].address), Router(clusters[1].address)
    until(lambda: all(router.stats().kv.up for router in both))
    yield both
    for router in both:
        until(lambda router=router: router.stats().kv.sessions == 0)  # type: ignore[misc]
        router.close()


def session(name: str, mode: Any, next_index: int = 0) -> router_pb2.SessionParams:
    return router_pb2.SessionParams(id=name, mode=mode, next_index=next_index)


def resume(router: Router, name: str, next_index: int = 0) -> tuple[list[int], str, Any]:
    """What a resumed stream brings -> (tokens, text, finish)."""
    call = router.stub.Generate(router_pb2.GenerateRequest(session=session(name, RESUME, next_index)), timeout=60)
    tokens, text, finish = [], "", None
    for response in call:
        assert finish is None
        if response.HasField("finish"):
            finish = response.finish
            text += finish.text
        else:
            assert response.token.index == next_index + len(tokens)
            tokens.append(response.token.token_id)
            text += response.token.text
    assert finish is not None
    return tokens, text, finish


def refused(call: Callable[[], Any]) -> grpc.RpcError:
    with pytest.raises(grpc.RpcError) as caught:
        call()
    assert_fit_for_a_client(caught.value)
    return caught.value


def test_a_conversation_goes_on_on_another_router(routers: tuple[Router, Router], oracle: Callable[[str], Oracle]) -> None:
    conversation = list(PROMPT)
    for turn, count in enumerate((40, 30, 20)):
        new = PROMPT if turn == 0 else [10 + turn, 20, 30]
        conversation += new if turn else []
        mode = CONTINUE if turn else START
        answer: Answer = routers[turn % 2].generate(new, count, session=session("talk", mode))
        assert answer.tokens == oracle(CASE).greedy(conversation, count)
        assert answer.finish.usage.prompt_tokens == len(conversation)
        conversation += answer.tokens
        status = answer.finish.session
        assert (status.id, status.tokens, status.saved, status.resumed_tokens) == ("talk", len(conversation), True, 0)
        if turn:  # everything but what lies behind the last full page came from the store
            assert answer.finish.usage.cached_tokens >= (len(conversation) - count - len(new)) // 16 * 16 - 16


@pytest.mark.parametrize("how", SAMPLING)
@pytest.mark.parametrize("seen", [0, 1, 17, LONG])
def test_a_finished_answer_is_streamed_again(how: str, seen: int, routers: tuple[Router, Router]) -> None:
    name = f"finished-{how}-{seen}"
    whole = routers[0].generate(PROMPT, LONG, session=session(name, START), sampling=SAMPLING[how])
    tokens, text, finish = resume(routers[1], name, seen)
    assert tokens == whole.tokens[seen:]
    assert whole.text.endswith(text)
    assert (finish.reason, finish.seed) == (whole.finish.reason, whole.finish.seed)
    assert finish.session.resumed_tokens == LONG
    assert finish.usage.completion_tokens == LONG


@pytest.mark.parametrize("patience", ["another router", "the same router"])
def test_a_client_does_not_notice_that_its_router_is_killed(
    patience: str, clusters: tuple[Cluster, Cluster], routers: tuple[Router, Router]
) -> None:
    """The seed is the router's own choice, so that only the log can know it."""
    victim, heir = clusters
    addresses = f"{victim.address},{heir.address}" if patience == "another router" else victim.address
    name, tokens, text = patience.replace(" ", "-"), [], ""
    with SyncClient(addresses) as client:
        options: dict[str, Any] = {"max_tokens": LONG, "temperature": 0.9, "ignore_eos": True}
        for event in client.generate(PROMPT, session=name, session_mode="start", **options):
            text += event.text
            if isinstance(event, Finish):
                finish = event
                break
            assert event.index == len(tokens)
            tokens.append(event.token_id)
            if len(tokens) == 40:
                victim.kill("router")
                if patience == "the same router":
                    threading.Thread(target=victim.restart, args=("router",)).start()
        assert finish.session is not None
        assert finish.session.saved
        if patience == "another router":
            victim.restart("router")
        until(lambda: all(router.stats().kv.up for router in routers))
        whole = client.complete(PROMPT, seed=finish.seed, **options)
        assert (tokens, text) == (whole.token_ids, whole.text)
        after = client.complete([11], session=name, max_tokens=3)
        assert after.usage.prompt_tokens == len(PROMPT) + LONG + 1


def test_the_command_starts_continues_and_resumes(
    routers: tuple[Router, Router], clusters: tuple[Cluster, Cluster], capsys: pytest.CaptureFixture[str]
) -> None:
    def generate(*arguments: str) -> dict[str, Any]:
        # Nobody listens on the first port: the next router is asked.
        addresses = f"127.0.0.1:9,{clusters[0].address}"
        flags = ("--address", addresses, "--json", "--session", "cli", "--max-tokens", "6", "--ignore-eos", "--seed", "3")
        resuming = flags[:5] if "--resume" in arguments else flags
        assert main(["generate", *resuming, *arguments]) == 0
        answer: dict[str, Any] = json.loads(capsys.readouterr().out)
        return answer

    first = generate("--start", "The router keeps")
    second = generate("and the wire")
    again = generate("--resume")
    assert second["usage"]["prompt_tokens"] > first["usage"]["prompt_tokens"] + 6
    assert (again["token_ids"], again["text"]) == (second["token_ids"], second["text"])
    assert again["session"]["resumed_tokens"] == 6
    assert all(answer["session"]["saved"] for answer in (first, second, again))
    with SyncClient(f"127.0.0.1:9,{clusters[0].address}") as client:
        assert client.describe().vocab_size == 320


def test_a_turn_that_never_reached_its_session_is_not_mistaken_for_the_last_one(routers: tuple[Router, Router]) -> None:
    routers[0].generate(PROMPT, 8, session=session("turns", START), request_id="first")
    params = session("turns", RESUME)
    for answer, found in (("first", True), ("second", False)):
        params.answer = answer
        call = routers[1].stub.Generate(router_pb2.GenerateRequest(session=params), timeout=60)
        if found:
            assert len(list(call)) == 9
        else:
            assert refused(lambda call=call: list(call)).code() == grpc.StatusCode.NOT_FOUND  # type: ignore[misc]


def test_text_and_log_probabilities_go_on_too(routers: tuple[Router, Router]) -> None:
    fields = {"top_logprobs": 2, "sampling": SAMPLING["greedy"]}
    whole = routers[0].generate(PROMPT, 60, **fields)
    routers[0].generate(PROMPT, 60, **fields, session=session("logprobs", START))
    call = routers[1].stub.Generate(router_pb2.GenerateRequest(session=session("logprobs", RESUME, 25)), timeout=60)
    events = [response.token for response in call if response.HasField("token")]
    assert [event.token_id for event in events] == whole.tokens[25:]
    for event, other in zip(events, whole.events[25:], strict=True):
        assert event.logprob.logprob == pytest.approx(other.logprob.logprob, abs=5e-4)
        assert len(event.top_logprobs) == 2


def test_a_session_taken_over_is_lost_to_whoever_had_it(routers: tuple[Router, Router]) -> None:
    old, new = routers
    stream = Background(old, PROMPT, LONG, session=session("race", START))
    stream.wait_for(3)
    whole = new.generate(PROMPT, LONG)
    tokens, _, finish = resume(new, "race", 0)
    assert tokens == whole.tokens
    assert finish.session.saved
    stream.done()
    if stream.error is not None:  # it may have been done before it could notice
        assert stream.error.code() == grpc.StatusCode.FAILED_PRECONDITION
        assert "session.id" in stream.error.details()
        assert old.stats().kv.session_failures["stale"] >= 1
    else:
        assert stream.tokens == whole.tokens
    after = new.generate([9], 5, session=session("race", CONTINUE))
    assert after.finish.usage.prompt_tokens == len(PROMPT) + LONG + 1


def test_of_many_that_take_a_session_over_at_once_the_log_has_one(routers: tuple[Router, Router]) -> None:
    streams = [Background(routers[0], PROMPT, LONG, session=session("crowd", START))]
    streams[0].wait_for(2)
    for _ in range(3):
        for router in routers:
            request = router_pb2.GenerateRequest(session=session("crowd", RESUME))
            streams.append(_background(router, request))
    for stream in streams:
        stream.done()
    whole = routers[0].generate(PROMPT, LONG)
    assert any(stream.error is None for stream in streams)
    for stream in streams:
        assert stream.tokens == whole.tokens[: len(stream.tokens)]
        if stream.error is None:
            assert stream.tokens == whole.tokens
        else:
            assert stream.error.code() == grpc.StatusCode.FAILED_PRECONDITION
    assert resume(routers[1], "crowd")[0] == whole.tokens


def _background(router: Router, request: router_pb2.GenerateRequest) -> Background:
    stream = Background.__new__(Background)
    stream.start(router.stub.Generate(request, timeout=60))
    return stream


def test_a_cancelled_answer_counts_as_far_as_it_came(routers: tuple[Router, Router], oracle: Callable[[str], Oracle]) -> None:
    for attempt in range(TRIES):  # it may have ended before it is cancelled
        name = f"stopped-{attempt}"
        stream = Background(routers[0], PROMPT, LONG, session=session(name, START))
        stream.wait_for(10)
        stream.call.cancel()
        stream.done()
        until(lambda: routers[0].stats().kv.sessions == 0)
        answer = routers[1].generate([50, 51], 10, session=session(name, CONTINUE))
        partial = answer.finish.usage.prompt_tokens - len(PROMPT) - 2
        if partial < LONG:
            break
    assert len(stream.tokens) <= partial < LONG
    conversation = [*PROMPT, *oracle(CASE).greedy(PROMPT, LONG)[:partial], 50, 51]
    assert answer.tokens == oracle(CASE).greedy(conversation, 10)


def test_chat_turns_follow_the_template(routers: tuple[Router, Router]) -> None:
    def chat(content: str) -> Any:
        return router_pb2.ChatPrompt(messages=[router_pb2.ChatMessage(role="user", content=content)])

    def ids(**prompt: Any) -> list[int]:
        return list(routers[0].stub.Tokenize(router_pb2.TokenizeRequest(**prompt), timeout=60).ids)

    first = routers[0].generate([], 12, tokens=None, chat=chat("one"), session=session("chat", START))
    second = routers[1].generate([], 5, tokens=None, chat=chat("two"), session=session("chat", CONTINUE))
    following = "<|end|>\n<|start|>user\ntwo<|end|>\n<|start|>assistant\n"
    prompt = [*ids(chat=chat("one")), *first.tokens, *ids(text=following)]
    assert second.finish.usage.prompt_tokens == len(prompt)
    assert second.tokens == routers[0].generate(prompt, 5).tokens


@pytest.mark.parametrize("mode", [CONTINUE, RESUME, router_pb2.SESSION_MODE_UNSPECIFIED])
def test_an_unknown_session_is_not_found(mode: Any, routers: tuple[Router, Router]) -> None:
    tokens = {} if mode == RESUME else {"tokens": router_pb2.TokenPrompt(ids=[5])}
    request = router_pb2.GenerateRequest(session=session("nobody", mode), **tokens)
    error = refused(lambda: list(routers[0].stub.Generate(request, timeout=60)))
    assert error.code() == grpc.StatusCode.NOT_FOUND
    assert "session.id" in error.details()


def test_bad_input_is_refused_and_takes_the_session_from_nobody(routers: tuple[Router, Router]) -> None:
    first, second = routers
    stream = Background(first, PROMPT, LONG, session=session("kept", START))
    stream.wait_for(2)
    other = Background(second, PROMPT, LONG, request_id="taken")
    other.wait_for(1)
    cases: list[tuple[dict[str, Any], grpc.StatusCode, str]] = [
        ({"session": session("", START)}, grpc.StatusCode.INVALID_ARGUMENT, "session.id"),
        ({"session": session("a b", START)}, grpc.StatusCode.INVALID_ARGUMENT, "session.id"),
        ({"session": session("x" * 97, START)}, grpc.StatusCode.INVALID_ARGUMENT, "96"),
        ({"session": session("kept", START)}, grpc.StatusCode.FAILED_PRECONDITION, "session.id"),
        ({"session": session("kept", RESUME)}, grpc.StatusCode.INVALID_ARGUMENT, "tokens"),
        ({"session": session("kept", CONTINUE), "request_id": "taken"}, grpc.StatusCode.INVALID_ARGUMENT, "request_id"),
        ({"session": session("kept", CONTINUE, 3)}, grpc.StatusCode.INVALID_ARGUMENT, "session.next_index"),
        (
            {"session": session("kept", RESUME, LONG + 1), "tokens": None, "stop": None, "sampling": None},
            grpc.StatusCode.INVALID_ARGUMENT,
            "session.next_index",
        ),
        ({"session": session("kept", RESUME), "tokens": None, "stop": None}, grpc.StatusCode.INVALID_ARGUMENT, "sampling"),
        (
            {"session": session("kept", CONTINUE), "tokens": router_pb2.TokenPrompt(ids=[1] * 250)},
            grpc.StatusCode.INVALID_ARGUMENT,
            "tokens",
        ),
        (
            {"session": session("kept", CONTINUE), "tokens": router_pb2.TokenPrompt()},
            grpc.StatusCode.INVALID_ARGUMENT,
            "tokens",
        ),
    ]
    for fields, code, word in cases:
        error = refused(lambda fields=fields: second.generate([5], 5, **fields))  # type: ignore[misc]
        assert (error.code(), word in error.details()) == (code, True), (fields, error.details())
    assert len(stream.done().tokens) == LONG
    assert stream.error is None
    assert stream.finish.session.saved


def test_without_the_kv_service_sessions_are_refused_and_running_ones_go_on(
    clusters: tuple[Cluster, Cluster], routers: tuple[Router, Router]
) -> None:
    stream = Background(routers[0], PROMPT, LONG, session=session("unsaved", START))
    stream.wait_for(2)
    clusters[0].kill("kv")
    error = refused(lambda: routers[0].generate(PROMPT, 5, session=session("never", START)))
    assert error.code() == grpc.StatusCode.UNAVAILABLE
    assert "session.id" in error.details()
    assert clusters[0].processes["kv"].address not in error.details()
    clusters[0].restart("kv")
    assert len(stream.done().tokens) == LONG
    assert stream.finish.session.saved, "the log was written anew"
    assert resume(routers[1], "unsaved")[0] == stream.tokens
    until(lambda: all(router.stats().kv.up for router in routers))


def test_a_router_without_a_kv_service_says_so(start: Start) -> None:
    router = Router(start(CASE, link="local").address)
    error = refused(lambda: router.generate(PROMPT, 5, session=session("never", START)))
    assert error.code() == grpc.StatusCode.FAILED_PRECONDITION
    assert "session" in error.details()
    router.close()
