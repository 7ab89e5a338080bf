"""What a session's log holds and what is still to be written to it. Pure.

A session's tokens are those of its conversation: prompts and answers in turn, the ids that the model saw. Its state is the last
turn (`Turn`): enough for any router of the same model to go on with the answer to the same end. Sampling needs no state but
the seed, because a token's randomness is a function of (seed, position).
"""

from __future__ import annotations

import json
import struct
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any, NamedTuple

from forefetch.errors import Mismatch
from router_service.admission import Admitted, SamplingParams

if TYPE_CHECKING:
    from kv_service.client import SessionAck, SessionRecord

VERSION = 2
_TAIL = struct.Struct("<QI")  # end, page size


@dataclass(frozen=True, slots=True)
class Turn:
    """The last answer of a session. `model`, `arithmetic`: what it is computed with, and how; `prompt`: tokens of the
    conversation before it; `request_id`: of the request that began it; `reason`, `stop_string`: how it ended, "" while it
    has not."""

    model: str
    arithmetic: str
    prompt: int
    max_tokens: int
    context_limited: bool
    sampling: SamplingParams
    stop_strings: tuple[str, ...]
    stop_token_ids: frozenset[int]
    request_id: str = ""
    reason: str = ""
    stop_string: str = ""

    @classmethod
    def of(cls, model: str, arithmetic: str, admitted: Admitted) -> Turn:
        """The turn that a request begins."""
        return cls(
            model,
            arithmetic,
            len(admitted.prompt),
            admitted.max_tokens,
            admitted.context_limited,
            admitted.sampling,
            admitted.stop_strings,
            admitted.stop_token_ids,
            admitted.request_id,
        )

    def admitted(self, prompt: Sequence[int], request_id: str) -> Admitted:
        """The request that began the turn, given the tokens before its answer."""
        return Admitted(
            tuple(prompt),
            self.max_tokens,
            self.context_limited,
            self.sampling,
            self.stop_strings,
            self.stop_token_ids,
            request_id,
        )

    def encode(self) -> bytes:
        """As the log keeps it."""
        values = {**asdict(self), "version": VERSION, "stop_token_ids": sorted(self.stop_token_ids)}
        return json.dumps(values, sort_keys=True).encode()

    @classmethod
    def decode(cls, data: bytes) -> Turn:
        """The inverse. Mismatch for what this version does not know."""
        try:
            values: dict[str, Any] = json.loads(data)
            if values.pop("version") != VERSION:
                raise Mismatch("session.id: the session was written by another version")
            values["sampling"] = SamplingParams(**values["sampling"])
            values["stop_strings"], values["stop_token_ids"] = (
                tuple(values["stop_strings"]),
                frozenset(values["stop_token_ids"]),
            )
            return cls(**values)
        except (ValueError, TypeError, KeyError, AttributeError):
            raise Mismatch("session.id: the session's state cannot be read") from None


class Tail(NamedTuple):
    """What the cache needs of positions start .. end beside the blocks before them, with pages of `page` tokens."""

    start: int
    end: int
    page: int
    data: bytes

    def encode(self) -> bytes:
        """As the log keeps it, beside `start`."""
        return _TAIL.pack(self.end, self.page) + self.data

    @classmethod
    def decode(cls, start: int, data: bytes) -> Tail | None:
        """The inverse; None for what is no tail."""
        if len(data) <= _TAIL.size:
            return None
        end, page = _TAIL.unpack_from(data)
        return cls(start, end, page, data[_TAIL.size :])


@dataclass(slots=True)
class Cursor:
    """What the log has of one running answer. `tokens` acknowledged ones; `turn_known`: the state is there as it is now."""

    turn: Turn
    tokens: int
    turn_known: bool = False

    def end(self, reason: str, stop_string: str) -> None:
        """The answer is complete."""
        self.turn, self.turn_known = replace(self.turn, reason=reason, stop_string=stop_string), False

    def next(self, tokens: Sequence[int], make: Callable[..., SessionRecord]) -> SessionRecord | None:
        """What is to be written next, given all tokens of the conversation; None: nothing."""
        # A negative id stands for a row without usable logits: its request is about to end, and the id is no token.
        fresh = tuple(token for token in tokens[self.tokens :] if token >= 0)
        if not fresh and self.turn_known:
            return None
        return make(position=self.tokens, token_ids=fresh, state=None if self.turn_known else self.turn.encode())

    def appended(self, record: SessionRecord) -> None:
        """It is in the log."""
        self.tokens = record.position + len(record.token_ids)
        self.turn_known = self.turn_known or record.state == self.turn.encode()

    def gap(self, ack: SessionAck) -> None:
        """The log has less than was thought, having lost some: what is missing goes again, and the state with it."""
        self.tokens, self.turn_known = min(ack.tokens, self.tokens), False
