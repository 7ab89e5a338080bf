"""A stream's events between the engine and the wire: where they arrive, and tokens as bytes of router.proto's messages."""

from __future__ import annotations

import asyncio
from collections import deque

from forefetch.telemetry.book import timings_message
from forefetch.telemetry.ring import Timings
from forefetch.v1 import router_pb2
from router_service.answer import Event, TokenOut

_TOKEN = bytes([router_pb2.GenerateResponse.TOKEN_FIELD_NUMBER << 3 | 2])  # the tag of a field of so many bytes


class Sink:
    """Where one stream's events arrive, in its event loop; one reader. An asyncio.Queue would cost as much as the message."""

    def __init__(self) -> None:
        self._events: deque[Event] = deque()
        self._waiter: asyncio.Future[None] | None = None

    def put(self, event: Event) -> None:
        """Adds the next event."""
        self._events.append(event)
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    async def get(self) -> Event:
        """The next event, once there is one."""
        while not self._events:
            self._waiter = asyncio.get_running_loop().create_future()
            await self._waiter
        return self._events.popleft()


class TokenBytes:
    """Makes the bytes of a GenerateResponse with a token, as protobuf's own serialiser would.

    All tokens of a step have the same timings, which are serialised once. Their field is the last of a TokenEvent, so its
    bytes may follow those of the others.
    """

    def __init__(self) -> None:
        self._timings, self._tail = Timings(), b""

    def __call__(self, event: TokenOut) -> bytes:
        """The message's bytes."""
        if event.timings is not self._timings:
            message = router_pb2.TokenEvent(timings=timings_message(event.timings))
            self._timings, self._tail = event.timings, message.SerializeToString()
        token = router_pb2.TokenEvent(index=event.index, token_id=event.token_id, text=event.text)
        if event.logprob is not None:
            token.logprob.token_id, token.logprob.logprob = event.token_id, event.logprob
            token.top_logprobs.extend(router_pb2.TokenLogprob(token_id=i, logprob=p) for i, p in event.tops)
        body = token.SerializeToString() + self._tail
        return _TOKEN + _varint(len(body)) + body


def _varint(number: int) -> bytes:
    """A length as protobuf writes it: seven bits a byte, lowest first, the highest bit set in all but the last."""
    parts = []
    while number > 0x7F:
        parts.append(number & 0x7F | 0x80)
        number >>= 7
    return bytes((*parts, number))
