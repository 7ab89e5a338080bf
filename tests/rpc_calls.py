"""A router that only fails, sleeps and echoes, for tests of forefetch.rpc: `rpc_calls.py sync|aio FLAGS` is its process."""

from __future__ import annotations

import asyncio
import signal
import sys
import threading
import time
from collections.abc import AsyncIterator, Iterator
from typing import Any

from forefetch import errors, rpc
from forefetch.rpc import servers
from forefetch.settings import ServiceConfig, parse
from forefetch.v1 import router_pb2 as pb
from forefetch.v1 import router_pb2_grpc as pb_grpc

SERVICE = "forefetch.v1.RouterService"
ERRORS: dict[str, Exception] = {
    "bad": errors.BadRequest("sampling.temperature", "must be >= 0, is -1"),
    "unicode": errors.BadRequest("text", "möchte nicht\n二行目"),
    "missing": errors.NotFound("no such request"),
    "mismatch": errors.Mismatch("another model"),
    "family": errors.UnsupportedModel("model_type bloom"),
    "busy": errors.Overloaded("the queue is full", 1.25),
    "away": errors.Unavailable("no worker holds expert 3"),
    "link": errors.LinkDown(2, "worker 2 did not answer within 5 s"),
    "drain": errors.Draining("going away"),
    "late": errors.DeadlineExceeded("the deadline passed"),
    "cancel": errors.Cancelled("the caller went away"),
    "long": errors.BadRequest("text", "x" * 100_000),
}


class Calls:
    """What both servicers do, by the request's text: raise an error, fail twice, say the time left, echo. Streams can sleep,
    until they are given up at most; a synchronous one can be stuck whatever happens."""

    def __init__(self) -> None:
        self.count = self.streams = 0
        self.ended = threading.Event()

    def busy(self) -> bool:
        return self.streams > 0

    def answer(self, text: str, context: Any) -> pb.TokenizeResponse:
        self.count += 1
        if text == "defect":
            raise ValueError("/etc/secret is broken")
        if text == "flaky" and self.count < 3:
            raise errors.Unavailable("not yet")
        if text == "left":
            return pb.TokenizeResponse(ids=[round(rpc.time_left(context, 100))])
        if text == "metadata":
            return pb.TokenizeResponse(ids=[len(v) for k, v in context.invocation_metadata() if k == "x-big"])
        if text in ERRORS:
            raise ERRORS[text]
        return pb.TokenizeResponse(ids=bytes(len(text)))


class SyncCalls(Calls, pb_grpc.RouterServiceServicer):
    @rpc.sync_handler
    def Tokenize(self, request: pb.TokenizeRequest, context: Any) -> pb.TokenizeResponse:
        return self.answer(request.text, context)

    @rpc.sync_handler
    def Generate(self, request: pb.GenerateRequest, context: Any) -> Iterator[pb.GenerateResponse]:
        self.streams += 1
        try:
            yield pb.GenerateResponse(token=pb.TokenEvent(index=0))
            if request.text.startswith("stuck "):
                time.sleep(float(request.text[6:]))
            elif request.text.startswith("sleep "):
                end = time.monotonic() + float(request.text[6:])
                while time.monotonic() < end and context.is_active():
                    time.sleep(0.01)
            else:
                self.answer(request.text, context)
            yield pb.GenerateResponse(finish=pb.FinishEvent())
        finally:
            self.streams -= 1
            self.ended.set()


class AioCalls(Calls, pb_grpc.RouterServiceServicer):
    @rpc.aio_handler
    async def Tokenize(self, request: pb.TokenizeRequest, context: Any) -> pb.TokenizeResponse:
        return self.answer(request.text, context)

    @rpc.aio_handler
    async def Generate(self, request: pb.GenerateRequest, context: Any) -> AsyncIterator[pb.GenerateResponse]:
        self.streams += 1
        try:
            yield pb.GenerateResponse(token=pb.TokenEvent(index=0))
            if request.text.startswith("sleep "):
                await asyncio.sleep(float(request.text[6:]))
            else:
                self.answer(request.text, context)
            yield pb.GenerateResponse(finish=pb.FinishEvent())
        finally:
            self.streams -= 1
            self.ended.set()


def add(calls: Any, server: Any) -> None:
    pb_grpc.add_RouterServiceServicer_to_server(calls, server)


def main(kind: str, flags: list[str]) -> int:
    config = parse(ServiceConfig, flags)
    if kind.endswith("-masked"):
        threading.Thread(target=time.sleep, args=(60,), daemon=True).start()
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
    if kind.endswith("-impatient"):
        servers._LAST_RESORT_S = 0.5

    def body() -> None:
        if kind.startswith("sync"):
            calls = SyncCalls()
            rpc.serve_sync(config, SERVICE, lambda s: add(calls, s), max_workers=4, busy=calls.busy).run()
        else:
            asyncio.run(aio())

    async def aio() -> None:
        calls = AioCalls()
        server = await rpc.serve_aio(config, SERVICE, lambda s: add(calls, s), busy=calls.busy)
        await server.run()

    return rpc.run_main("test", body)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], sys.argv[2:]))
