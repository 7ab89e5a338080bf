"""`forefetch kv`: what a KV service holds, and whether it is as it should be."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import grpc
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from forefetch import rpc
from forefetch.cli import connect
from forefetch.cli.plain import plain
from forefetch.errors import Mismatch
from forefetch.v1 import kv_pb2 as pb
from forefetch.v1 import kv_pb2_grpc as pb_grpc

NO_TOKEN = 2**32 - 1
"""The tokens of float16 rows behind a block; see router_service/naming.py."""
CALL_S = 10.0
"""Deadline of calls that move no blocks, seconds."""
EPILOG = """\
A router's `forefetch stats` names its KV services. With tokens or certificates configured there, inspect and verify concern the
caller's tenant alone, unless the service lists it under --operators.

Examples:
  forefetch kv stats --address kv-0:50051
  forefetch kv inspect --address kv-0:50051 --limit 20
  forefetch kv inspect --address kv-0:50051 --digest 9f3c      the chain of a block
  forefetch kv verify --address kv-0:50051 --token-file token

Exit status of verify: 0 when every block is whole, 1 when some were damaged; those are dropped."""

_LINE = "{:<10} {:<8} {:<8} {:>13} {:>9} {:>4}  {:<8} {:<8} {}"
# Label, and the counters behind it that are worth a word when they are not 0.
FAULTS = (
    ("corrupt", "dropped: bytes differ from their checksum"),
    ("short_reads", "dropped: fewer bytes on disk than there should be"),
    ("read_errors", "dropped: could not be read"),
    ("disk_full", "not on disk: no room there"),
    ("write_errors", "not on disk: writing failed"),
    ("damaged_at_start", "rows and files found damaged at start"),
    ("conflicts", "other bytes put under a held key (an alarm)"),
    ("mismatches", "asked for with other tokens than those held (an alarm)"),
    ("broken", "refused: ended early or wrong checksum"),
    ("no_room", "refused: no room"),
    ("stale_writers", "refused: another writer has the key"),
    ("slow_peers", "transfers cut off"),
    ("unauthenticated", "calls without a valid credential"),
    ("stale_epochs", "session records of a router that had lost the session"),
    ("sessions_refused", "session records without room"),
)


def add_parser(commands: Any) -> None:
    """Adds the command."""
    parser = commands.add_parser(
        "kv",
        help="look into a KV service",
        description="stats: counters since its start. inspect: which blocks it holds, chain by chain.\n"
        "verify: it reads and checks every block and drops what is damaged.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("action", choices=("stats", "inspect", "verify"), help="what to do")
    connect.add_arguments(parser, "the KV service")
    parser.add_argument("--digest", default="", metavar="HEX", help="inspect: only the chain of this block; may be cut short")
    parser.add_argument("--limit", type=_limit, default=100, metavar="N", help="inspect: most blocks (default: %(default)s)")
    parser.add_argument("--json", action="store_true", help="print one JSON object per answer")


def _limit(text: str) -> int:
    if not text.isdecimal() or not 1 <= int(text) < 1 << 32:
        raise argparse.ArgumentTypeError(f"{text!r} is no number of blocks")
    return int(text)


def run(args: argparse.Namespace) -> int:
    """Calls the service and shows what it says."""
    token = connect.token_of(args)
    metadata = (("authorization", f"Bearer {token}"),) if token else ()
    with rpc.channel(args.address, connect.tls_of(args)) as channel, _errors(args.address):
        stub: Any = pb_grpc.KvServiceStub(channel)
        action = {"stats": _stats, "inspect": _inspect, "verify": _verify}[args.action]
        return action(stub, args, metadata)


@contextmanager
def _errors(address: str) -> Iterator[None]:
    try:
        yield
    except grpc.RpcError as error:
        if getattr(error, "code", lambda: None)() is grpc.StatusCode.UNIMPLEMENTED:
            raise Mismatch(f"{address} is no KV service; `forefetch stats` names those of a router") from None
        raise rpc.error_of(error) from None


def _stats(stub: Any, args: argparse.Namespace, metadata: Any) -> int:
    stats = stub.GetStats(pb.KvServiceGetStatsRequest(), timeout=CALL_S, metadata=metadata)
    if args.json:
        print(json.dumps(plain(stats)))
        return 0
    facts = Table.grid(padding=(0, 2))
    facts.add_column(style="dim")
    facts.add_column()
    for label, text in _facts(stats):
        facts.add_row(label, text)
    console = Console(highlight=False)
    console.print(f"[dim]KV service[/] [bold]{escape(args.address)}[/]  [dim]up {stats.uptime_s:,.0f} s[/]\n")
    console.print(facts)
    return 0


def _facts(stats: pb.KvServiceGetStatsResponse) -> Iterator[tuple[str, str]]:
    yield "blocks", f"{stats.blocks:,} held, {_size(stats.bytes)} of {_size(stats.budget_bytes)}; {stats.evicted:,} evicted"
    yield "memory", f"{stats.memory_blocks:,} blocks, {_size(stats.memory_bytes)} of {_size(stats.memory_budget_bytes)}"
    if stats.disk_blocks or stats.disk_reads:
        yield "disk", f"{stats.disk_blocks:,} blocks; {stats.disk_reads:,} read; index read in {stats.index_s:.2f} s"
    asked = stats.hits + stats.misses
    yield "look-ups", f"{asked:,} blocks asked for" + (f", {100 * stats.hits / asked:.1f} % held" if asked else "")
    yield "puts", f"{stats.stored:,} stored, {stats.duplicates:,} held already, {stats.refused:,} refused"
    if stats.shared_blocks:
        yield "shared memory", f"{stats.shared_blocks:,} blocks came through it; callers with some: {stats.sharers}"
    yield "sessions", f"{stats.sessions:,}, {_size(stats.session_bytes)}; {stats.session_records:,} records"
    for name, text in FAULTS:
        if count := getattr(stats, name):
            yield name.replace("_", " "), f"[red]{count:,}[/] {text}"


def _inspect(stub: Any, args: argparse.Namespace, metadata: Any) -> int:
    request = pb.InspectRequest(digest=args.digest, limit=args.limit)
    blocks = stub.Inspect(request, timeout=CALL_S * 6, metadata=metadata)
    if args.json:
        for block in blocks:
            print(json.dumps(plain(block)))
        return 0
    print(_LINE.format("tenant", "block", "after", "tokens", "size", "next", "where", "model", "format"))
    for block in blocks:
        print(_LINE.format(*_cells(block)))
    return 0


def _cells(block: pb.InspectResponse) -> tuple[str, ...]:
    key, origin = block.key, block.origin
    rows = set(key.token_ids) == {NO_TOKEN}
    tokens = f"rows at {key.position}" if rows else f"{key.position}..{key.position + len(key.token_ids)}"
    where = "+".join(name for name, there in (("mem", block.in_memory), ("disk", block.on_disk)) if there)
    form = " ".join(text for text in (origin.kv_format, origin.params) if text)
    names = (block.tenant, key.digest.hex()[:8], key.parent.hex()[:8])
    return (*names, tokens, _size(block.size), str(block.children), where, origin.model_digest[:8], form)


def _verify(stub: Any, args: argparse.Namespace, metadata: Any) -> int:
    """Without a deadline: reading a large store takes as long as it takes, and Ctrl-C ends it."""
    console, so_far = Console(highlight=False), pb.VerifyResponse()
    columns = TextColumn("verifying"), BarColumn(), TextColumn("{task.completed:,} of {task.total:,.0f}"), TimeRemainingColumn()
    with Progress(*columns, console=console, transient=True, disable=args.json or not console.is_terminal) as bar:
        task = bar.add_task("", total=None)
        for so_far in stub.Verify(pb.VerifyRequest(), metadata=metadata):
            bar.update(task, completed=so_far.blocks, total=so_far.total)
            if so_far.damaged_digest and not args.json:
                console.print(f"[red]damaged[/] {so_far.damaged_digest.hex()}", soft_wrap=True)
            if args.json:
                print(json.dumps(plain(so_far)), flush=True)
    if not args.json:
        print(f"{so_far.blocks:,} blocks, {_size(so_far.bytes)}: {so_far.damaged or 'none'} damaged")
    return 1 if so_far.damaged else 0


def _size(count: int) -> str:
    size = float(count)
    for unit in ("B", "KiB", "MiB"):
        if size < 1024:
            return f"{size:,.0f} {unit}" if unit == "B" else f"{size:,.1f} {unit}"
        size /= 1024
    return f"{size:,.1f} GiB"
