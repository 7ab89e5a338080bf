"""The Python client. `pip install forefetch` is enough for it: no torch, no numpy.

    async with Client("127.0.0.1:50051") as client:
        async for event in client.generate("Once upon a time", max_tokens=64):
            print(event.text, end="", flush=True)
        completion = await client.complete([{"role": "user", "content": "Hello"}], temperature=0.7, seed=1)

`SyncClient` has the same methods without `async`. A prompt is text, token ids, or chat messages with "role" and "content".
Errors are those of `forefetch.errors`. A timeout is the call's deadline, in seconds; leaving an iterator early cancels the
request. The current OpenTelemetry span, if any, becomes the parent of the request's spans.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Awaitable, Callable, Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cached_property
from time import perf_counter
from types import TracebackType
from typing import Self, TypeVar, Unpack

import grpc
import grpc.aio
from google.protobuf.message import Message

from forefetch import messages, rpc
from forefetch.messages import Completion, Event, Finish, Options, Prompt, StepTimings, Token, Usage
from forefetch.telemetry import context
from forefetch.v1 import router_pb2, router_pb2_grpc

__all__ = ["Client", "Completion", "Event", "Finish", "Options", "Prompt", "StepTimings", "SyncClient", "Token", "Usage"]

UNARY_TIMEOUT_S = 10.0
R = TypeVar("R")
_Metadata = tuple[tuple[str, str], ...]


class Client:
    """For asyncio: any number of concurrent calls, within one event loop. `address` is a router's host:port.

    The connection is made on the first call; `close`, or leaving `async with`, ends it and the calls that still run.
    """

    def __init__(self, address: str, *, tls: rpc.Tls | None = None) -> None:
        self.address, self._tls = address, tls

    @cached_property
    def _channel(self) -> grpc.aio.Channel:
        return rpc.aio_channel(self.address, self._tls)  # must be made inside the loop

    @cached_property
    def _stub(self) -> router_pb2_grpc.RouterServiceAsyncStub:
        return router_pb2_grpc.RouterServiceStub(self._channel)

    async def close(self) -> None:
        """Ends the connection. A closed client cannot be used again."""
        await self._channel.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        await self.close()

    def generate(
        self, prompt: Prompt, *, timeout: float | None = None, **options: Unpack[Options]
    ) -> AsyncGenerator[Event, None]:
        """Streams tokens, then one Finish. A value that does not fit its field raises BadRequest here, before any call."""
        return self._stream(messages.generate_request(prompt, options), _metadata(), timeout)

    async def _stream(
        self, request: router_pb2.GenerateRequest, metadata: _Metadata, timeout: float | None
    ) -> AsyncGenerator[Event, None]:
        started = perf_counter()
        call = self._stub.Generate(request, timeout=timeout, metadata=metadata)
        try:
            with _our_errors():
                async for response in call:
                    yield messages.event(response, (perf_counter() - started) * 1e3)
        finally:
            call.cancel()  # no effect on a call that has ended

    async def complete(self, prompt: Prompt, *, timeout: float | None = None, **options: Unpack[Options]) -> Completion:
        """The whole answer at once."""
        return messages.completion([event async for event in self.generate(prompt, timeout=timeout, **options)])

    async def tokenize(self, prompt: str | Sequence[Mapping[str, str]], *, timeout: float = UNARY_TIMEOUT_S) -> list[int]:
        """Text or chat messages -> ids, as `generate` would feed the model."""
        return list((await self._call(self._stub.Tokenize, messages.tokenize_request(prompt), timeout)).ids)

    async def describe(self, *, timeout: float = UNARY_TIMEOUT_S) -> router_pb2.DescribeResponse:
        """What the router serves."""
        return await self._call(self._stub.Describe, router_pb2.DescribeRequest(), timeout)

    async def stats(self, *, timeout: float = UNARY_TIMEOUT_S) -> router_pb2.GetStatsResponse:
        """Counters and gauges since the router began to serve."""
        return await self._call(self._stub.GetStats, router_pb2.GetStatsRequest(), timeout)

    async def trace(self, request_id: str, *, timeout: float = UNARY_TIMEOUT_S) -> router_pb2.GetTraceResponse:
        """Where one request's time went, step by step. NotFound once the router has forgotten it."""
        return await self._call(self._stub.GetTrace, router_pb2.GetTraceRequest(request_id=request_id), timeout)

    async def _call(self, method: Callable[..., Awaitable[R]], request: Message, timeout: float) -> R:
        with _our_errors():
            return await method(request, timeout=timeout, metadata=_metadata())


class SyncClient:
    """`Client` for code without asyncio; may be used from several threads. `generate` returns a plain generator."""

    def __init__(self, address: str, *, tls: rpc.Tls | None = None) -> None:
        self.address = address
        self._channel = rpc.channel(address, tls)
        self._stub = router_pb2_grpc.RouterServiceStub(self._channel)

    def close(self) -> None:
        """Ends the connection. A closed client cannot be used again."""
        self._channel.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    def generate(
        self, prompt: Prompt, *, timeout: float | None = None, **options: Unpack[Options]
    ) -> Generator[Event, None, None]:
        """See `Client.generate`."""
        return self._stream(messages.generate_request(prompt, options), _metadata(), timeout)

    def _stream(
        self, request: router_pb2.GenerateRequest, metadata: _Metadata, timeout: float | None
    ) -> Generator[Event, None, None]:
        started = perf_counter()
        call = self._stub.Generate(request, timeout=timeout, metadata=metadata)
        try:
            with _our_errors():
                for response in call:
                    yield messages.event(response, (perf_counter() - started) * 1e3)
        finally:
            call.cancel()

    def complete(self, prompt: Prompt, *, timeout: float | None = None, **options: Unpack[Options]) -> Completion:
        """See `Client.complete`."""
        return messages.completion(list(self.generate(prompt, timeout=timeout, **options)))

    def tokenize(self, prompt: str | Sequence[Mapping[str, str]], *, timeout: float = UNARY_TIMEOUT_S) -> list[int]:
        """See `Client.tokenize`."""
        return list(self._call(self._stub.Tokenize, messages.tokenize_request(prompt), timeout).ids)

    def describe(self, *, timeout: float = UNARY_TIMEOUT_S) -> router_pb2.DescribeResponse:
        """See `Client.describe`."""
        return self._call(self._stub.Describe, router_pb2.DescribeRequest(), timeout)

    def stats(self, *, timeout: float = UNARY_TIMEOUT_S) -> router_pb2.GetStatsResponse:
        """See `Client.stats`."""
        return self._call(self._stub.GetStats, router_pb2.GetStatsRequest(), timeout)

    def trace(self, request_id: str, *, timeout: float = UNARY_TIMEOUT_S) -> router_pb2.GetTraceResponse:
        """See `Client.trace`."""
        return self._call(self._stub.GetTrace, router_pb2.GetTraceRequest(request_id=request_id), timeout)

    def _call(self, method: Callable[..., R], request: Message, timeout: float) -> R:
        with _our_errors():
            return method(request, timeout=timeout, metadata=_metadata())


def _metadata() -> _Metadata:
    return context.to_metadata(context.current())


@contextmanager
def _our_errors() -> Iterator[None]:
    try:
        yield
    except grpc.RpcError as error:
        raise rpc.error_of(error) from None
