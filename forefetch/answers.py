"""What a generation is asked and what it answers, as plain Python values. `messages.py` is their way over the wire."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal, TypedDict

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
