"""A request's answer as it grows: tokens in, events out, and the decision that it is complete."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, Protocol

from forefetch.errors import ForefetchError
from forefetch.telemetry.ring import Timings
from router_service.scheduler import Request

Reason = Literal["STOP_TOKEN", "STOP_STRING", "LENGTH", "CONTEXT"]


class TextStream(Protocol):
    """What an answer needs of `text.TextStream`."""

    @property
    def stopped(self) -> str | None:
        """The stop string that ended the text."""

    def push(self, token_id: int) -> str:
        """Text that became final with this token."""

    def finish(self) -> str:
        """Text that was still held back."""


@dataclass(frozen=True, slots=True)
class TokenOut:
    """One generated token."""

    index: int
    token_id: int
    text: str
    logprob: float | None
    tops: list[tuple[int, float]]
    timings: Timings


@dataclass(frozen=True, slots=True)
class FinishOut:
    """The end of an answer."""

    reason: Reason
    text: str
    stop_string: str


Event = TokenOut | FinishOut | ForefetchError
Delivery = tuple[Any, Event]  # the sink of a request, and what happened


class Answer:
    """`text` is None for a checkpoint without tokenizer: then ids are all there is."""

    def __init__(self, request: Request, text: TextStream | None) -> None:
        self.request, self.text = request, text

    def token(
        self, token_id: int, logprob: float | None, tops: list[tuple[int, float]], timings: Timings
    ) -> tuple[TokenOut, FinishOut | None]:
        """The event of a token that was just appended to the request, and the finish if it is the last one."""
        return self._next(self.request.generated - 1, token_id, logprob, tops, timings)

    def replay(self) -> tuple[list[TokenOut], FinishOut | None]:
        """The events of the tokens that the request came with, as the router that generated them made them but for timings
        and log-probabilities, and the finish if the last of them ends the answer."""
        events: list[TokenOut] = []
        for index, token_id in enumerate(self.request.known):
            event, finish = self._next(index, token_id, None, [], Timings())
            events.append(event)
            if finish is not None:
                return events, finish
        return events, None

    def _next(
        self, index: int, token_id: int, logprob: float | None, tops: list[tuple[int, float]], timings: Timings
    ) -> tuple[TokenOut, FinishOut | None]:
        admitted = self.request.admitted
        if token_id in admitted.stop_token_ids:
            return TokenOut(index, token_id, "", logprob, tops, timings), self._finish("STOP_TOKEN")
        text = self.text.push(token_id) if self.text else ""
        event = TokenOut(index, token_id, text, logprob, tops, timings)
        if self.text and self.text.stopped is not None:
            return event, FinishOut("STOP_STRING", "", self.text.stopped)
        if index + 1 == admitted.max_tokens:
            return event, self._finish("CONTEXT" if admitted.context_limited else "LENGTH")
        return event, None

    def _finish(self, reason: Reason) -> FinishOut:
        """Releases held text; a stop string that completes only now (a character ended) still wins."""
        text = self.text.finish() if self.text else ""
        stopped = self.text.stopped if self.text else None
        return FinishOut("STOP_STRING", text, stopped) if stopped is not None else FinishOut(reason, text, "")
