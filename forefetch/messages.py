"""The values of `answers.py` -> messages of router.proto, and back."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any

from google.protobuf.message import Message

from forefetch.answers import Completion, Event, Finish, Options, Prompt, Session, StepTimings, Token, Usage
from forefetch.errors import BadRequest, Unavailable
from forefetch.v1 import router_pb2

# Option -> the message inside GenerateRequest that holds it ("" = itself), and its field there.
_FIELDS = {
    **{name: ("sampling", name) for name in ("temperature", "top_k", "top_p", "min_p", "seed")},
    **{name: ("stop", name) for name in ("max_tokens", "ignore_eos")},
    "stop": ("stop", "strings"),
    "stop_token_ids": ("stop", "token_ids"),
    "top_logprobs": ("", "top_logprobs"),
    "request_id": ("", "request_id"),
    "session": ("session", "id"),
    "session_mode": ("session", "mode"),
    "next_index": ("session", "next_index"),
}


def generate_request(prompt: Prompt | None, options: Options) -> router_pb2.GenerateRequest:
    """GenerateRequest of a prompt (None only to resume a session) and options (None = unset). BadRequest for a value that does
    not fit its field."""
    request = router_pb2.GenerateRequest()
    if prompt is None:
        pass
    elif isinstance(prompt, str) or (len(prompt) and isinstance(prompt[0], Mapping)):
        _set_words(request, prompt)
    else:
        request.tokens.SetInParent()
        _set("tokens.ids", request.tokens, "ids", prompt)
    for name, value in options.items():
        if name not in _FIELDS:
            raise TypeError(f"unknown option {name!r}; there are {', '.join(_FIELDS)}")
        part, field = _FIELDS[name]
        if value is not None:
            values = [value] if name == "stop" and isinstance(value, str) else value
            values = _mode(value) if name == "session_mode" else values
            _set(f"{part}.{field}".lstrip("."), getattr(request, part) if part else request, field, values)
    return request


def _mode(name: Any) -> int:
    try:
        return router_pb2.SessionMode.Value(f"SESSION_MODE_{str(name).upper()}")
    except ValueError:
        raise BadRequest("session.mode", f"is {name!r}; use start, continue or resume") from None


def tokenize_request(prompt: str | Sequence[Mapping[str, str]]) -> router_pb2.TokenizeRequest:
    """TokenizeRequest of text or chat messages. BadRequest."""
    request = router_pb2.TokenizeRequest()
    _set_words(request, prompt)
    return request


def _set_words(request: router_pb2.GenerateRequest | router_pb2.TokenizeRequest, prompt: Any) -> None:
    """Text or chat messages."""
    if isinstance(prompt, str):
        _set("text", request, "text", prompt)
        return
    request.chat.SetInParent()
    for message in prompt:
        if not isinstance(message, Mapping) or message.keys() != {"role", "content"}:
            raise BadRequest("chat.messages", 'a message has exactly "role" and "content"')
        turn = request.chat.messages.add()
        for field, value in message.items():
            _set(f"chat.messages.{field}", turn, field, value)


def _set(name: str, message: Message, field: str, value: Any) -> None:
    """Sets a field, a repeated one too. BadRequest for what does not fit its type, as the router would name it."""
    try:
        if hasattr(held := getattr(message, field), "extend"):
            held.extend(value)
        else:
            setattr(message, field, value)
    except (TypeError, ValueError) as error:
        raise BadRequest(name, str(error)) from None


def event(response: router_pb2.GenerateResponse, at_ms: float) -> Event:
    """A stream element that arrived `at_ms` after the call began."""
    if response.HasField("finish"):
        return _finish(response.finish)
    token = response.token
    return Token(
        index=token.index,
        token_id=token.token_id,
        text=token.text,
        at_ms=at_ms,
        timings=_timings(token.timings.SerializeToString()),
        logprob=token.logprob.logprob if token.HasField("logprob") else None,
        top_logprobs=tuple((other.token_id, other.logprob) for other in token.top_logprobs),
    )


@lru_cache(maxsize=8)
def _timings(told: bytes) -> StepTimings:
    """Of a serialised StepTimings: streams of one batch all tell the same, so most have been made before."""
    message = router_pb2.StepTimings.FromString(told)
    return StepTimings(
        total_ms=message.total_ns / 1e6,
        attention_ms=message.attention_ns / 1e6,
        gate_ms=message.gate_ns / 1e6,
        link_ms=message.link_ns / 1e6,
        expert_ms=message.expert_ns / 1e6,
        copy_wait_ms=message.copy_wait_ns / 1e6,
        queue_ms=message.queue_ns / 1e6,
        combine_ms=message.combine_ns / 1e6,
        sampling_ms=message.sampling_ns / 1e6,
        batch=message.batch,
        tokens=message.tokens,
        lookahead_ms=message.lookahead_ns / 1e6,
        lookahead_hidden_ms=message.lookahead_hidden_ns / 1e6,
    )


def _finish(message: router_pb2.FinishEvent) -> Finish:
    usage, session = message.usage, message.session
    return Finish(
        reason=router_pb2.FinishReason.Name(message.reason).removeprefix("FINISH_REASON_").lower(),
        text=message.text,
        usage=Usage(usage.prompt_tokens, usage.completion_tokens, usage.cached_tokens, usage.replayed_steps),
        ttft_ms=message.ttft_ns / 1e6,
        duration_ms=message.duration_ns / 1e6,
        request_id=message.request_id,
        seed=message.seed,
        stop_string=message.stop_string,
        kv_format=message.approximations.kv_format,
        shadow_experts=message.approximations.shadow_experts,
        expert_format=message.approximations.expert_format,
        shadow_format=message.approximations.shadow_format,
        trunk_format=message.approximations.trunk_format,
        session=Session(session.id, session.tokens, session.saved, session.resumed_tokens) if session.id else None,
    )


def completion(events: Sequence[Event]) -> Completion:
    """All events of a stream as one value. Unavailable when the finish is missing."""
    *tokens, finish = events or (None,)
    if not isinstance(finish, Finish):
        raise Unavailable("the stream ended without its finish event")
    return Completion(tuple(token for token in tokens if isinstance(token, Token)), finish)
