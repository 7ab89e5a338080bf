"""The command `forefetch`: a local cluster, generation, and where each token's milliseconds went."""

from __future__ import annotations

import argparse
import errno
import io
import os
import sys
from collections.abc import Sequence
from contextlib import suppress
from types import ModuleType

from forefetch.cli import demo, generate, health, kv, lookahead, place, plan, quality, stats, trace, up
from forefetch.errors import ConfigError, ForefetchError
from forefetch.version import VERSION

__all__ = [
    "COMMANDS",
    "demo",
    "generate",
    "health",
    "kv",
    "lookahead",
    "main",
    "parser",
    "place",
    "plan",
    "quality",
    "stats",
    "trace",
    "up",
]

COMMANDS: dict[str, ModuleType] = {
    **{"up": up, "generate": generate, "demo": demo, "trace": trace, "stats": stats},
    **{"health": health, "kv": kv, "lookahead": lookahead, "plan": plan, "place": place, "quality": quality},
}
_OUTPUT = (errno.EPIPE, errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO)
DESCRIPTION = """\
Forefetch serves Mixture-of-Experts language models whose experts do not fit next to their attention layers:
a router computes attention, expert workers the experts, and a KV service keeps what should outlive a router."""
EPILOG = """\
First steps:
  forefetch demo                                   a cluster, two answers, and where the time went
  forefetch up --model models/reference            a cluster that stays
  forefetch generate "Once upon a time"            ask it (in another terminal)

Exit status: 0 success, 1 failure, 2 wrong usage, 130 interrupted."""


def parser() -> argparse.ArgumentParser:
    """The command line. Each command's module adds its own part."""
    main_parser = argparse.ArgumentParser(
        prog="forefetch", description=DESCRIPTION, epilog=EPILOG, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    main_parser.add_argument("-V", "--version", action="version", version=f"forefetch {VERSION}")
    commands = main_parser.add_subparsers(dest="command", metavar="COMMAND", required=True, title="commands")
    for module in COMMANDS.values():
        module.add_parser(commands)
    commands.add_parser("version", help="print the version", description="Prints the version and exits.")
    return main_parser


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command and returns its exit status. Errors end as one line on standard error."""
    _ready_output()
    main_parser = parser()
    args, unknown = main_parser.parse_known_args(argv)
    if unknown:
        main_parser.error(f"unrecognized arguments: {' '.join(unknown)}; `forefetch {args.command} --help` lists its own")
    if args.command == "version":
        print(f"forefetch {VERSION}")
        return 0
    try:
        status = COMMANDS[args.command].run(args)
        sys.stdout.flush()
        return int(status or 0)
    except ConfigError as error:
        return _fail(str(error), 2)
    except ForefetchError as error:
        return _fail(str(error), 1)
    except KeyboardInterrupt:
        return 130
    except OSError as error:  # a file that a flag names, or what reads our output
        return _unwritten(error)


def _unwritten(error: OSError) -> int:
    if error.filename:
        return _fail(f"{error.filename}: {error.strerror}", 1)
    if error.errno not in _OUTPUT:
        raise error
    _discard_output()
    return 1 if error.errno == errno.EPIPE else _fail(f"standard output: {error.strerror}", 1)


def _ready_output() -> None:
    """What a terminal's encoding cannot show becomes a question mark; what is closed swallows what is written."""
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if stream is None:
            setattr(sys, name, open(os.devnull, "w", encoding="utf-8"))  # noqa: SIM115 (it lives as long as the process)
        elif isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")


def _discard_output() -> None:
    """What is still buffered must not fail once more when the interpreter flushes at exit."""
    with suppress(OSError, ValueError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _fail(message: str, status: int) -> int:
    print(f"forefetch: error: {message}", file=sys.stderr)
    return status
