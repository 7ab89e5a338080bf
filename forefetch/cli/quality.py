"""`forefetch quality`: what a KV format costs a model in perplexity and greedy agreement, and how many bits it takes.

The work needs torch and the router's own code, so it runs as a child process: `python -m router_service.quality`.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from typing import Any

EPILOG = """\
Formats: fp16, e2m0, asym2, mixed, asym3, fp4. Min-max baselines: kivi2, kivi3, kivi4 in groups of 128; of 64 or 32 (kivi2-g64,
kivi4-g64, kivi2-g32); of 64 in K alone (kivi2-k64, kivi3-k64). A format is compared with the one of as many bits or a few more.
With forefetch[peers] also transformers' quantised caches: hf-quanto2, hf-quanto4, hf-hqq2, hf-hqq4.
A name may carry options of its own: e2m0:recent=64+sinks=0. `python -m router_service.quality --help` lists the rest.
--json: a list of {format, bits, context, ppl, ppl_fp16, greedy_agreement, ...}, one for each format and context. Context 4096
are predictions that see 2048 to 4096 tokens. KL (divergence) is the figure to compare formats by: perplexity scatters more.

Examples:
  forefetch quality --model models/reference --text models/reference/heldout/*.txt
  forefetch quality --model models/reference --text notes.txt --formats fp16,e2m0,e2m0:recent=0 --json
  forefetch quality --model models/reference --text notes.txt --formats e2m0 --layers"""
OPTIONS = {
    "tokens": "tokens of each file to run",
    "contexts": "tokens a prediction sees, at most, as 512,4096",
    "formats": "what to measure, separated by commas",
    "recent": "newest tokens in float16",
    "sinks": "first tokens in float16",
    "outliers": "channels of K in float16",
    "thirds": "mixed: channels of K with a third bit",
    "exempt-layers": "layers that stay float16, as 0,7",
    "plot": "write cost against bits as a PNG (needs forefetch[plot])",
    "device": "cpu, cuda, or auto",
    "threads": "CPU threads",
}


def add_parser(commands: Any) -> None:
    """Adds the command."""
    parser = commands.add_parser(
        "quality",
        help="measure what KV formats cost",
        description="Runs a checkpoint over text with K and V in each format, as the router would keep them, and compares the\n"
        "next-token predictions with those over float16. Text should be what the model was not trained on.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--model", required=True, metavar="DIR", help="the checkpoint")
    parser.add_argument("--text", required=True, nargs="+", metavar="FILE", help="UTF-8 text, one file per domain")
    for name, text in OPTIONS.items():
        parser.add_argument(f"--{name}", metavar="VALUE", help=text)
    parser.add_argument("--layers", action="store_true", help="seal one layer at a time: which ones the model is sensitive in")
    parser.add_argument("--json", action="store_true", help="print a JSON list instead of a table")


def run(args: argparse.Namespace) -> int:
    """The child's exit status. It inherits standard input, output and error."""
    try:
        return subprocess.run([sys.executable, "-m", "router_service.quality", *_flags(args)], check=False).returncode
    except KeyboardInterrupt:  # the child got it as well and has ended
        return 130


def _flags(args: argparse.Namespace) -> list[str]:
    flags = ["--model", args.model, "--text", *args.text]
    for name in OPTIONS:
        if (value := getattr(args, name.replace("-", "_"))) is not None:
            flags.append(f"--{name}={value}")
    return flags + [f"--{name}" for name in ("layers", "json") if getattr(args, name)]
