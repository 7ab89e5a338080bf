"""Round trip of one layer call over each link, with the experts replaced by an echo, so that the link is what is measured.

    python -m benchmarks.link_round_trip [--quick]

The worker is a process of its own with the real service and links; beside it serves a bare gRPC echo (generated stubs, one
open bidirectional stream, the same bytes) as the yardstick, and a plain copy of the bytes there and back as the floor.
Links take turns in short rounds, so that a disturbance of the machine meets all of them.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from queue import SimpleQueue
from statistics import quantiles
from typing import Any

import grpc
import numpy as np
import torch

from benchmarks.results import Row, append
from expert_worker import client
from expert_worker.config import spin_ns
from expert_worker.core import Core, WorkerInfo
from expert_worker.links import LocalLink
from expert_worker.server import MAX_THREADS, SERVICE, ExpertService
from forefetch import rpc, shm, wire
from forefetch.cluster import MALLOC
from forefetch.settings import ServiceConfig, child_environment
from forefetch.v1 import expert_pb2, expert_pb2_grpc

HIDDEN, DTYPE, EXPERTS, TOP_K, MAX_ROWS = 2048, torch.bfloat16, 128, 8, 64
INFO = WorkerInfo("echo", "echo", 0, 1, {0: tuple(range(EXPERTS))}, HIDDEN, DTYPE, "cpu", "echo", MAX_ROWS, shm.domain())


NOTHING = wire.Verified()
_copy = ctypes.PyDLL(None).memmove  # keeps the GIL, as experts of one row that a kernel evaluates
_copy.argtypes = ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t


class Echo:
    """Experts that answer with the rows they got, in as little time as can be."""

    load = np.zeros((1, EXPERTS), dtype=np.int64)
    weight_bytes = 0

    def forward(self, call: wire.LayerCall, out: torch.Tensor, source: str = "") -> tuple[int, wire.Verified]:
        _copy(out.data_ptr(), call.x.data_ptr(), out.nbytes)
        return 0, NOTHING


class BareEcho(expert_pb2_grpc.ExpertServiceServicer):
    """What gRPC's generated code does with the bytes, and nothing else."""

    def Forward(self, request_iterator: Iterator[Any], context: Any) -> Iterator[Any]:
        for request in request_iterator:
            yield expert_pb2.ForwardResponse(frame=request.frame)


def serve() -> None:
    """The process on the other side: the echo worker and the bare echo, each on its port, until standard input closes."""
    torch.set_num_threads(1)
    service = ExpertService(spin_ns(-1, 1))
    service.core = Core(INFO, Echo())
    server = rpc.serve_sync(ServiceConfig(), SERVICE, service.register, max_workers=MAX_THREADS)
    bare = grpc.server(ThreadPoolExecutor(4), options=rpc.channels.server_options())
    expert_pb2_grpc.add_ExpertServiceServicer_to_server(BareEcho(), bare)
    port = bare.add_insecure_port("127.0.0.1:0")
    bare.start()
    rpc.announce(server.address, bare=f"127.0.0.1:{port}")
    sys.stdin.read()
    bare.stop(None)
    server.stop()


def a_call(rows: int) -> wire.LayerCall:
    pairs = rows * TOP_K
    row = np.arange(rows, dtype=np.int32).repeat(TOP_K)
    expert = np.arange(pairs, dtype=np.int32) % EXPERTS
    return wire.LayerCall(1, 0, torch.randn(rows, HIDDEN).to(DTYPE), row, expert, np.random.rand(pairs).astype(np.float32))


def through(link: client.Link, call: wire.LayerCall) -> Callable[[], None]:
    tensors = call.x, call.pair_row, call.pair_expert, call.pair_weight

    def once() -> None:
        link.submit(wire.LayerCall(call.step, call.layer, *tensors))  # a new one each time, as a router's
        link.collect(10.0)

    return once


def bare_stream(address: str, call: wire.LayerCall) -> Callable[[], None]:
    request = expert_pb2.ForwardRequest(frame=bytes(wire.request_bytes(*call.x.shape, len(call.pair_row), DTYPE)))
    outbox: SimpleQueue[Any] = SimpleQueue()
    stub = expert_pb2_grpc.ExpertServiceStub(rpc.channel(address))
    replies = stub.Forward(iter(outbox.get, None))

    def once() -> None:
        outbox.put(request)
        assert len(next(replies).frame)

    return once


def copies(call: wire.LayerCall) -> Callable[[], None]:
    there, back = torch.empty_like(call.x), torch.empty_like(call.x)

    def once() -> None:
        there.copy_(call.x)
        back.copy_(there)

    return once


def measure(cases: dict[str, Callable[[], None]], rounds: int, calls: int) -> dict[str, tuple[float, float]]:
    """(p50, p99) in microseconds of each."""
    times: dict[str, list[int]] = {name: [] for name in cases}
    for _ in range(rounds):
        for name, once in cases.items():
            for _ in range(calls // 4):
                once()
            for _ in range(calls):
                began = time.perf_counter_ns()
                once()
                times[name].append(time.perf_counter_ns() - began)
    cuts = {name: quantiles(values, n=100) for name, values in times.items()}
    return {name: (cut[49] / 1e3, cut[98] / 1e3) for name, cut in cuts.items()}


def run(ready: dict[str, str], rounds: int, calls: int) -> list[Row]:
    links: dict[str, client.Link] = {"local": LocalLink(Core(INFO, Echo()))}
    for kind in ("shm", "grpc") if shm.domain() else ("grpc",):
        links[kind] = client.connect(
            ready["address"], link=kind, digest="echo", hidden=HIDDEN, dtype=DTYPE, max_rows=MAX_ROWS, tls=None, timeout_s=10.0
        )
    rows: list[Row] = []
    print(f"{HIDDEN} wide bf16, {TOP_K} pairs a row, us     p50      p99")
    for count in (1, 64):
        call = a_call(count)
        cases = {kind: through(link, call) for kind, link in links.items()}
        cases |= {"bare grpc echo": bare_stream(ready["bare"], call), "copy there and back": copies(call)}
        found = measure(cases, rounds, calls)
        for name, (p50, p99) in found.items():
            print(f"{count:3} rows  {name:22} {p50:8.1f} {p99:8.1f}")
            case = f"{count} rows x {HIDDEN} bf16, {name}"
            rows += [Row("link_round_trip", case, "p50", p50, "us"), Row("link_round_trip", case, "p99", p99, "us")]
        print(f"{count:3} rows  grpc is {found['grpc'][0] / found['bare grpc echo'][0]:.2f} x the bare echo")
    for link in links.values():
        link.close()
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="few calls, and no rows are written")
    parser.add_argument("--side", choices=("measure", "serve", "start"), default="start", help=argparse.SUPPRESS)
    parser.add_argument("--ready", default="", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.side == "serve":
        serve()
    elif options.side == "measure":
        torch.set_num_threads(1)
        rows = run(json.loads(options.ready), 2 if options.quick else 10, 100 if options.quick else 400)
        if not options.quick:
            append(rows)
    else:
        start(sys.argv[1:])


def start(flags: list[str]) -> None:
    """Both sides as children, since glibc reads its settings when a process starts (see forefetch.cluster.MALLOC)."""
    environment = child_environment(**MALLOC)
    command = [sys.executable, "-m", "benchmarks.link_round_trip"]
    with subprocess.Popen(
        [*command, "--side=serve"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment
    ) as server:
        assert server.stdout
        ready = server.stdout.readline()
        status = subprocess.run(
            [*command, *flags, "--side=measure", f"--ready={ready}"], env=environment, check=False
        ).returncode
        assert server.stdin
        server.stdin.close()
    sys.exit(status)


if __name__ == "__main__":
    main()
