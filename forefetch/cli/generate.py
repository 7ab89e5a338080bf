"""`forefetch generate`: one prompt, streamed to the terminal or returned as JSON."""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
from collections.abc import Callable
from dataclasses import asdict
from typing import Any

from rich.console import Console
from rich.markup import escape

from forefetch.cli import connect
from forefetch.client import Client, Completion, Finish, Options, Prompt, Token
from forefetch.errors import ConfigError

EPILOG = """\
Examples:
  forefetch generate "Once upon a time" --max-tokens 64
  forefetch generate --chat "What is a mixture of experts?" --temperature 0.7 --seed 1
  git diff | forefetch generate --chat --json > review.json
  forefetch generate --address a:50051,b:50051 --session trip --start --chat "Plan a trip to Bath."
  forefetch generate --address a:50051,b:50051 --session trip --chat "Make it two days longer."

The answer goes to standard output, a one-line summary to standard error. With --json there is one object: text, token_ids,
finish_reason, ttft_ms, tpot_ms_p50, tpot_ms_p99, usage, timings (one entry per token) and more."""


def add_parser(commands: Any) -> None:
    """Adds the command."""
    parser = commands.add_parser(
        "generate",
        help="generate from one prompt",
        description="Sends one prompt to a router and streams the answer.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("prompt", nargs="?", help="the prompt; read from standard input when it is missing or -")
    connect.add_arguments(parser, "the router, or several with commas: the next is asked when one is gone")
    parser.add_argument("--chat", action="store_true", help="the prompt is a user's turn: apply the checkpoint's chat template")
    parser.add_argument("--system", metavar="TEXT", help="a system message before the turn; implies --chat")
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of streaming text")
    parser.add_argument("--timeout", type=connect.seconds, metavar="S", help="deadline of the whole request, seconds")
    _add_session(parser.add_argument_group("session", "A conversation that outlives its router; needs one with a KV service."))
    _add_options(parser.add_argument_group("generation", "What is not given is the router's or the checkpoint's default."))


def _add_session(group: Any) -> None:
    group.add_argument("--session", metavar="ID", help="add this prompt to the conversation of that name")
    group.add_argument("--start", action="store_true", help="begin the session with this prompt")
    group.add_argument("--resume", action="store_true", help="no prompt: print the session's last answer, and finish it")


def _add_options(group: Any) -> None:
    group.add_argument("--max-tokens", type=int, metavar="N", help="most tokens to generate")
    group.add_argument("--temperature", type=float, metavar="T", help="0 is greedy")
    group.add_argument("--top-p", type=float, metavar="P", help="keep the smallest set of tokens with this probability mass")
    group.add_argument("--top-k", type=int, metavar="K", help="keep the K likeliest tokens")
    group.add_argument("--min-p", type=float, metavar="P", help="drop tokens under P times the likeliest one's probability")
    group.add_argument("--seed", type=int, metavar="N", help="makes the answer repeatable")
    group.add_argument("--stop", action="append", metavar="TEXT", help="end before this text; may be repeated")
    group.add_argument("--ignore-eos", action="store_true", default=None, help="go on past end-of-sequence tokens")
    group.add_argument("--logprobs", type=int, metavar="N", help="log-probabilities with N alternatives each; needs --json")
    group.add_argument("--request-id", metavar="ID", help="name of the request for `forefetch trace`")


def run(args: argparse.Namespace) -> int:
    """Raises the errors of forefetch.errors, ConfigError for a prompt that is missing."""
    if args.logprobs is not None and not args.json:
        raise ConfigError("--logprobs: are shown with --json only")
    if (args.start or args.resume) and not args.session:
        raise ConfigError("--start and --resume: need --session")
    if args.start and args.resume:
        raise ConfigError("--start and --resume: give one of them")
    completion = asyncio.run(_generate(args, None if args.resume else _prompt(args)))
    if args.json:
        print(json.dumps(as_json(completion), ensure_ascii=False))
    else:
        Console(stderr=True, highlight=False).print(f"[dim]{escape(summary(completion))}[/]", soft_wrap=True)
    return 0


def _prompt(args: argparse.Namespace) -> Prompt:
    text = args.prompt
    if text in (None, "-"):
        if sys.stdin is None or sys.stdin.isatty():
            raise ConfigError("a prompt is needed, as an argument or on standard input")
        text = sys.stdin.read()
    if not args.chat and args.system is None:
        return str(text)
    system = [] if args.system is None else [{"role": "system", "content": args.system}]
    return [*system, {"role": "user", "content": text}]


async def _generate(args: argparse.Namespace, prompt: Prompt | None) -> Completion:
    names = ("max_tokens", "temperature", "top_p", "top_k", "min_p", "seed", "stop", "ignore_eos", "request_id")
    options: Any = {name: getattr(args, name) for name in names}
    options["top_logprobs"] = args.logprobs
    if args.session:
        options["session"] = args.session
        options["session_mode"] = "start" if args.start else "resume" if args.resume else "continue"
    async with Client(args.address, tls=connect.tls_of(args), token=connect.token_of(args)) as client:
        return await stream(client, prompt, None if args.json else write, timeout=args.timeout, options=options)


def write(text: str) -> None:
    """Text of the answer as it comes."""
    sys.stdout.write(text)
    sys.stdout.flush()


async def stream(
    client: Client, prompt: Prompt | None, on_text: Callable[[str], None] | None, *, timeout: float | None, options: Options
) -> Completion:
    """Generates, handing text to `on_text` as it becomes final, and a newline when it ends, in an error too."""
    say = on_text or (lambda text: None)
    tokens: list[Token] = []
    try:
        async for event in client.generate(prompt, timeout=timeout, **options):
            say(event.text)
            if isinstance(event, Finish):
                return Completion(tuple(tokens), event)
            tokens.append(event)
    finally:
        if tokens:
            say("\n")
    raise AssertionError("the stream ended in OK without a finish event")


def rate(completion: Completion) -> float | None:
    """Tokens per second after the first one; None with fewer than two tokens."""
    tokens = completion.tokens
    span = tokens[-1].at_ms - tokens[0].at_ms if tokens else 0.0
    return 1e3 * (len(tokens) - 1) / span if span > 0 else None


def summary(completion: Completion) -> str:
    """One line: how much, why it ended, how fast, and how to look closer."""
    finish, usage = completion.finish, completion.usage
    parts = [f"{usage.prompt_tokens} + {usage.completion_tokens} tokens", finish.reason, f"TTFT {completion.ttft_ms:.1f} ms"]
    if completion.tpot_ms_p50 is not None:
        parts.append(f"TPOT p50 {completion.tpot_ms_p50:.2f} p99 {completion.tpot_ms_p99:.2f} ms")
    speed = rate(completion)
    if speed is not None:
        parts.append(f"{speed:.1f} tokens/s")
    if finish.kv_format:
        parts.append(f"approximate: KV in {finish.kv_format}")
    if finish.expert_format:
        parts.append(f"approximate: experts in {finish.expert_format}")
    if finish.shadow_format:
        parts.append(f"approximate: {finish.shadow_experts} experts shadowed in {finish.shadow_format}")
    if finish.trunk_format:
        parts.append(f"approximate: trunk in {finish.trunk_format}")
    if usage.cached_tokens:
        parts.append(f"{usage.cached_tokens} cached")
    if finish.session:
        parts.append(f"session {finish.session.id}" + ("" if finish.session.saved else " NOT SAVED"))
    return " · ".join([*parts, f"seed {finish.seed}", f"request {finish.request_id}"])


def as_json(completion: Completion) -> dict[str, Any]:
    """The object that --json prints."""
    finish = completion.finish
    values = {
        "text": completion.text,
        "token_ids": completion.token_ids,
        "finish_reason": completion.finish_reason,
        "ttft_ms": completion.ttft_ms,
        "tpot_ms_p50": completion.tpot_ms_p50,
        "tpot_ms_p99": completion.tpot_ms_p99,
        "usage": asdict(completion.usage),
        "timings": [asdict(timings) for timings in completion.timings],
        "request_id": finish.request_id,
        "seed": finish.seed,
        "stop_string": finish.stop_string or None,
        "approximations": {
            "kv_format": finish.kv_format or None,
            "expert_format": finish.expert_format or None,
            "shadow_format": finish.shadow_format or None,
            "trunk_format": finish.trunk_format or None,
            "shadow_experts": finish.shadow_experts,
        },
    }
    if finish.session:
        values["session"] = asdict(finish.session)
    if any(token.logprob is not None for token in completion.tokens):
        values["logprobs"] = [{"logprob": token.logprob, "top": token.top_logprobs} for token in completion.tokens]
    return values
