"""The users' API over asyncio gRPC: checks requests, hands them to the engine, turns its events into messages."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator
from time import monotonic, perf_counter_ns
from typing import Any

import grpc

from forefetch.errors import BadRequest, ForefetchError
from forefetch.rpc import aio_handler
from forefetch.rpc.auth import Authenticator
from forefetch.telemetry import names
from forefetch.telemetry.context import from_metadata
from forefetch.v1 import router_pb2, router_pb2_grpc
from router_service.answer import Answer, Delivery, FinishOut, TokenOut
from router_service.asking import Reader
from router_service.callers import Callers
from router_service.conversations import Conversations, Opened
from router_service.engine import Engine
from router_service.live import Live
from router_service.recorder import Recorder
from router_service.scheduler import Request
from router_service.status import Status
from router_service.told import Sink, TokenBytes

Context = grpc.aio.ServicerContext[Any, Any]


class Deliverer:
    """Carries a step's events from the engine's thread into the event loop: one wake-up per step, not per stream."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop

    def __call__(self, deliveries: list[Delivery]) -> None:
        """May be called from any thread; does not block."""
        if deliveries and not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._fan_out, deliveries)

    @staticmethod
    def _fan_out(deliveries: list[Delivery]) -> None:
        for sink, event in deliveries:
            sink.put(event)


class RouterServicer(router_pb2_grpc.RouterServiceServicer):
    """The methods. Everything a stream sees comes through its sink."""

    def __init__(
        self,
        engine: Engine,
        reader: Reader,
        conversations: Conversations,
        recorder: Recorder,
        status: Status,
        auth: Authenticator,
        callers: Callers,
    ) -> None:
        self._engine, self._reader, self._conversations = engine, reader, conversations
        self._recorder, self._status, self._auth, self._callers = recorder, status, auth, callers
        self._keys, self._token_bytes = itertools.count(1), TokenBytes()

    @aio_handler
    async def Generate(  # type: ignore[override]  # a token's message comes as its bytes: rpc's `Parsing` takes both
        self, request: router_pb2.GenerateRequest, context: Context
    ) -> AsyncIterator[router_pb2.GenerateResponse | bytes]:
        """See router.proto."""
        tenant = self._auth.tenant(context)
        with self._callers.one(context) as caller:
            self._recorder.check_free(request.request_id, tenant)  # before a session is taken from whoever has it
            opened = await self._conversations.open(request, tenant, context.time_remaining())
            wanted = self._wanted(opened, tenant, context.time_remaining())
            operation = names.CHAT if request.WhichOneof("prompt") == "chat" else names.TEXT_COMPLETION
            arrival = self._recorder.arrive(wanted, from_metadata(context.invocation_metadata()), operation)
            live, sink, code = self._conversations.prepare(opened, wanted), None, "CANCELLED"
            try:
                await self._conversations.follow(live, context.time_remaining())
                sink = self._submit(wanted)
                async for message in self._messages(wanted, sink, arrival, opened, live):
                    caller.waits_since = monotonic()
                    yield message
                    caller.waits_since = 0.0
            except ForefetchError as error:
                code = error.code
                raise
            finally:
                if sink is None:
                    self._recorder.finished(wanted, code)  # else the engine says how it ended
                self._engine.end(wanted, caller.error)
                self._conversations.leave(live)

    def _wanted(self, opened: Opened, tenant: str, left_s: float | None) -> Request:
        """What the engine is to run."""
        now = monotonic()
        return Request(
            key=next(self._keys),
            request_id=opened.admitted.request_id,
            prompt=opened.admitted.prompt,
            known=opened.known,
            tail=opened.tail,
            tenant=tenant,
            admitted=opened.admitted,
            arrival=now,
            deadline=None if left_s is None else now + left_s,
        )

    def _submit(self, request: Request) -> Sink:
        """Hands a request to the engine, unless the tokens that it came with are the whole answer. They come first."""
        reader = self._reader
        answer = Answer(request, reader.text.stream(request.admitted.stop_strings) if reader.text else None)
        sink = Sink()
        events, finish = answer.replay()
        for event in events:
            sink.put(event)
        if finish is not None:
            sink.put(finish)
            self._recorder.finished(request, "OK", finish.reason)
        else:
            self._engine.submit(answer, sink)
        return sink

    async def _messages(
        self, request: Request, sink: Sink, arrival: int, opened: Opened, live: Live | None
    ) -> AsyncIterator[router_pb2.GenerateResponse | bytes]:
        """Tokens, then the finish; raises the error that ended the request instead."""
        first = 0
        while True:
            event = await sink.get()
            if isinstance(event, TokenOut):
                if event.index >= opened.next_index:
                    first = first or perf_counter_ns() - arrival
                    yield self._token_bytes(event)
            elif isinstance(event, FinishOut):
                finish = self._finish(event, request, first, perf_counter_ns() - arrival)
                if live is not None:
                    session = await self._conversations.finish(live, opened, event.reason, event.stop_string)
                    finish.session.CopyFrom(session)
                yield router_pb2.GenerateResponse(finish=finish)
                return
            else:
                raise event

    def _finish(self, event: FinishOut, request: Request, first: int, duration: int) -> router_pb2.FinishEvent:
        return router_pb2.FinishEvent(
            reason=f"FINISH_REASON_{event.reason}",
            text=event.text,
            stop_string=event.stop_string,
            usage=router_pb2.Usage(
                prompt_tokens=len(request.prompt),
                completion_tokens=request.generated,
                cached_tokens=request.cached,
                replayed_steps=request.replayed_steps,
            ),
            ttft_ns=first,
            duration_ns=duration,
            request_id=request.request_id,
            seed=request.admitted.sampling.seed,
            approximations=self._status.approximations(request.shadow_experts),
        )

    @aio_handler
    async def Tokenize(self, request: router_pb2.TokenizeRequest, context: Context) -> router_pb2.TokenizeResponse:
        """See router.proto."""
        self._auth.tenant(context)
        with self._callers.one(context):
            return router_pb2.TokenizeResponse(ids=await self._reader.prompt_ids(request))

    @aio_handler
    async def Describe(self, request: router_pb2.DescribeRequest, context: Context) -> router_pb2.DescribeResponse:
        """See router.proto."""
        self._auth.tenant(context)
        return self._status.describe()

    @aio_handler
    async def GetStats(self, request: router_pb2.GetStatsRequest, context: Context) -> router_pb2.GetStatsResponse:
        """See router.proto."""
        self._auth.tenant(context)
        return self._status.stats()

    @aio_handler
    async def GetTrace(self, request: router_pb2.GetTraceRequest, context: Context) -> router_pb2.GetTraceResponse:
        """See router.proto."""
        tenant = self._auth.tenant(context)
        if not request.request_id:
            raise BadRequest("request_id", "is empty; name the request")
        return await asyncio.to_thread(self._recorder.trace, request.request_id, tenant)
