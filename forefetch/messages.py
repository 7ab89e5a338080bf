"""What a generation is asked and what it answers, as plain Python values, and their way to and from messages."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Literal, TypedDict

from google.protobuf.message import Message

from forefetch.errors import BadRequest, Unavailable
from forefetch.v1 import router_pb2

Prompt = str | Sequence[int] | Sequence[Mapping[str, str]]
SessionMode = Literal["start", "continue", "resume"]


class Options(TypedDict, total=False):
    """What may be asked of a generation; a missing or None option is the router's default. See router.proto for ranges.

    `session` names a conversation that outlives its router; `session_mode`: "start" it, "continue" it (the default), or
    "resume" its last answer from token `next_index` on, without a prompt.
    """

    max_tokens: int | None
    temperature: float | None
    top_k: int | None
    top_p: float | None
    min_p: float | None
    seed: int | None
    stop: str | Sequence[str] | None
    stop_token_ids: Sequence[int] | None
    ignore_eos: bool | None
    top_logprobs: int | None
    request_id: str | None
    session: str | None
    session_mode: SessionMode | None
    next_index: int | None


@dataclass(frozen=True, slots=True)
class StepTimings:
    """Where the step that made a token spent its time, milliseconds; see StepTimings in router.proto."""

    total_ms: float
    attention_ms: float
    gate_ms: float
    link_ms: float
    expert_ms: float
    copy_wait_ms: float
    queue_ms: float
    combine_ms: float
    sampling_ms: float
    batch: int
    tokens: int
    lookahead_ms: float = 0.0
    lookahead_hidden_ms: float = 0.0


@dataclass(frozen=True, slots=True)
class Token:
    """A generated token. `text` became final with it and may be empty; `at_ms` is its arrival here after the call began.

    `logprob` and `top_logprobs` (token id, logprob; likeliest first) are set when top_logprobs was asked for.
    """

    index: int
    token_id: int
    text: str
    at_ms: float
    timings: StepTimings
    logprob: float | None
    top_logprobs: tuple[tuple[int, float], ...]


@dataclass(frozen=True, slots=True)
class Usage:
    """Tokens of prompt and answer, prompt tokens taken from a cache, steps run again after a lost worker."""

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int
    replayed_steps: int


@dataclass(frozen=True, slots=True)
class Session:
    """A session at the end of an answer: tokens of the conversation; whether its log has all of them, so that it can go on;
    tokens of this answer that came from the log."""

    id: str
    tokens: int
    saved: bool
    resumed_tokens: int


@dataclass(frozen=True, slots=True)
class Finish:
    """The end of an answer. `reason`: "stop_token", "stop_string" (then `stop_string` is set), "length" or "context".

    `text` was held back until now. `ttft_ms` and `duration_ms` are the router's, from the request's arrival there.
    `kv_format`, `shadow_experts`, `expert_format`, `shadow_format` and `trunk_format` name approximations; "" and 0 mean that
    everything was computed as the checkpoint says.
    `session` says what became of the session, None without one.
    """

    reason: str
    text: str
    usage: Usage
    ttft_ms: float
    duration_ms: float
    request_id: str
    seed: int
    stop_string: str
    kv_format: str
    shadow_experts: int
    expert_format: str = ""
    shadow_format: str = ""
    trunk_format: str = ""
    session: Session | None = None


Event = Token | Finish


@dataclass(frozen=True, slots=True)
class Completion:
    """A whole answer. Times are seen from here: from the call to the first token, and between tokens."""

    tokens: tuple[Token, ...]
    finish: Finish

    @property
    def text(self) -> str:
        """The answer."""
        return "".join(token.text for token in self.tokens) + self.finish.text

    @property
    def token_ids(self) -> list[int]:
        """All generated ids, a stop token included."""
        return [token.token_id for token in self.tokens]

    @property
    def finish_reason(self) -> str:
        """See `Finish.reason`."""
        return self.finish.reason

    @property
    def usage(self) -> Usage:
        """What the request used."""
        return self.finish.usage

    @property
    def timings(self) -> list[StepTimings]:
        """The step of each token."""
        return [token.timings for token in self.tokens]

    @property
    def ttft_ms(self) -> float:
        """Time to first token, milliseconds; of an answer without tokens, time to its end."""
        return self.tokens[0].at_ms if self.tokens else self.finish.duration_ms

    @property
    def tpot_ms_p50(self) -> float | None:
        """Median time per output token after the first, milliseconds; None with fewer than two tokens."""
        return self.tpot_ms(0.5)

    @property
    def tpot_ms_p99(self) -> float | None:
        """99th percentile of the same."""
        return self.tpot_ms(0.99)

    def tpot_ms(self, quantile: float) -> float | None:
        """The nearest-rank quantile of the gaps between tokens."""
        arrivals = [token.at_ms for token in self.tokens]
        gaps = sorted(later - sooner for sooner, later in pairwise(arrivals))
        return gaps[max(0, math.ceil(quantile * len(gaps)) - 1)] if gaps else None


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
        timings=_timings(token.timings),
        logprob=token.logprob.logprob if token.HasField("logprob") else None,
        top_logprobs=tuple((other.token_id, other.logprob) for other in token.top_logprobs),
    )


_PARTS = ("total", "attention", "gate", "link", "expert", "copy_wait", "queue", "combine", "sampling")
_LOOKAHEAD = ("lookahead", "lookahead_hidden")


def _timings(message: router_pb2.StepTimings) -> StepTimings:
    parts = {f"{part}_ms": getattr(message, f"{part}_ns") / 1e6 for part in (*_PARTS, *_LOOKAHEAD)}
    return StepTimings(**parts, batch=message.batch, tokens=message.tokens)


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
