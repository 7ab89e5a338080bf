"""Servers of the RPC tests' calls in this process, synchronous and asyncio, and a stub for them."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from rpc_calls import SERVICE, AioCalls, Calls, SyncCalls, add

from forefetch import rpc
from forefetch.settings import ServiceConfig
from forefetch.v1 import router_pb2 as pb
from forefetch.v1 import router_pb2_grpc as pb_grpc

DEADLINE_S = 60


@dataclass
class Running:
    """A server in this process."""

    address: str
    metrics: str
    calls: Calls

    def stub(self, tls: rpc.Tls | None = None) -> Any:
        return contextlib.closing(Stub(self.address, tls))


class Stub:
    """A stub with the channel to close."""

    def __init__(self, address: str, tls: rpc.Tls | None = None) -> None:
        self.channel = rpc.channel(address, tls)
        self.router = pb_grpc.RouterServiceStub(self.channel)
        self.close = self.channel.close

    def ids(self, text: str, **how: Any) -> list[int]:
        return list(self.router.Tokenize(pb.TokenizeRequest(text=text), timeout=DEADLINE_S, **how).ids)

    def tokens(self, text: str) -> int:
        return sum(1 for _ in self.router.Generate(pb.GenerateRequest(text=text), timeout=DEADLINE_S))


@contextlib.contextmanager
def serving(kind: str, config: ServiceConfig | None = None, registry: Any = None) -> Iterator[Running]:
    with serving_sync(config, registry) if kind == "sync" else serving_aio(config, registry) as running:
        yield running


@contextlib.contextmanager
def serving_sync(config: ServiceConfig | None, registry: Any) -> Iterator[Running]:
    calls = SyncCalls()
    server = rpc.serve_sync(config or ServiceConfig(), SERVICE, lambda s: add(calls, s), max_workers=4, registry=registry)
    server.set_serving(True)
    try:
        yield Running(server.address, server.metrics, calls)
    finally:
        server.stop()


@contextlib.contextmanager
def serving_aio(config: ServiceConfig | None, registry: Any) -> Iterator[Running]:
    loop, calls = asyncio.new_event_loop(), AioCalls()
    thread = threading.Thread(target=loop.run_forever)
    thread.start()

    def run(coroutine: Any) -> Any:
        return asyncio.run_coroutine_threadsafe(coroutine, loop).result(DEADLINE_S)

    try:
        server = run(rpc.serve_aio(config or ServiceConfig(), SERVICE, lambda s: add(calls, s), registry=registry))
        try:
            run(server.set_serving(True))
            yield Running(server.address, server.metrics, calls)
        finally:
            run(server.stop())
    finally:
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()
