"""What a request may ask for: every field of GenerateRequest against its limit. Pure; the server hands plain values in.

Errors carry the field's dotted proto name and the limit, so that a client can show which input was wrong.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from forefetch.errors import BadRequest, UnsupportedModel

MAX_MESSAGES = 10_000
MAX_STOP_STRINGS = 16
MAX_STOP_STRING_BYTES = 256
MAX_TOP_LOGPROBS = 20
MAX_REQUEST_ID_BYTES = 128
MAX_SESSION_ID_BYTES = 96
_REQUEST_ID = re.compile(r"[A-Za-z0-9._-]+")


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How one row's next token is chosen; always complete and within limits. Temperature 0 is greedy, top_k 0 keeps all."""

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int = 0
    top_logprobs: int | None = None


@dataclass(frozen=True, slots=True)
class Limits:
    """What this router can serve.

    `context` is the most tokens of prompt plus answer (the smaller of model, setting and KV pool); `sampling` is what
    requests that set nothing get (see `default_sampling`); `max_prompt_bytes` bounds text before it is tokenised.
    """

    vocab_size: int
    context: int
    default_max_tokens: int
    eos_token_ids: frozenset[int] = frozenset()
    sampling: SamplingParams = SamplingParams()
    max_prompt_bytes: int = 4 << 20


@dataclass(frozen=True, slots=True)
class Ask:
    """A GenerateRequest in plain form; None means unset. `prompt` holds the ids, `form` the oneof field they came from."""

    prompt: Sequence[int]
    form: str = "tokens"
    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    seed: int | None = None
    max_tokens: int | None = None
    stop_strings: Sequence[str] = ()
    stop_token_ids: Sequence[int] = ()
    ignore_eos: bool = False
    top_logprobs: int | None = None
    request_id: str = ""


@dataclass(frozen=True, slots=True)
class Admitted:
    """A request that passed. `stop_token_ids` includes the checkpoint's end-of-sequence tokens unless they are ignored.

    `context_limited`: `max_tokens` is what the context leaves, not what was wanted, so reaching it ends in
    FINISH_REASON_CONTEXT instead of LENGTH.
    """

    prompt: tuple[int, ...]
    max_tokens: int
    context_limited: bool
    sampling: SamplingParams
    stop_strings: tuple[str, ...]
    stop_token_ids: frozenset[int]
    request_id: str


def default_sampling(generation_config: Mapping[str, object]) -> SamplingParams:
    """What a checkpoint recommends: greedy unless `do_sample` is true, then its temperature (1.0 if it names none), top_k,
    top_p and min_p. Raises UnsupportedModel naming a value that makes no sense."""
    if not generation_config.get("do_sample"):
        return SamplingParams()
    fields = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0}
    values = {
        name: default if generation_config.get(name) is None else generation_config[name] for name, default in fields.items()
    }
    for name, value in values.items():
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise UnsupportedModel(f"generation_config.json: {name} {value!r} is not a number")
    try:
        params = SamplingParams(**{**values, "top_k": max(0, int(values["top_k"]))})  # type: ignore[call-overload]
        _check_sampling(params)
    except (BadRequest, ValueError, OverflowError) as error:  # the last two of a top_k that is not finite
        raise UnsupportedModel(f"generation_config.json: {error}") from None
    return params


def check_text(text: str, limits: Limits, field: str = "text") -> None:
    """Bounds a text prompt before it is tokenised. Raises BadRequest."""
    if not text:
        raise BadRequest(field, "is empty; at least one character is needed")
    if (size := len(text.encode())) > limits.max_prompt_bytes:
        raise BadRequest(field, f"has {size} bytes; the limit is {limits.max_prompt_bytes}")


def check_length(form: str, tokens: int, limits: Limits) -> None:
    """Whether a prompt of so many tokens leaves room for an answer. Raises BadRequest."""
    if tokens == 0:
        raise BadRequest(form, "the prompt has no tokens; at least one is needed")
    if tokens >= limits.context:
        raise BadRequest(
            form, f"the prompt has {tokens} tokens; the context of {limits.context} takes at most {limits.context - 1}"
        )


def check_messages(count: int) -> None:
    """Bounds the turns of a conversation before any of them is looked at. Raises BadRequest."""
    if count > MAX_MESSAGES:
        raise BadRequest("chat.messages", f"has {count} messages; the limit is {MAX_MESSAGES}")


def check_chat(messages: Sequence[tuple[str, str]], limits: Limits) -> None:
    """Bounds a conversation of (role, content) before it is rendered. Which roles exist is the template's business."""
    if not messages:
        raise BadRequest("chat.messages", "is empty; at least one message is needed")
    if any(not role for role, _ in messages):
        raise BadRequest("chat.messages.role", "is empty; use system, user or assistant")
    size = sum(len(role.encode()) + len(content.encode()) for role, content in messages)
    if size > limits.max_prompt_bytes:
        raise BadRequest("chat.messages", f"have {size} bytes; the limit is {limits.max_prompt_bytes}")


def admit(ask: Ask, limits: Limits, *, seed: int, request_id: str) -> Admitted:
    """Checks every field; `seed` and `request_id` serve requests that set none. Raises BadRequest.

    An explicit max_tokens above what the context leaves is clipped to it, see `Admitted.context_limited`.
    """
    max_tokens, context_limited = _check_lengths(ask, limits)
    _check_ids("tokens.ids" if ask.form == "tokens" else ask.form, ask.prompt, limits.vocab_size)
    if len(ask.stop_token_ids) > limits.vocab_size:
        raise BadRequest("stop.token_ids", f"has {len(ask.stop_token_ids)} ids; the vocabulary has {limits.vocab_size}")
    _check_ids("stop.token_ids", ask.stop_token_ids, limits.vocab_size)
    _check_stop_strings(ask.stop_strings)
    check_request_id(ask.request_id)
    eos = frozenset[int]() if ask.ignore_eos else limits.eos_token_ids
    return Admitted(
        prompt=tuple(ask.prompt),
        max_tokens=max_tokens,
        context_limited=context_limited,
        sampling=_sampling(ask, limits, seed),
        stop_strings=tuple(ask.stop_strings),
        stop_token_ids=eos.union(ask.stop_token_ids),
        request_id=ask.request_id or request_id,
    )


def _check_lengths(ask: Ask, limits: Limits) -> tuple[int, bool]:
    """Prompt and answer against the context -> (max_tokens, whether the context is what limits it)."""
    check_length(ask.form, len(ask.prompt), limits)
    room = limits.context - len(ask.prompt)
    wanted = limits.default_max_tokens if ask.max_tokens is None else ask.max_tokens
    if wanted < 1:
        raise BadRequest("stop.max_tokens", f"is {wanted}; it must be at least 1")
    return min(wanted, room), wanted > room


def _check_ids(field: str, ids: Sequence[int], vocab_size: int) -> None:
    if not ids or (min(ids) >= 0 and max(ids) < vocab_size):
        return
    index, bad = next((i, t) for i, t in enumerate(ids) if not 0 <= t < vocab_size)
    raise BadRequest(field, f"token {bad} at index {index} is outside the vocabulary of {vocab_size}")


def _check_stop_strings(strings: Sequence[str]) -> None:
    if len(strings) > MAX_STOP_STRINGS:
        raise BadRequest("stop.strings", f"has {len(strings)} strings; the limit is {MAX_STOP_STRINGS}")
    for index, string in enumerate(strings):
        size = len(string.encode())
        if not 1 <= size <= MAX_STOP_STRING_BYTES:
            raise BadRequest("stop.strings", f"string {index} has {size} bytes; the limit is 1 to {MAX_STOP_STRING_BYTES}")


def check_request_id(request_id: str) -> None:
    """The caller's name for a request. Raises BadRequest."""
    if len(request_id) > MAX_REQUEST_ID_BYTES:
        raise BadRequest("request_id", f"has {len(request_id)} characters; the limit is {MAX_REQUEST_ID_BYTES}")
    if request_id and not _REQUEST_ID.fullmatch(request_id):
        raise BadRequest("request_id", "may hold only letters, digits, '.', '_' and '-'")


def check_session_id(session_id: str) -> None:
    """The caller's name for a conversation. Raises BadRequest."""
    if not 1 <= len(session_id) <= MAX_SESSION_ID_BYTES:
        raise BadRequest("session.id", f"has {len(session_id)} characters; the limit is 1 to {MAX_SESSION_ID_BYTES}")
    if not _REQUEST_ID.fullmatch(session_id):
        raise BadRequest("session.id", "may hold only letters, digits, '.', '_' and '-'")


def _sampling(ask: Ask, limits: Limits, seed: int) -> SamplingParams:
    default = limits.sampling
    params = SamplingParams(
        temperature=default.temperature if ask.temperature is None else ask.temperature,
        top_k=default.top_k if ask.top_k is None else ask.top_k,
        top_p=default.top_p if ask.top_p is None else ask.top_p,
        min_p=default.min_p if ask.min_p is None else ask.min_p,
        seed=seed if ask.seed is None else ask.seed,
        top_logprobs=ask.top_logprobs,
    )
    _check_sampling(params)
    return params


def _check_sampling(params: SamplingParams) -> None:
    # Written so that NaN fails: every comparison with it is false.
    _require(0.0 <= params.temperature < math.inf, "sampling.temperature", params.temperature, "a finite number >= 0")
    _require(params.top_k >= 0, "sampling.top_k", params.top_k, ">= 0")
    _require(0.0 < params.top_p <= 1.0, "sampling.top_p", params.top_p, "in (0, 1]")
    _require(0.0 <= params.min_p <= 1.0, "sampling.min_p", params.min_p, "in [0, 1]")
    _require(0 <= params.seed < 1 << 64, "sampling.seed", params.seed, "an unsigned 64-bit integer")
    wanted = params.top_logprobs
    _require(wanted is None or 0 <= wanted <= MAX_TOP_LOGPROBS, "top_logprobs", wanted, f"in 0..{MAX_TOP_LOGPROBS}")


def _require(holds: bool, field: str, value: object, limit: str) -> None:
    if not holds:
        raise BadRequest(field, f"is {value}; it must be {limit}")
