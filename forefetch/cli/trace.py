"""`forefetch trace`: the per-token waterfall of one request."""

from __future__ import annotations

import argparse
import json
import secrets
from pathlib import Path
from typing import Any

from rich.console import Console

from forefetch.cli import connect, waterfall
from forefetch.cli.plain import plain
from forefetch.client import SyncClient
from forefetch.errors import ConfigError
from forefetch.v1 import router_pb2

EPILOG = """\
Examples:
  forefetch trace --prompt "Once upon a time" --max-tokens 64     ask, then show where each token's time went
  forefetch trace story-7 --html story-7.html                     an earlier request, as a page that needs nothing else

A router remembers a bounded number of steps and requests; steps that are no longer recorded are counted."""


def add_parser(commands: Any) -> None:
    """Adds the command."""
    parser = commands.add_parser(
        "trace",
        help="show where each token's milliseconds went",
        description="Shows the waterfall of one request: every step, layer and worker call, as the router recorded it.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    connect.add_arguments(parser)
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("id", nargs="?", metavar="ID", help="an earlier or running request")
    what.add_argument("--request-id", metavar="ID", help="the same")
    what.add_argument("--prompt", metavar="TEXT", help="generate from this text now")
    parser.add_argument("--max-tokens", type=int, default=64, metavar="N", help="tokens for --prompt (default: %(default)s)")
    parser.add_argument("--html", type=Path, metavar="FILE", help="also write the waterfall as one self-contained HTML file")
    parser.add_argument("--json", action="store_true", help="print the recorded trace as one JSON object and nothing else")
    parser.add_argument("--steps", type=int, default=60, metavar="N", help="steps to print at most (default: %(default)s)")
    parser.add_argument("--layers", type=int, default=12, metavar="N", help="layers to print at most (default: %(default)s)")


def run(args: argparse.Namespace) -> int:
    """Prints the trace. NotFound when the router no longer knows the request, ConfigError when the file cannot be written."""
    trace = _fetch(args)
    if args.html:
        _write(args.html, waterfall.html(trace))
    if args.json:
        print(json.dumps(plain(trace)))
        return 0
    console = Console(highlight=False)
    waterfall.terminal(trace, console, most_steps=max(args.steps, 1), most_layers=max(args.layers, 1))
    if args.html:
        console.print(f"\nThe same as a page: {args.html}", markup=False)
    return 0


def _fetch(args: argparse.Namespace) -> router_pb2.GetTraceResponse:
    with SyncClient(args.address, tls=connect.tls_of(args), token=connect.token_of(args)) as client:
        request_id = args.id or args.request_id
        if request_id is None:
            request_id = f"trace-{secrets.token_hex(4)}"
            client.complete(args.prompt, max_tokens=args.max_tokens, request_id=request_id)
        return client.trace(request_id)


def _write(path: Path, text: str) -> None:
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"--html: {error.strerror}: {path}") from None
