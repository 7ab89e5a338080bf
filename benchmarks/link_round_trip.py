"""Round trip of one layer call over each link, with experts that do nothing, so that the link is what is measured.

    python -m benchmarks.link_round_trip [--quick]

The worker is a process of its own with the real service and links; beside it serves a bare gRPC echo (generated stubs, one
open bidirectional stream, the same bytes) as the yardstick, and a plain copy of the bytes there and back as the floor.
Links and echo take turns in blocks of a few calls, so that a disturbance of the machine meets all of them, and every round
connects anew, the echo too: how fast a stream is depends on where the threads of both its ends come to run, by up to a factor
of two. What is quoted is the median of the rounds' ratios, with an interval that holds it in 95 of 100 runs.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing, contextmanager
from itertools import chain
from queue import SimpleQueue
from statistics import median, quantiles
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
BLOCK, AGAIN = 20, 2  # calls in a turn, and before them some that do not count
INFO = WorkerInfo("echo", "echo", 0, 1, {0: tuple(range(EXPERTS))}, HIDDEN, DTYPE, "cpu", "echo", MAX_ROWS, shm.domain())


class Idle:
    """Experts that take no time: what lies where the reply's rows belong is the reply. The bare echo, too, copies nothing."""

    load = np.zeros((1, EXPERTS), dtype=np.int64)
    weight_bytes = 0

    def forward(self, call: wire.LayerCall, out: torch.Tensor, source: str = "") -> tuple[int, wire.Verified]:
        return 0, wire.NOTHING


class BareEcho(expert_pb2_grpc.ExpertServiceServicer):
    """What gRPC's generated code does with the bytes, and nothing else."""

    def Forward(self, request_iterator: Iterator[Any], context: Any) -> Iterator[Any]:
        for request in request_iterator:
            yield expert_pb2.ForwardResponse(frame=request.frame)


def serve() -> None:
    """The process on the other side: the idle worker and the bare echo, each on its port, until standard input closes."""
    torch.set_num_threads(1)
    service = ExpertService(spin_ns(-1, 1))
    service.core = Core(INFO, Idle())
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


@contextmanager
def bare_stream(address: str, call: wire.LayerCall) -> Iterator[Callable[[], None]]:
    request = expert_pb2.ForwardRequest(frame=bytes(wire.request_bytes(*call.form.sizes, DTYPE)))
    outbox: SimpleQueue[Any] = SimpleQueue()
    with rpc.channel(address) as channel:
        replies = expert_pb2_grpc.ExpertServiceStub(channel).Forward(iter(outbox.get, None))

        def once() -> None:
            outbox.put(request)
            assert len(next(replies).frame)

        yield once
        outbox.put(None)


def copies(call: wire.LayerCall) -> Callable[[], None]:
    there, back = torch.empty_like(call.x), torch.empty_like(call.x)

    def once() -> None:
        there.copy_(call.x)
        back.copy_(there)

    return once


@contextmanager
def opened(ready: dict[str, str], call: wire.LayerCall) -> Iterator[dict[str, Callable[[], None]]]:
    """What is measured, each with connections of its own."""
    agreed: dict[str, Any] = {"digest": "echo", "hidden": HIDDEN, "dtype": DTYPE, "max_rows": MAX_ROWS}
    cases = {"local": through(LocalLink(Core(INFO, Idle())), call)}
    with ExitStack() as stack:
        for kind in ("shm", "grpc") if shm.domain() else ("grpc",):
            link = client.connect(ready["address"], link=kind, tls=None, timeout_s=10.0, **agreed)
            cases[kind] = through(stack.enter_context(closing(link)), call)
        cases["bare grpc echo"] = stack.enter_context(bare_stream(ready["bare"], call))
        yield cases | {"copy there and back": copies(call)}


def measure(ready: dict[str, str], call: wire.LayerCall, rounds: int, blocks: int) -> dict[str, list[list[float]]]:
    """Microseconds of each call, by case and round."""
    times: dict[str, list[list[float]]] = {}
    for _ in range(rounds):
        with opened(ready, call) as cases:
            for name, once in cases.items():
                times.setdefault(name, []).append([])
                for _ in range(BLOCK):
                    once()
            for block in range(blocks):
                for name in list(cases) if block % 2 else reversed(cases):
                    for _ in range(AGAIN):
                        cases[name]()
                    times[name][-1] += [timed(cases[name]) for _ in range(BLOCK)]
    return times


def timed(once: Callable[[], None]) -> float:
    began = time.perf_counter_ns()
    once()
    return (time.perf_counter_ns() - began) / 1e3


def run(ready: dict[str, str], rounds: int, blocks: int) -> list[Row]:
    rows: list[Row] = []
    print(f"{HIDDEN} wide bf16, {TOP_K} pairs a row, us     p50      p99")
    for count in (1, 64):
        found = measure(ready, a_call(count), rounds, blocks)
        shape = f"{count} rows x {HIDDEN} bf16"
        for name, times in found.items():
            cuts = quantiles(chain.from_iterable(times), n=100)
            print(f"{count:3} rows  {name:22} {cuts[49]:8.1f} {cuts[98]:8.1f}")
            case = f"{shape}, {name}"
            rows += [Row("link_round_trip", case, "p50", cuts[49], "us"), Row("link_round_trip", case, "p99", cuts[98], "us")]
        ratio, low, high = compared(found["grpc"], found["bare grpc echo"])
        print(f"{count:3} rows  grpc over the bare echo, median of {rounds} rounds: {ratio:.3f} ({low:.3f} to {high:.3f})")
        case = f"{shape}, grpc over the bare echo"
        values = {"p50 of rounds": ratio, "p50 of rounds, at least": low, "p50 of rounds, at most": high}
        rows += [Row("link_round_trip", case, metric, value, "x") for metric, value in values.items()]
    return rows


def compared(links: list[list[float]], echoes: list[list[float]]) -> tuple[float, float, float]:
    """Median of the rounds' ratios, and the two of them between which it lies with 95 %, whatever their distribution.

    Source: the binomial interval of a median, n / 2 -+ 0.98 sqrt(n).
    """
    ratios = sorted(median(link) / median(echo) for link, echo in zip(links, echoes, strict=True))
    count = len(ratios)
    reach = int(0.98 * count**0.5 + 0.5)
    return median(ratios), ratios[max(0, count // 2 - reach)], ratios[min(count - 1, (count - 1) // 2 + reach)]


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
        rows = run(json.loads(options.ready), 8 if options.quick else 40, 6 if options.quick else 10)
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
