"""A router that answers by rote, and one call to it through either client."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import grpc
import pytest
from waiting import PATIENCE_S, until

from forefetch import Client, SyncClient, errors, rpc
from forefetch.client import Finish, Usage
from forefetch.v1 import router_pb2, router_pb2_grpc

ERRORS = {
    "full": errors.Overloaded("the queue is full", 1.5),
    "bad": errors.BadRequest("sampling.top_p", "is 2; it must be in (0, 1]"),
    "gone": errors.Unavailable("shard 1 has no worker"),
    "draining": errors.Draining("the router is shutting down"),
    "defect": RuntimeError("secret"),
}
STEP = router_pb2.StepTimings(total_ns=3_000_000, attention_ns=1_500_000, expert_ns=500_000, batch=2, tokens=5)

SHORT_S = 1.0
"""A deadline that passes, and before which a call still reaches the server."""


@dataclass
class FakeRouter(router_pb2_grpc.RouterServiceServicer):
    """Answers with one token per prompt id; a text prompt names what goes wrong."""

    requests: list[Any] = field(default_factory=list)
    metadata: list[dict[str, Any]] = field(default_factory=list)
    begun: threading.Event = field(default_factory=threading.Event)
    ended: threading.Event = field(default_factory=threading.Event)

    def _note(self, request: Any, context: grpc.ServicerContext) -> None:
        self.requests.append(request)
        self.metadata.append(dict(context.invocation_metadata()))

    @rpc.sync_handler
    def Generate(self, request: router_pb2.GenerateRequest, context: grpc.ServicerContext) -> Iterator[Any]:
        self._note(request, context)
        if request.text == "endless":
            context.add_callback(self.ended.set)
            self.begun.set()
            while context.is_active():
                yield router_pb2.GenerateResponse(token=router_pb2.TokenEvent(text="x"))
                time.sleep(0.01)
            return
        for index, token_id in enumerate(request.tokens.ids or (1, 2)):
            event = router_pb2.TokenEvent(index=index, token_id=token_id, text=f"<{token_id}>", timings=STEP)
            if request.HasField("top_logprobs"):
                event.logprob.logprob = -0.5
                event.top_logprobs.add(token_id=9, logprob=-0.25)
            yield router_pb2.GenerateResponse(token=event)
            time.sleep(0.01)
        if request.text in ERRORS:
            raise ERRORS[request.text]
        if request.text != "cut":
            yield router_pb2.GenerateResponse(finish=FINISH)

    @rpc.sync_handler
    def Tokenize(self, request: router_pb2.TokenizeRequest, context: grpc.ServicerContext) -> Any:
        self._note(request, context)
        return router_pb2.TokenizeResponse(ids=map(ord, request.text or request.chat.messages[0].content))

    @rpc.sync_handler
    def Describe(self, request: Any, context: grpc.ServicerContext) -> Any:
        self._note(request, context)
        return router_pb2.DescribeResponse(model="fake")

    @rpc.sync_handler
    def GetStats(self, request: Any, context: grpc.ServicerContext) -> Any:
        if (context.time_remaining() or PATIENCE_S) < SHORT_S:  # it cannot be answered in time
            until(lambda: not context.is_active())
        return router_pb2.GetStatsResponse(steps=7)

    @rpc.sync_handler
    def GetTrace(self, request: router_pb2.GetTraceRequest, context: grpc.ServicerContext) -> Any:
        raise errors.NotFound(f"no request {request.request_id}")


FINISH = router_pb2.FinishEvent(
    reason=router_pb2.FINISH_REASON_STOP_STRING,
    text="!",
    usage=router_pb2.Usage(prompt_tokens=3, completion_tokens=2, cached_tokens=1, replayed_steps=4),
    ttft_ns=2_500_000,
    duration_ns=9_000_000,
    request_id="r1",
    seed=1 << 63,
    stop_string="END",
    approximations=router_pb2.Approximations(kv_format="fp16", shadow_experts=3),
)
FINISHED = Finish("stop_string", "!", Usage(3, 2, 1, 4), 2.5, 9.0, "r1", 1 << 63, "END", "fp16", 3)


@contextmanager
def served() -> Iterator[tuple[FakeRouter, str]]:
    """One, and its address."""
    fake = FakeRouter()
    server = grpc.server(ThreadPoolExecutor(8))
    router_pb2_grpc.add_RouterServiceServicer_to_server(fake, server)
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    yield fake, f"127.0.0.1:{port}"
    server.stop(None).wait()


def run(kind: str, address: str, method: str, *args: Any, **options: Any) -> Any:
    """One call through either client; `generate` comes back as a list."""
    if kind == "sync":
        with SyncClient(address) as client:
            result = getattr(client, method)(*args, **options)
            return list(result) if method == "generate" else result

    async def call() -> Any:
        async with Client(address) as client:
            result = getattr(client, method)(*args, **options)
            return [event async for event in result] if method == "generate" else await result

    return asyncio.run(call())


both = pytest.mark.parametrize("kind", ["async", "sync"])
