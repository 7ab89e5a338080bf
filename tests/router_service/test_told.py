"""Tokens as bytes are what protobuf makes of the same message; a sink gives events back in order, whoever is first."""

from __future__ import annotations

import asyncio

import pytest

from forefetch.errors import Cancelled
from forefetch.telemetry.book import timings_message
from forefetch.telemetry.ring import Timings
from forefetch.v1 import router_pb2
from router_service.answer import TokenOut
from router_service.told import Sink, TokenBytes

STEP = Timings(total_ns=16_500_000, attention_ns=5, expert_ns=2**40, batch=32, tokens=32, shadow_experts=7)
EVENTS = [
    TokenOut(0, 0, "", None, [], Timings()),
    TokenOut(0, 0, "", None, [], STEP),
    TokenOut(1, 8191, " wörd", None, [], STEP),
    TokenOut(2, 300, "x" * 200, -0.25, [(300, -0.25), (0, -3.5)], STEP),
    TokenOut(3, 1, "y" * 70_000, None, [], Timings(total_ns=1)),
    TokenOut(4, 1, "", 0.0, [], STEP),
]


def whole(event: TokenOut) -> router_pb2.GenerateResponse:
    tops = [router_pb2.TokenLogprob(token_id=i, logprob=p) for i, p in event.tops]
    token = router_pb2.TokenEvent(index=event.index, token_id=event.token_id, text=event.text, top_logprobs=tops)
    token.timings.CopyFrom(timings_message(event.timings))
    if event.logprob is not None:
        token.logprob.CopyFrom(router_pb2.TokenLogprob(token_id=event.token_id, logprob=event.logprob))
    return router_pb2.GenerateResponse(token=token)


@pytest.mark.parametrize("order", [1, -1])
def test_bytes_are_those_of_the_message(order: int) -> None:
    told = TokenBytes()
    for event in EVENTS[::order]:
        assert told(event) == whole(event).SerializeToString(deterministic=True)
        assert router_pb2.GenerateResponse.FromString(told(event)) == whole(event)


def test_a_sink_keeps_the_order_and_wakes_its_reader() -> None:
    async def run() -> list[str]:
        sink, errors = Sink(), [Cancelled(str(n)) for n in range(4)]
        sink.put(errors[0])
        sink.put(errors[1])
        found = [await sink.get(), await sink.get()]
        reader = asyncio.ensure_future(sink.get())
        await asyncio.sleep(0)
        sink.put(errors[2])
        sink.put(errors[3])
        found += [await reader, await sink.get()]
        return [str(error) for error in found]

    assert asyncio.run(run()) == ["0", "1", "2", "3"]


def test_a_reader_that_is_cancelled_loses_nothing() -> None:
    async def run() -> str:
        sink = Sink()
        reader = asyncio.ensure_future(sink.get())
        await asyncio.sleep(0)
        reader.cancel()
        sink.put(Cancelled("late"))
        with pytest.raises(asyncio.CancelledError):
            await reader
        return str(await sink.get())

    assert asyncio.run(run()) == "late"
