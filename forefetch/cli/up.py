"""`forefetch up`: a local cluster in the foreground."""

from __future__ import annotations

import argparse
import os
import shutil
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import fields
from types import FrameType
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeElapsedColumn

from forefetch.cluster import Cluster, ClusterConfig
from forefetch.settings import add_arguments, build

EPILOG = """\
Examples:
  forefetch up --model models/reference
  forefetch up --model /models/Qwen3-30B-A3B --workers 4 --device cuda --slots 25% --metrics-port 9100
  forefetch up --model /models/Qwen3-30B-A3B --gpus 0,1       router on GPU 0, half of the experts on either
  forefetch up --model /models/Qwen3-30B-A3B --gpus 0,1 --apart     all experts on GPU 1: slower, more room for K and V
  forefetch up --model models/reference --link local --no-kv      one process, no wire

Ctrl-C stops it: running requests get 30 s to finish, a second Ctrl-C ends them."""


def add_parser(commands: Any) -> None:
    """Adds the command."""
    parser = commands.add_parser(
        "up",
        help="start a local cluster and keep it running",
        description="Starts a router, expert workers and a KV service on this host and keeps them running until Ctrl-C.\n"
        "A worker or KV service that dies is started again.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add_cluster_arguments(parser)
    parser.add_argument("--verbose", action="store_true", help="show the services' logs")


def add_cluster_arguments(parser: argparse.ArgumentParser, *without: str) -> None:
    """A flag for every field of ClusterConfig but those named."""
    add_arguments(parser, ClusterConfig, [field.name for field in fields(ClusterConfig) if field.name not in without])
    parser.add_argument("--no-kv", dest="kv", action="store_const", const="false", help="the same as --kv=false")


def run(args: argparse.Namespace) -> int:
    """Runs until Ctrl-C or SIGTERM (status 0), or until the router dies (Unavailable)."""
    config = build(ClusterConfig, vars(args))
    console = Console(stderr=True, highlight=False)
    with _terminated_like_interrupted(), start(config, console, verbose=args.verbose) as cluster:
        try:
            _say_ready(cluster)
            cluster.watch(lambda line: console.print(f"[yellow]{escape(line)}[/]"))
        except KeyboardInterrupt:
            _stop(cluster, console)
    return 0


def start(config: ClusterConfig, console: Console, *, verbose: bool = False) -> Cluster:
    """Starts a cluster behind a bar for each service. Raises what Cluster.start raises."""
    columns = (TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
        tasks: dict[str, TaskID] = {}

        def loading(name: str, done: int, total: int) -> None:
            if name not in tasks:
                tasks[name] = progress.add_task(name, total=None)
            progress.update(tasks[name], completed=done, total=total or None)

        def line(name: str, text: str) -> None:
            if verbose:
                console.print(f"[dim]{name}:[/] {escape(text)}", soft_wrap=True)

        return Cluster.start(config, on_loading=loading, on_line=line)


def program() -> str:
    """The command as this user can type it: by name where it is on PATH, else by the path it was started with."""
    if shutil.which("forefetch"):
        return "forefetch"
    return "python -m forefetch.cli" if sys.argv[0].endswith(".py") else os.path.relpath(sys.argv[0])


def _say_ready(cluster: Cluster) -> None:
    config = cluster.config
    workers = f"{config.workers} expert workers" if cluster.worker_names else "experts in the router"
    workers += " and a share of the experts in the router" if config.spread else ""
    print(f"Forefetch serves {config.model} at {cluster.address} ({workers}{', KV service' if config.kv else ''}).")
    if config.metrics_port:
        print(f"Metrics: http://127.0.0.1:{config.metrics_port}/metrics")
    print(f'\n  {program()} generate --address {cluster.address} "Once upon a time"\n')
    print("Ctrl-C stops it.")
    sys.stdout.flush()


def _stop(cluster: Cluster, console: Console) -> None:
    console.print("\nstopping; running requests may finish (Ctrl-C again ends them)")
    try:
        cluster.stop()
    except KeyboardInterrupt:
        cluster.stop(grace_s=0.0)


@contextmanager
def _terminated_like_interrupted() -> Iterator[None]:
    def interrupt(_number: int, _frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    previous = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, previous)
