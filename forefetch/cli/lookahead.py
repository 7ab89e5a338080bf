"""`forefetch lookahead`: heads that name the experts of the next layers, trained and measured on a checkpoint.

The work needs torch and the router's own code, so it runs as a child process: `python -m router_service.lookahead`.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from typing import Any

EPILOG = """\
`python -m router_service.lookahead train --help` lists the remaining options.

Examples:
  forefetch lookahead train --model models/reference --text notes.txt code.txt
  forefetch lookahead eval --model models/reference --text models/reference/heldout/*.txt
  forefetch lookahead eval --model models/reference --text models/reference/heldout/code.txt --json"""


def add_parser(commands: Any) -> None:
    """Adds the command."""
    parser = commands.add_parser(
        "lookahead",
        help="train and measure the prediction of experts",
        description="train: records the model on text and on its own answers, trains heads, and writes lookahead.safetensors\n"
        "beside the weights. eval: measures them on other text, per domain (a file's name) and per layer.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("action", choices=("train", "eval"), help="what to do")
    parser.add_argument("--model", required=True, metavar="DIR", help="the checkpoint")
    parser.add_argument("--text", required=True, nargs="+", metavar="FILE", help="UTF-8 text, one file per domain")
    parser.add_argument("--tokens", metavar="N", help="how many tokens of text to use")
    parser.add_argument("--context", metavar="N", help="longest sequence, in tokens")
    parser.add_argument("--separator", metavar="TEXT", help="what ends a document's last line")
    parser.add_argument("--generate", metavar="N", help="train: tokens of the model's own answers to record")
    parser.add_argument("--distilled", metavar="N", help="train: width of what stands in for a layer's experts")
    parser.add_argument("--rank", metavar="N", help="train: width of a head")
    parser.add_argument("--epochs", metavar="N", help="train: passes over what was recorded")
    parser.add_argument("--device", metavar="DEVICE", help="cpu, cuda, or auto")
    parser.add_argument("--threads", metavar="N", help="CPU threads")
    parser.add_argument("--json", action="store_true", help="eval: print one JSON object")


def run(args: argparse.Namespace) -> int:
    """The child's exit status. It inherits standard input, output and error."""
    try:
        return subprocess.run([sys.executable, "-m", "router_service.lookahead", *_flags(args)], check=False).returncode
    except KeyboardInterrupt:  # the child got it as well and has ended
        return 130


def _flags(args: argparse.Namespace) -> list[str]:
    flags = [args.action, "--model", args.model, "--text", *args.text]
    for name in ("tokens", "context", "separator", "generate", "distilled", "rank", "epochs", "device", "threads"):
        if (value := getattr(args, name)) is not None:
            flags.append(f"--{name}={value}")
    return [*flags, "--json"] if args.json else flags
