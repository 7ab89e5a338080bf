"""The Python client. `pip install forefetch` is enough for it: no torch, no numpy.

    async with Client("127.0.0.1:50051") as client:
        async for event in client.generate("Once upon a time", max_tokens=64):
            print(event.text, end="", flush=True)
        completion = await client.complete([{"role": "user", "content": "Hello"}], temperature=0.7, seed=1)

`SyncClient` has the same methods without `async`. With several addresses ("a:1,b:1") a request that finds its router gone goes
to the next one; with `session="name"` an answer that breaks off is resumed there, without a lost, repeated or changed token.

A prompt is text, token ids, or chat messages with "role" and "content". Errors are those of `forefetch.errors`. A timeout is
the call's deadline, in seconds; leaving an iterator early cancels the request. The current OpenTelemetry span, if any, becomes
the parent of the request's spans.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable, Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from time import perf_counter, sleep
from types import TracebackType
from typing import Self, TypeVar, Unpack

import grpc
import grpc.aio
from google.protobuf.message import Message

from forefetch import messages, rpc
from forefetch.answers import Completion, Event, Finish, Options, Prompt, Session, StepTimings, Token, Usage
from forefetch.attempts import Attempts
from forefetch.errors import Cancelled, ForefetchError, Unavailable
from forefetch.telemetry import context
from forefetch.v1 import router_pb2, router_pb2_grpc

__all__ = [
    "Client",
    "Completion",
    "Event",
    "Finish",
    "Options",
    "Prompt",
    "Session",
    "StepTimings",
    "SyncClient",
    "Token",
    "Usage",
]

UNARY_TIMEOUT_S = 10.0
PATIENCE_S = 30.0
LONGEST_S = 1e8
"""Deadlines beyond this, infinity too, are none."""
CLOSED = "the client is closed"
R = TypeVar("R")
_Metadata = tuple[tuple[str, str], ...]


class Client:
    """For asyncio: any number of concurrent calls, within one event loop. `address` is a router's host:port, or several with
    commas between; calls go to the one that answered last. `token`: who the caller is, for a router with --auth-tokens.
    `patience_s`: how long a generation that can be sent again looks for a router, seconds without an answer.

    Connections are made on the first call; `close`, or leaving `async with`, ends them and the calls that still run.
    """

    def __init__(self, address: str, *, tls: rpc.Tls | None = None, token: str = "", patience_s: float = PATIENCE_S) -> None:
        self.address, self._tls, self._patience_s = address, tls, patience_s
        self._bearer = _bearer(token)
        self._addresses, self._at = address.split(","), 0
        self._channels: dict[str, grpc.aio.Channel] = {}
        self._closed = False

    def _stub_of(self, address: str) -> router_pb2_grpc.RouterServiceAsyncStub:
        if self._closed:
            raise Cancelled(CLOSED)
        if address not in self._channels:
            self._channels[address] = rpc.aio_channel(address, self._tls)  # must be made inside the loop
        return router_pb2_grpc.RouterServiceStub(self._channels[address])

    @property
    def _stub(self) -> router_pb2_grpc.RouterServiceAsyncStub:
        return self._stub_of(self._addresses[self._at])

    async def close(self) -> None:
        """Ends the connections. A closed client cannot be used again: its calls raise Cancelled."""
        self._closed = True
        for channel in self._channels.values():
            await channel.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        await self.close()

    def generate(
        self, prompt: Prompt | None, *, timeout: float | None = None, **options: Unpack[Options]
    ) -> AsyncGenerator[Event, None]:
        """Streams tokens, then one Finish. A value that does not fit its field raises BadRequest here, before any call."""
        return self._stream(messages.generate_request(prompt, options), _metadata() + self._bearer, timeout)

    async def _stream(
        self, request: router_pb2.GenerateRequest, metadata: _Metadata, timeout: float | None
    ) -> AsyncGenerator[Event, None]:
        started = perf_counter()
        attempts = Attempts(request, self._addresses, self._at, self._patience_s)
        while True:
            stub = self._stub_of(attempts.address)
            call = stub.Generate(attempts.request, timeout=_left(timeout, started), metadata=metadata)
            try:
                with _our_errors():
                    async for response in call:
                        self._at = attempts.index
                        yield _seen(attempts, response, started)
                return
            except ForefetchError as error:
                pause = attempts.again(error, perf_counter())
            finally:
                call.cancel()  # no effect on a call that has ended
            await asyncio.sleep(pause)

    async def complete(self, prompt: Prompt | None, *, timeout: float | None = None, **options: Unpack[Options]) -> Completion:
        """The whole answer at once."""
        return messages.completion([event async for event in self.generate(prompt, timeout=timeout, **options)])

    async def tokenize(self, prompt: str | Sequence[Mapping[str, str]], *, timeout: float = UNARY_TIMEOUT_S) -> list[int]:
        """Text or chat messages -> ids, as `generate` would feed the model."""
        request = messages.tokenize_request(prompt)
        return list((await self._call(lambda stub: stub.Tokenize, request, timeout)).ids)

    async def describe(self, *, timeout: float = UNARY_TIMEOUT_S) -> router_pb2.DescribeResponse:
        """What the router serves."""
        return await self._call(lambda stub: stub.Describe, router_pb2.DescribeRequest(), timeout)

    async def stats(self, *, timeout: float = UNARY_TIMEOUT_S) -> router_pb2.GetStatsResponse:
        """Counters and gauges since the router began to serve."""
        return await self._call(lambda stub: stub.GetStats, router_pb2.GetStatsRequest(), timeout)

    async def trace(self, request_id: str, *, timeout: float = UNARY_TIMEOUT_S) -> router_pb2.GetTraceResponse:
        """Where one request's time went, step by step. NotFound once the router has forgotten it."""
        return await self._call(lambda stub: stub.GetTrace, router_pb2.GetTraceRequest(request_id=request_id), timeout)

    async def _call(
        self,
        method: Callable[[router_pb2_grpc.RouterServiceAsyncStub], Callable[..., Awaitable[R]]],
        request: Message,
        timeout: float,
    ) -> R:
        """A call that changes nothing, to the first router that is there."""
        started = perf_counter()
        for left in reversed(range(len(self._addresses))):
            try:
                with _our_errors():
                    metadata = _metadata() + self._bearer
                    return await method(self._stub)(request, timeout=_left(timeout, started), metadata=metadata)
            except Unavailable:
                if not left:
                    raise
                self._at = (self._at + 1) % len(self._addresses)
        raise AssertionError("there is an address")


class SyncClient:
    """`Client` for code without asyncio; may be used from several threads. `generate` returns a plain generator."""

    def __init__(self, address: str, *, tls: rpc.Tls | None = None, token: str = "", patience_s: float = PATIENCE_S) -> None:
        self.address, self._patience_s = address, patience_s
        self._bearer = _bearer(token)
        self._addresses, self._at = address.split(","), 0
        self._channels = [rpc.channel(one, tls) for one in self._addresses]
        self._stubs = [router_pb2_grpc.RouterServiceStub(channel) for channel in self._channels]
        self._closed = False

    def _stub_at(self, index: int) -> router_pb2_grpc.RouterServiceStub:
        if self._closed:
            raise Cancelled(CLOSED)
        return self._stubs[index]

    @property
    def _stub(self) -> router_pb2_grpc.RouterServiceStub:
        return self._stub_at(self._at)

    def close(self) -> None:
        """Ends the connections. A closed client cannot be used again: its calls raise Cancelled."""
        self._closed = True
        for channel in self._channels:
            channel.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    def generate(
        self, prompt: Prompt | None, *, timeout: float | None = None, **options: Unpack[Options]
    ) -> Generator[Event, None, None]:
        """See `Client.generate`."""
        return self._stream(messages.generate_request(prompt, options), _metadata() + self._bearer, timeout)

    def _stream(
        self, request: router_pb2.GenerateRequest, metadata: _Metadata, timeout: float | None
    ) -> Generator[Event, None, None]:
        started = perf_counter()
        attempts = Attempts(request, self._addresses, self._at, self._patience_s)
        while True:
            stub = self._stub_at(attempts.index)
            call = stub.Generate(attempts.request, timeout=_left(timeout, started), metadata=metadata)
            try:
                with _our_errors():
                    for response in call:
                        self._at = attempts.index
                        yield _seen(attempts, response, started)
                return
            except ForefetchError as error:
                pause = attempts.again(error, perf_counter())
            finally:
                call.cancel()
            sleep(pause)

    def complete(self, prompt: Prompt | None, *, timeout: float | None = None, **options: Unpack[Options]) -> Completion:
        """See `Client.complete`."""
        return messages.completion(list(self.generate(prompt, timeout=timeout, **options)))

    def tokenize(self, prompt: str | Sequence[Mapping[str, str]], *, timeout: float = UNARY_TIMEOUT_S) -> list[int]:
        """See `Client.tokenize`."""
        return list(self._call(lambda stub: stub.Tokenize, messages.tokenize_request(prompt), timeout).ids)

    def describe(self, *, timeout: float = UNARY_TIMEOUT_S) -> router_pb2.DescribeResponse:
        """See `Client.describe`."""
        return self._call(lambda stub: stub.Describe, router_pb2.DescribeRequest(), timeout)

    def stats(self, *, timeout: float = UNARY_TIMEOUT_S) -> router_pb2.GetStatsResponse:
        """See `Client.stats`."""
        return self._call(lambda stub: stub.GetStats, router_pb2.GetStatsRequest(), timeout)

    def trace(self, request_id: str, *, timeout: float = UNARY_TIMEOUT_S) -> router_pb2.GetTraceResponse:
        """See `Client.trace`."""
        return self._call(lambda stub: stub.GetTrace, router_pb2.GetTraceRequest(request_id=request_id), timeout)

    def _call(
        self, method: Callable[[router_pb2_grpc.RouterServiceStub], Callable[..., R]], request: Message, timeout: float
    ) -> R:
        """See `Client._call`."""
        started = perf_counter()
        for left in reversed(range(len(self._addresses))):
            try:
                with _our_errors():
                    return method(self._stub)(request, timeout=_left(timeout, started), metadata=_metadata() + self._bearer)
            except Unavailable:
                if not left:
                    raise
                self._at = (self._at + 1) % len(self._addresses)
        raise AssertionError("there is an address")


def _seen(attempts: Attempts, response: router_pb2.GenerateResponse, started: float) -> Event:
    event = messages.event(response, (perf_counter() - started) * 1e3)
    if isinstance(event, Token):
        attempts.saw(event.index)
    return event


def _left(timeout: float | None, started: float) -> float | None:
    """gRPC takes what is too far away for what has passed."""
    return None if timeout is None or timeout > LONGEST_S else max(timeout - (perf_counter() - started), 0.0)


def _bearer(token: str) -> _Metadata:
    return (("authorization", f"Bearer {token}"),) if token else ()


def _metadata() -> _Metadata:
    return context.to_metadata(context.current())


@contextmanager
def _our_errors() -> Iterator[None]:
    try:
        yield
    except grpc.RpcError as error:
        raise rpc.error_of(error) from None
