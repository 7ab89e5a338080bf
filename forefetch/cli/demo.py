"""`forefetch demo`: a cluster, two answers, and where their milliseconds went."""

from __future__ import annotations

import argparse
import asyncio
from dataclasses import replace
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

import forefetch
from forefetch.cli import generate, show, up, waterfall
from forefetch.client import Client, Completion, Options, Prompt
from forefetch.cluster import ClusterConfig
from forefetch.errors import BadRequest, ConfigError
from forefetch.settings import build

REFERENCE = Path("models") / "reference"
CHAT = "What do you like to do on the weekend?"
CODE = "import argparse\n\n\ndef main():\n"
MAX_TOKENS = 96
EPILOG = """\
Examples:
  forefetch demo                                      models/reference, two workers over shared memory
  forefetch demo --model /models/OLMoE-1B-7B --link grpc --workers 3 --html trace.html"""


def add_parser(commands: Any) -> None:
    """Adds the command."""
    parser = commands.add_parser(
        "demo",
        help="start a cluster, generate from two prompts, show where the time went",
        description="Starts a router, expert workers and a KV service as processes, sends a chat prompt and a code prompt\n"
        "over gRPC, streams the answers, and shows where the milliseconds of a token went. Then stops everything.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    up.add_cluster_arguments(parser, "port", "metrics_port")
    parser.add_argument(
        "--max-tokens", type=int, default=MAX_TOKENS, metavar="N", help="tokens per answer (default: %(default)s)"
    )
    parser.add_argument("--html", type=Path, metavar="FILE", help="write the second answer's waterfall to this file")


def run(args: argparse.Namespace) -> int:
    """Raises ConfigError without a model, and what Cluster.start and the client raise."""
    model = args.model or default_model()
    config = replace(build(ClusterConfig, {**vars(args), "model": model}), port=0, metrics_port=0)
    console = Console(highlight=False)
    console.print(f"Starting {_parts(config)} for [bold]{escape(model)}[/] ...", soft_wrap=True)
    with up.start(config, Console(stderr=True, highlight=False)) as cluster:
        answers = asyncio.run(_converse(cluster.address, args, console))
    _report(answers, console)
    _hints(model, args.html, console)
    return 0


def _parts(config: ClusterConfig) -> str:
    workers = " with the experts" if config.link == "local" else f", {config.workers} expert workers"
    return f"a router{workers}{' and a KV service' if config.kv else ''}"


def default_model() -> str:
    """The reference model of this working directory or of the source tree. Raises ConfigError when there is none."""
    for root in (Path(), Path(forefetch.__file__).parent.parent):
        if (root / REFERENCE / "config.json").is_file():
            return str(root / REFERENCE)
    raise ConfigError(f"--model: there is no {REFERENCE} here; name the folder of a checkpoint")


async def _converse(address: str, args: argparse.Namespace, console: Console) -> dict[str, Completion]:
    options: Options = {"max_tokens": args.max_tokens, "temperature": 0.7, "top_p": 0.95, "seed": 1}
    async with Client(address) as client:
        chat: Prompt = await _chat(client)
        answers = {}
        for name, shown, prompt in (("chat", CHAT, chat), ("code", CODE, CODE)):
            console.rule(f"[bold]{name}[/]", align="left", style="dim")
            console.print(f"[dim]{escape(shown.rstrip())}[/]")
            answers[name] = await generate.stream(client, prompt, generate.write, timeout=300.0, options=options)
        if args.html:
            trace = await client.trace(answers["code"].finish.request_id)
            args.html.write_text(waterfall.html(trace), encoding="utf-8")
    return answers


async def _chat(client: Client) -> Prompt:
    """The chat prompt as a user's turn, or as plain text where the checkpoint has no chat template."""
    turns = [{"role": "user", "content": CHAT}]
    try:
        await client.tokenize(turns)
    except BadRequest:
        return CHAT
    return turns


def _report(answers: dict[str, Completion], console: Console) -> None:
    console.rule(style="dim")
    table = Table(box=None, padding=(0, 2))
    for heading in ("", "prompt", "answer", "TTFT", "TPOT p50", "TPOT p99", "tokens/s"):
        table.add_column(heading, justify="left" if not heading else "right")
    for name, answer in answers.items():
        usage, speed = answer.usage, generate.rate(answer)
        times = (answer.ttft_ms, answer.tpot_ms_p50, answer.tpot_ms_p99)
        cells = [*(f"{ms:.2f} ms" if ms else "" for ms in times), f"{speed:.1f}" if speed else ""]
        table.add_row(name, str(usage.prompt_tokens), str(usage.completion_tokens), *cells)
    console.print(table)
    parts = show.mean_parts([timings for answer in answers.values() for timings in answer.timings[1:]])
    if parts:
        console.print("\nWhere the milliseconds of a token went (mean of the decode steps):\n")
        console.print(show.bar(parts, min(console.width - 2, 72)))
        console.print(show.breakdown(parts))


def _hints(model: str, html: Path | None, console: Console) -> None:
    if html:
        console.print(f"\nThe waterfall of the code answer, step by step: [bold]{escape(str(html))}[/]", soft_wrap=True)
    steps = (
        (f"up --model {model}", "a cluster that stays; then, in another terminal:"),
        ('generate --chat "Do you have any pets?"', "ask it"),
        ('trace --prompt "def add(a, b):" --html trace.html', "one request, layer by layer, worker by worker"),
        ("stats --watch", "counters, quantiles, workers, KV service"),
    )
    console.print("\nNext:")
    for command, meaning in steps:
        console.print(f"  {escape(up.program())} {escape(command)}    [dim]# {meaning}[/]", soft_wrap=True)
