"""`forefetch health`: what a service says of itself, for scripts and for people at a terminal."""

from __future__ import annotations

import argparse
import sys
import time
from typing import Any

import grpc

from forefetch import rpc
from forefetch.cli import connect
from forefetch.errors import ConfigError

NAMES = ("startup", "liveness", "readiness")
RETRY_S = 0.5
EPILOG = """\
Examples:
  forefetch health --address router:50051
  forefetch health --address router:50051 --wait 300      until it is ready, five minutes at most

Exit status: 0 when it is ready, 1 when it is not or does not answer."""


def add_parser(commands: Any) -> None:
    """Adds the command."""
    parser = commands.add_parser(
        "health",
        help="ask a service whether it is ready",
        description="Asks a router, worker or KV service for its health, name by name.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    connect.add_arguments(parser, "the service")
    parser.add_argument("--wait", type=connect.seconds, default=0.0, metavar="S", help="seconds to wait for it to become ready")


def run(args: argparse.Namespace) -> int:
    """Prints a line per name. Raises Unavailable when nobody answers in time, and what else a service says instead."""
    until = time.monotonic() + args.wait
    with rpc.channel(args.address, connect.tls_of(args)) as channel:
        while True:
            try:
                states = {name: _ask(channel, name) for name in NAMES}
            except grpc.RpcError as error:
                if time.monotonic() >= until:
                    raise rpc.error_of(error) from None
                states = {}
            if states.get("readiness") or (states and time.monotonic() >= until):
                break
            time.sleep(RETRY_S)
    for name, serving in states.items():
        print(f"{name:<10} {'serving' if serving else 'not serving'}")
    sys.stdout.flush()
    return 0 if states["readiness"] else 1


def _ask(channel: grpc.Channel, name: str) -> bool:
    try:
        from grpc_health.v1 import health_pb2, health_pb2_grpc
    except ModuleNotFoundError:
        raise ConfigError("grpcio-health-checking is needed: pip install 'forefetch[serve]'") from None
    stub: Any = health_pb2_grpc.HealthStub(channel)
    reply = stub.Check(health_pb2.HealthCheckRequest(service=name), timeout=5.0)
    return bool(reply.status == health_pb2.HealthCheckResponse.SERVING)
