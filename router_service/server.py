"""The users' API over asyncio gRPC: checks requests, hands them to the engine, turns its events into messages."""

from __future__ import annotations

import asyncio
import itertools
import random
import secrets
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from time import monotonic, perf_counter_ns
from typing import Any

import grpc

from forefetch.errors import BadRequest, ForefetchError
from forefetch.rpc import aio_handler
from forefetch.telemetry import names
from forefetch.telemetry.book import timings_message
from forefetch.telemetry.context import from_metadata
from forefetch.v1 import router_pb2, router_pb2_grpc
from router_service import admission
from router_service.answer import Answer, FinishOut, TokenOut
from router_service.engine import Delivery, Engine, Event
from router_service.recorder import Recorder
from router_service.scheduler import Request
from router_service.status import Status
from router_service.text import Text

Context = grpc.aio.ServicerContext[Any, Any]
Form = router_pb2.GenerateRequest | router_pb2.TokenizeRequest


@dataclass(eq=False)
class Sink:
    """Where one stream's events arrive, in its event loop."""

    events: asyncio.Queue[Event]


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
            sink.events.put_nowait(event)


class RouterServicer(router_pb2_grpc.RouterServiceServicer):
    """`text` is None for a checkpoint without tokenizer.json: then only token ids are taken."""

    def __init__(self, engine: Engine, limits: admission.Limits, text: Text | None, recorder: Recorder, status: Status) -> None:
        self._engine, self._limits, self._text, self._recorder, self._status = engine, limits, text, recorder, status
        self._keys = itertools.count(1)

    @aio_handler
    async def Generate(
        self, request: router_pb2.GenerateRequest, context: Context
    ) -> AsyncIterator[router_pb2.GenerateResponse]:
        """See router.proto."""
        admitted = await self._admit(request)
        left = context.time_remaining()
        wanted = Request(
            key=next(self._keys),
            request_id=admitted.request_id,
            prompt=admitted.prompt,
            admitted=admitted,
            arrival=monotonic(),
            deadline=None if left is None else monotonic() + left,
        )
        operation = names.CHAT if request.WhichOneof("prompt") == "chat" else names.TEXT_COMPLETION
        arrival = self._recorder.arrive(wanted, from_metadata(context.invocation_metadata()), operation)
        sink = Sink(asyncio.Queue())
        stream = self._text.stream(admitted.stop_strings) if self._text else None
        try:
            self._engine.submit(Answer(wanted, stream), sink)
        except ForefetchError as error:
            self._recorder.finished(wanted, error.code)
            raise
        try:
            async for message in self._messages(wanted, sink, arrival):
                yield message
        finally:
            self._engine.cancel(wanted)  # no effect on a request that has ended

    async def _messages(self, request: Request, sink: Sink, arrival: int) -> AsyncIterator[router_pb2.GenerateResponse]:
        """Tokens, then the finish; raises the error that ended the request instead."""
        first = 0
        while True:
            event = await sink.events.get()
            if isinstance(event, TokenOut):
                first = first or perf_counter_ns() - arrival
                yield router_pb2.GenerateResponse(token=_token(event))
            elif isinstance(event, FinishOut):
                yield router_pb2.GenerateResponse(finish=self._finish(event, request, first, perf_counter_ns() - arrival))
                return
            else:
                raise event

    async def _admit(self, request: router_pb2.GenerateRequest) -> admission.Admitted:
        prompt = await self._prompt_ids(request)
        sampling, stop = request.sampling, request.stop
        ask = admission.Ask(
            prompt=prompt,
            form=request.WhichOneof("prompt") or "prompt",
            temperature=_optional(sampling, "temperature"),
            top_k=_optional(sampling, "top_k"),
            top_p=_optional(sampling, "top_p"),
            min_p=_optional(sampling, "min_p"),
            seed=_optional(sampling, "seed"),
            max_tokens=_optional(stop, "max_tokens"),
            stop_strings=stop.strings,
            stop_token_ids=stop.token_ids,
            ignore_eos=stop.ignore_eos,
            top_logprobs=_optional(request, "top_logprobs"),
            request_id=request.request_id,
        )
        if ask.stop_strings and self._text is None:
            raise BadRequest("stop.strings", "need a tokenizer; this checkpoint has none")
        return admission.admit(ask, self._limits, seed=random.getrandbits(64), request_id=secrets.token_hex(8))

    async def _prompt_ids(self, request: Form) -> Sequence[int]:
        """Token ids of whichever form the prompt has; long texts are tokenised off the event loop."""
        form = request.WhichOneof("prompt")
        if form == "tokens" and isinstance(request, router_pb2.GenerateRequest):
            return request.tokens.ids
        if form is None:
            raise BadRequest("prompt", "is not set; one of text, tokens or chat is needed")
        if self._text is None:
            raise BadRequest(form, "needs a tokenizer; this checkpoint has none, send token ids")
        if form == "text":
            admission.check_text(request.text, self._limits)
            return await asyncio.to_thread(self._text.encode, request.text)
        messages = [(message.role, message.content) for message in request.chat.messages]
        admission.check_chat(messages, self._limits)
        return await asyncio.to_thread(self._text.chat, messages)

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
            approximations=self._status.approximations(),
        )

    @aio_handler
    async def Tokenize(self, request: router_pb2.TokenizeRequest, context: Context) -> router_pb2.TokenizeResponse:
        """See router.proto."""
        return router_pb2.TokenizeResponse(ids=await self._prompt_ids(request))

    @aio_handler
    async def Describe(self, request: router_pb2.DescribeRequest, context: Context) -> router_pb2.DescribeResponse:
        """See router.proto."""
        return self._status.describe()

    @aio_handler
    async def GetStats(self, request: router_pb2.GetStatsRequest, context: Context) -> router_pb2.GetStatsResponse:
        """See router.proto."""
        return self._status.stats()

    @aio_handler
    async def GetTrace(self, request: router_pb2.GetTraceRequest, context: Context) -> router_pb2.GetTraceResponse:
        """See router.proto."""
        if not request.request_id:
            raise BadRequest("request_id", "is empty; name the request")
        return await asyncio.to_thread(self._recorder.book.trace, request.request_id)


def _optional(message: Any, field: str) -> Any:
    return getattr(message, field) if message.HasField(field) else None


def _token(event: TokenOut) -> router_pb2.TokenEvent:
    message = router_pb2.TokenEvent(
        index=event.index, token_id=event.token_id, text=event.text, timings=timings_message(event.timings)
    )
    if event.logprob is not None:
        message.logprob.token_id, message.logprob.logprob = event.token_id, event.logprob
        message.top_logprobs.extend(router_pb2.TokenLogprob(token_id=i, logprob=p) for i, p in event.tops)
    return message
