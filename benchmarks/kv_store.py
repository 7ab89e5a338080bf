"""The KV service over gRPC: look-up of a long prefix, put and get beside a bare stream, restart on a large store.

    python -m benchmarks.kv_store [--quick] [--only look-up|transfers|restart] [--folder DIR]

Services are processes of their own. The yardstick of put and get is a bare gRPC stream of the same messages between two
processes that look at nothing; all take turns in short rounds, so that a disturbance of the machine meets all. The large store
is written by the disk tier itself, without gRPC, and deleted afterwards.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from statistics import median, quantiles
from typing import Any

import grpc

from benchmarks.results import Row, append
from forefetch import rpc
from forefetch.cluster import MALLOC
from forefetch.process import Process
from forefetch.settings import child_environment
from forefetch.v1 import kv_pb2 as pb
from forefetch.v1 import kv_pb2_grpc as pb_grpc
from kv_service.client import Key, KvClient, chain
from kv_service.disk import Disk
from kv_service.labels import tag_of
from kv_service.parts import checksum_of
from kv_service.store import pack
from kv_service.store_order import Entry

PAGE_BYTES = 48 * 4 * 9600
"""A block: 48 layers, 4 KV heads, pages of 128 tokens at 2.3 bits."""
PREFIX = 1000
GIB = 1 << 30
ROOT = bytes(32)


class Bare(pb_grpc.KvServiceServicer):
    """What gRPC's generated code does with the bytes, and nothing else."""

    def Put(self, request: Iterator[pb.PutRequest], context: Any) -> pb.PutResponse:
        return pb.PutResponse(stored=sum(len(part.data) > 0 for message in request for part in message.parts))

    def Get(self, request: pb.GetRequest, context: Any) -> Iterator[pb.GetResponse]:
        data = bytes(PAGE_BYTES)
        for _ in range(len(request.keys)):
            yield pb.GetResponse(parts=[pb.BlockPart(data=data)])


def serve_bare() -> None:
    """The yardstick's process, until standard input closes."""
    server = grpc.server(ThreadPoolExecutor(4), options=rpc.channels.server_options())
    pb_grpc.add_KvServiceServicer_to_server(Bare(), server)
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    rpc.announce(f"127.0.0.1:{port}")
    sys.stdin.read()
    server.stop(None)


@contextlib.contextmanager
def service(*flags: str, module: str = "kv_service") -> Iterator[Process]:
    """A running service; its process has the allocator settings that a cluster gives it."""
    process = Process("kv", module, flags, child_environment(**MALLOC))
    process.spawn()
    try:
        process.wait_ready(120)
        yield process
    finally:
        process.end(10)


@contextlib.contextmanager
def bare() -> Iterator[pb_grpc.KvServiceStub]:
    command = [sys.executable, "-m", "benchmarks.kv_store", "--serve-bare"]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=child_environment(**MALLOC)
    ) as process:
        import json

        assert process.stdin
        assert process.stdout
        address = json.loads(process.stdout.readline())["address"]
        with rpc.channel(address) as channel:
            yield pb_grpc.KvServiceStub(channel)
        process.stdin.close()


def blocks_of(first: int, count: int) -> list[tuple[Key, bytes]]:
    """A chain whose blocks all differ."""
    keys = chain(ROOT, [[first, block] for block in range(count)])
    noise = os.urandom(PAGE_BYTES)
    return [(key, key.digest + noise[32:]) for key in keys]


def look_up(rounds: int) -> list[Row]:
    with service("--budget-mb=512") as process:
        client = KvClient(process.address)
        keys = chain(ROOT, [[block] * 128 for block in range(PREFIX)])
        client.put([(key, key.digest) for key in keys])
        assert client.look_up(keys) == PREFIX
        timed: dict[str, list[float]] = {"look-up of 1,000 blocks": [], "empty unary call": []}
        calls: list[Callable[[], object]] = [lambda: client.look_up(keys), client.describe]
        for _ in range(rounds):
            for times, call in zip(timed.values(), calls, strict=True):
                began = time.perf_counter()
                call()
                times.append(1e3 * (time.perf_counter() - began))
        client.close()
    rows = []
    for case, times in timed.items():
        cuts = quantiles(times, n=100)
        rows += [Row("kv_store", case, "p50", cuts[49], "ms"), Row("kv_store", case, "p99", cuts[98], "ms")]
    return rows


def transfers(folder: Path, rounds: int, count: int) -> list[Row]:
    """MB/s of each way, the median over rounds of its ratio to the bare stream of the round, and the service's CPU time."""
    size, rates, spent = count * PAGE_BYTES, defaultdict[str, list[float]](list), Counter[str]()

    def clock(case: str, call: Callable[[], object], pid: int = 0) -> float:
        began, cpu = time.perf_counter(), cpu_s(pid)
        call()
        took = time.perf_counter() - began
        rates[case].append(size / took / 1e6)
        spent[case] += cpu_s(pid) - cpu
        return took

    with contextlib.ExitStack() as stack:

        def start(*flags: str) -> tuple[KvClient, int]:
            process = stack.enter_context(service("--max-block-mb=4", *flags))
            client = KvClient(process.address)
            stack.callback(client.close)
            return client, process.pid

        ram, ram_pid = start("--budget-mb=1024")
        behind, behind_pid = start("--budget-mb=1024", f"--dir={folder / 'behind'}", "--disk-gb=4")
        # So that every get is from disk, and every put waits for it.
        small, small_pid = start("--budget-mb=32", f"--dir={folder / 'small'}", "--disk-gb=4")
        stub = stack.enter_context(bare())
        noise = bytes(PAGE_BYTES)  # a block of 1.8 MB is a message
        for turn in range(rounds + 1):
            if turn == 1:
                rates.clear()  # the first is for warming up
                spent.clear()
            blocks = blocks_of(turn, count)
            keys = [key for key, _ in blocks]
            clock("put: bare stream", lambda: stub.Put(_messages(count, noise)))
            clock("put: memory", lambda blocks=blocks: _whole(ram.put(blocks), (count, 0)), ram_pid)
            began = time.perf_counter()
            clock("put: disk behind", lambda blocks=blocks: _whole(behind.put(blocks), (count, 0)), behind_pid)
            _await_disk(behind)
            rates["put: disk behind, until it is there"].append(size / (time.perf_counter() - began) / 1e6)
            clock(
                "put: memory full, at the disk's pace", lambda blocks=blocks: _whole(small.put(blocks), (count, 0)), small_pid
            )
            _await_disk(small)
            request = pb.GetRequest(keys=[pb.BlockKey()] * count)
            clock("get: bare stream", lambda request=request: sum(len(m.parts[0].data) for m in stub.Get(request)))
            clock("get: memory", lambda keys=keys: _whole(len(ram.get(keys)), count), ram_pid)
            clock("get: disk", lambda keys=keys: _whole(len(small.get(keys)), count), small_pid)
        _whole(small.stats().disk_reads, (rounds + 1) * count)
    rows = []
    for case, values in rates.items():
        yardstick = rates[f"{case.partition(':')[0]}: bare stream"]
        ratio = median(mine / theirs for mine, theirs in zip(values, yardstick, strict=True))
        rows.append(Row("kv_store", case, "throughput p50", median(values), "MB/s"))
        rows.append(Row("kv_store", case, "of the bare stream", ratio, "ratio"))
        if spent[case]:
            rows.append(Row("kv_store", case, "CPU time of the service meanwhile", spent[case] / (rounds * size / 1e9), "s/GB"))
    return rows


def cpu_s(pid: int) -> float:
    """CPU time of a process so far, seconds; 0 for none."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split() if pid else ["0"] * 13
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def _await_disk(client: KvClient) -> None:
    while (stats := client.stats()).disk_blocks < stats.blocks:
        time.sleep(0.02)


def _messages(count: int, data: bytes) -> Iterator[pb.PutRequest]:
    for _ in range(count):
        yield pb.PutRequest(parts=[pb.BlockPart(data=data)])


def _whole(got: object, expected: object) -> None:
    assert got == expected, f"{got}, not {expected}"


def restart(folder: Path, total: int, block_bytes: int) -> list[Row]:
    """Process start to ready on a store of `total` bytes, and the first block served."""
    keys = _fill(folder, total, block_bytes)
    began = time.perf_counter()
    with service(f"--dir={folder}", f"--disk-gb={2 * total / GIB}", "--max-block-mb=4") as process:
        ready = time.perf_counter() - began
        client = KvClient(process.address)
        stats = client.stats()
        assert stats.blocks == len(keys), f"{stats.blocks} of {len(keys)} found"
        blocks = client.get(keys[:1])
        first = time.perf_counter() - began
        assert len(blocks) == 1
        client.close()
    with service("--max-block-mb=4"):
        empty_began = time.perf_counter()
    with service("--max-block-mb=4"):
        empty = time.perf_counter() - empty_began
    case = f"restart on {total / 1e9:.1f} GB in blocks of {block_bytes / 1024:,.0f} KiB"
    return [
        Row("kv_store", case, "until ready", ready, "s"),
        Row("kv_store", case, "until a block is served", first, "s"),
        Row("kv_store", case, "of it reading the index", stats.index_s, "s"),
        Row("kv_store", case, "an empty service until ready", empty, "s"),
    ]


def _fill(folder: Path, total: int, block_bytes: int) -> list[Key]:
    disk, tag, noise = Disk(folder, 2 * total), tag_of("default"), os.urandom(block_bytes)
    keys = chain(ROOT, [[block] * 128 for block in range(total // block_bytes)])
    step = max(1, (64 << 20) // block_bytes)
    for first in range(0, len(keys), step):
        pairs = []
        for key in keys[first : first + step]:
            pieces = (key.digest + noise[32:],)
            names, tokens = (tag + key.digest, tag, tag + key.parent), pack(key.token_ids)
            pairs.append((Entry(*names, tokens, key.position, block_bytes, checksum_of(pieces)), pieces))
        disk.write((), pairs, [(tag, "default")])
    disk.close()
    return keys


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="a tenth of the work; nothing is added to results.csv")
    parser.add_argument("--only", choices=("look-up", "transfers", "restart"), help="one part (default: all)")
    parser.add_argument("--folder", help="where stores are made and deleted (default: the system's temporary folder)")
    parser.add_argument("--serve-bare", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--measure", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.serve_bare:
        serve_bare()
        return 0
    if not args.measure:  # as a child, since glibc reads its settings when a process starts
        command = [sys.executable, "-m", "benchmarks.kv_store", "--measure", *sys.argv[1:]]
        return subprocess.run(command, env=child_environment(**MALLOC), check=False).returncode
    quick, folder = args.quick, Path(tempfile.mkdtemp(prefix="forefetch-kv-", dir=args.folder))
    try:
        rows: list[Row] = []
        if args.only in (None, "look-up"):
            rows += look_up(100 if quick else 1000)
        if args.only in (None, "transfers"):
            rows += transfers(folder / "transfers", 2 if quick else 9, 32 if quick else 128)
            shutil.rmtree(folder / "transfers")
        for block_bytes in (PAGE_BYTES, 64 << 10) if args.only in (None, "restart") else ():
            rows += restart(folder / "restart", GIB // 2 if quick else 5 * 10**9, block_bytes)
            shutil.rmtree(folder / "restart")
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    for row in rows:
        print(f"{row.case:<50} {row.metric:<30} {row.value:10.3f} {row.unit}")
    if not quick:
        append(rows)
    return 0


if __name__ == "__main__":
    sys.exit(main())
