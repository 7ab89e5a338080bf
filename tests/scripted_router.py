"""A router that is really served but answers from a script, for tests of clients and commands."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from concurrent import futures
from types import ModuleType
from typing import Any

import grpc
from sample_trace import sample

from forefetch.v1 import router_pb2, router_pb2_grpc


class ScriptedRouter(router_pb2_grpc.RouterServiceServicer):
    """Answers from a recorded trace, and with `stats`: a message or a status."""

    def __init__(self) -> None:
        self._server = grpc.server(futures.ThreadPoolExecutor(2))
        router_pb2_grpc.add_RouterServiceServicer_to_server(self, self._server)
        self.address = f"127.0.0.1:{self._server.add_insecure_port('127.0.0.1:0')}"
        self.trace = sample(tokens=20)
        self.asked: list[router_pb2.GenerateRequest] = []
        self.stats: router_pb2.GetStatsResponse | grpc.StatusCode = grpc.StatusCode.UNAVAILABLE

    def Generate(self, request: router_pb2.GenerateRequest, context: grpc.ServicerContext) -> Iterator[Any]:
        self.asked.append(request)
        self.trace.request_id = request.request_id
        finish = router_pb2.FinishEvent(reason=router_pb2.FINISH_REASON_LENGTH, request_id=request.request_id)
        yield router_pb2.GenerateResponse(finish=finish)

    def GetTrace(self, request: router_pb2.GetTraceRequest, context: grpc.ServicerContext) -> router_pb2.GetTraceResponse:
        if request.request_id != self.trace.request_id:
            context.abort(grpc.StatusCode.NOT_FOUND, "no such request")
        return self.trace

    def GetStats(self, request: router_pb2.GetStatsRequest, context: grpc.ServicerContext) -> router_pb2.GetStatsResponse:
        if not isinstance(self.stats, router_pb2.GetStatsResponse):
            context.abort(self.stats, "not now")
        return self.stats

    def __enter__(self) -> ScriptedRouter:
        self._server.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.stop(None).wait(10)


def run(module: ModuleType, router: ScriptedRouter, *argv: str) -> int:
    """One command of forefetch.cli against the router."""
    parser = argparse.ArgumentParser()
    module.add_parser(parser.add_subparsers())
    name = module.__name__.rpartition(".")[2]
    return int(module.run(parser.parse_args([name, "--address", router.address, *argv])))
