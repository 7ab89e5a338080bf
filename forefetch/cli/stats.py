"""`forefetch stats`: what a router did since it started and what it does now."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from contextlib import suppress
from time import monotonic, sleep
from typing import Any

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from forefetch.cli import connect, hints, load, show
from forefetch.cli.plain import plain
from forefetch.cli.waterfall import ms, parts
from forefetch.client import SyncClient
from forefetch.errors import ForefetchError, Unavailable
from forefetch.v1 import router_pb2

Stats = router_pb2.GetStatsResponse
_BAR = 48

EPILOG = """\
Examples:
  forefetch stats
  forefetch stats --watch 0.5
  forefetch stats --json | jq .tpot"""


def add_parser(commands: Any) -> None:
    """Adds the command."""
    parser = commands.add_parser(
        "stats",
        help="show what a router is doing",
        description="Shows a router's requests, tokens, latencies, pages, workers, KV service and lookahead.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    connect.add_arguments(parser)
    parser.add_argument(
        "--watch", nargs="?", type=connect.seconds, const=1.0, metavar="SECONDS", help="ask again every so often, until Ctrl-C"
    )
    parser.add_argument("--load", action="store_true", help="also show how the load is spread over experts")
    parser.add_argument("--json", action="store_true", help="print one JSON object per answer")


def run(args: argparse.Namespace) -> int:
    """Prints the counters once, or keeps them on screen. A router that goes away while watched is waited for."""
    with SyncClient(args.address, tls=connect.tls_of(args), token=connect.token_of(args)) as client:
        if args.watch is None:
            stats = client.stats()
            _print_json(stats) if args.json else Console(highlight=False).print(_shown(args, stats))
            return 0
        with suppress(KeyboardInterrupt):
            _watch(client, args)
    return 0


def _watch(client: SyncClient, args: argparse.Namespace) -> None:
    polled = _poll(client, max(args.watch, 0.05))
    if args.json:
        for stats, _, _ in polled:
            if isinstance(stats, Stats):
                _print_json(stats)
        return
    screens = (
        _shown(args, stats, before, seconds) if isinstance(stats, Stats) else Text(f"{args.address}: {stats}", "red")
        for stats, before, seconds in polled
    )
    console = Console(highlight=False)
    if not console.is_terminal:  # a pipe or a file: one screen after the other
        for screen in screens:
            console.print(screen, "")
        return
    with Live(console=console, auto_refresh=False) as live:
        for screen in screens:
            live.update(screen, refresh=True)


def _poll(client: SyncClient, every_s: float) -> Iterator[tuple[Stats | ForefetchError, Stats | None, float]]:
    """An answer or why there is none, the answer before, and the seconds between the two. The first must be an answer."""
    before, asked = client.stats(), monotonic()
    yield before, None, 0.0
    while True:
        sleep(every_s)
        try:
            stats, now = client.stats(), monotonic()
        except Unavailable as error:
            yield error, None, 0.0
        else:
            yield stats, before, now - asked
            before, asked = stats, now


def _print_json(stats: Stats) -> None:
    print(json.dumps(plain(stats)), flush=True)


def _shown(args: argparse.Namespace, stats: Stats, before: Stats | None = None, seconds: float = 0.0) -> RenderableType:
    screen = render(args.address, stats, before, seconds)
    return Group(screen, "", load.table(stats)) if args.load else screen


def render(address: str, stats: Stats, before: Stats | None = None, seconds: float = 0.0) -> RenderableType:
    """The screen. With the answer of `seconds` before, tokens also show their rate."""
    facts = Table.grid(padding=(0, 2))
    facts.add_column(style="dim")
    facts.add_column()
    for label, value in _facts(stats, before, seconds):
        facts.add_row(label, value)
    head = Text.assemble(("router ", "dim"), (address, "bold"), (f"  up {_span(stats.uptime_s)}", "dim"))
    return Group(head, "", facts, "", _workers(stats), *hints.tables(stats))


def _facts(stats: Stats, before: Stats | None, seconds: float) -> Iterator[tuple[str, RenderableType]]:
    failed = "".join(f", {count:,} {status}" for status, count in sorted(stats.requests_failed.items()))
    yield "requests", f"{stats.running} running, {stats.waiting} waiting; {stats.requests_ok:,} done{failed}"
    for label, field in (("prompt tokens", "prompt_tokens"), ("tokens", "completion_tokens")):
        count = getattr(stats, field)
        rate = f"  {(count - getattr(before, field)) / seconds:,.1f}/s" if before and seconds else ""
        yield label, f"{count:,}{rate}"
    for label, quantiles in (("first token", stats.ttft), ("next token", stats.tpot), ("decode step", stats.step)):
        if quantiles.count:
            yield label, f"p50 {ms(quantiles.p50_ns)} ms, p99 {ms(quantiles.p99_ns)} ms"
    yield "steps", f"{stats.steps:,}" + (f", {stats.replayed_steps:,} run again" if stats.replayed_steps else "")
    if stats.p2p_steps or stats.p2p_breaks:
        yield (
            "over p2p lanes",
            f"{stats.p2p_steps:,} steps" + (f", {stats.p2p_breaks:,} broken off" if stats.p2p_breaks else ""),
        )
    if stats.pages_total:
        yield "KV pages", _gauge(stats.pages_used, stats.pages_total)
    if stats.mean_step.total_ns:
        mean = dict(parts(stats.mean_step))
        total = f"{ms(stats.mean_step.total_ns)} ms, batch of {stats.mean_step.batch}  "
        yield "mean step", Text.assemble(total, show.bar(mean, _BAR))
        yield "", _shares(mean)
    yield "KV service", _kv(stats.kv)


def _shares(mean: dict[str, float]) -> Text:
    total = sum(mean.values()) or 1
    shown = [(label, value) for label, value in mean.items() if value >= 0.005 * total]
    colours = show.colours()
    return Text("  ").join(
        Text.assemble(("■ ", colours[label]), f"{label} {100 * value / total:.0f} %") for label, value in shown
    )


def _gauge(used: int, total: int) -> Text:
    cells = round(_BAR * used / total)
    return Text.assemble(("█" * cells, "green"), ("░" * (_BAR - cells), "dim"), f"  {used:,} of {total:,}")


def _kv(kv: router_pb2.KvStatus) -> Text:
    if not kv.address:
        return Text("none", "dim")
    state = Text("up" if kv.up else "down", "green" if kv.up else "red")
    blocks = f"{kv.blocks_sent:,} blocks sent, {kv.blocks_waiting:,} waiting, {kv.blocks_dropped:,} dropped"
    missed = "".join(f", {count:,} {reason}" for reason, count in sorted(kv.prefix_misses.items()))
    skipped = f", {kv.prefix_skipped:,} computed sooner" if kv.prefix_skipped else ""
    prefixes = f"\nprefixes: {kv.prefix_loads:,} loaded ({kv.blocks_loaded:,} blocks){skipped}{missed}"
    if kv.rows_sent or kv.rows_dropped:
        prefixes += f"\nrows behind blocks: {kv.rows_sent:,} sent, {kv.rows_dropped:,} dropped, {kv.rows_loaded:,} loaded"
    failed = "".join(f", {count:,} {reason}" for reason, count in sorted(kv.session_failures.items()))
    sessions = f"\nsessions: {kv.sessions:,} live, {kv.session_records:,} records written{failed}" if kv.session_records else ""
    return Text.assemble(f"{kv.address}  ", state, f"  {blocks}, {kv.reconnects:,} reconnects", prefixes, sessions)


def _workers(stats: Stats) -> Table:
    table = Table(box=None, pad_edge=False, header_style="dim")
    for heading in ("worker", "state", "link", "shard"):
        table.add_column(heading)
    for heading in ("experts", "calls", "pairs", "reconnects"):
        table.add_column(heading, justify="right")
    for worker in stats.workers:
        state = Text("up" if worker.up else "down", "green" if worker.up else "red")
        shard = f"{worker.shard + 1} of {worker.shards}" if worker.shards else ""
        numbers = (worker.experts, worker.calls, worker.pairs, worker.reconnects)
        table.add_row(worker.address, state, worker.link, shard, *(f"{number:,}" for number in numbers))
    return table


def _span(seconds: float) -> str:
    minutes, hours, days = seconds / 60, seconds / 3600, seconds / 86400
    if days >= 2:
        return f"{days:.1f} days"
    return f"{hours:.1f} hours" if hours >= 2 else f"{minutes:.1f} minutes" if minutes >= 2 else f"{seconds:.0f} seconds"
