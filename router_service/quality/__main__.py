"""`python -m router_service.quality --model DIR --text FILES`; `forefetch quality` runs this."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from forefetch.errors import ConfigError, ForefetchError
from forefetch.kernels.kv_codec import KvFormat
from forefetch.spec import ModelSpec
from router_service.quality import plots, report
from router_service.quality.measure import CONTEXTS, Measured, Meter, windows
from router_service.quality.setups import DEFAULT, Setup, setups


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point of the process. Errors end as one line on standard error."""
    args = parser().parse_args(argv)
    # Progress goes to standard error, so that a table or JSON on standard output stays whole.
    console = Console(stderr=True, highlight=False)
    try:
        if args.threads:
            torch.set_num_threads(args.threads)
        return _run(args, console)
    except ForefetchError as error:
        print(f"forefetch quality: error: {error}", file=sys.stderr)
        return 2 if isinstance(error, ConfigError) else 1
    except KeyboardInterrupt:
        return 130


def _run(args: argparse.Namespace, console: Console) -> int:
    spec = ModelSpec.load(args.model)
    contexts = _contexts(args, spec)
    found = _measure(args, spec, contexts, console)
    if args.json:
        print(json.dumps(report.as_json(found, spec), indent=1))
    else:
        plots.show(found, spec, contexts)
    if args.plot:
        plots.picture(found, spec, contexts[-1], args.plot)
    return 0


def _measure(args: argparse.Namespace, spec: ModelSpec, contexts: Sequence[int], console: Console) -> list[Measured]:
    texts = windows(args.model, args.text, contexts[-1], args.tokens)
    wanted = _setups(args, spec)
    device = torch.device(args.device if args.device != "auto" else "cuda" if torch.cuda.is_available() else "cpu")
    meter = Meter(args.model, device)
    columns = TextColumn("{task.description:<20}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn()
    with Progress(*columns, console=console) as bars:
        task = bars.add_task("measuring", total=len(texts) * len(wanted))
        return meter.run(wanted, texts, contexts, lambda setup: bars.update(task, advance=1, description=setup.name))


def _setups(args: argparse.Namespace, spec: ModelSpec) -> list[Setup]:
    """What to measure; with --layers one format, each time with one layer sealed."""
    exempt = frozenset(int(part) for part in args.exempt_layers.split(",") if part.strip().isdecimal())
    try:
        shape = KvFormat("e2m0", spec.head_dim, page=args.page_size, outliers=args.outliers, sinks=args.sinks)
    except ValueError as error:
        raise ConfigError(str(error)) from None
    found = setups(args.formats.split(","), shape, args.thirds, args.recent, exempt)
    if not args.layers:
        return found
    everything = frozenset(range(spec.layers))
    return [
        replace(setup, name=f"{setup.name} layer {layer}", exempt=everything - {layer})
        for setup in found
        if setup.format is not None and setup.baseline is None
        for layer in range(spec.layers)
    ]


def _contexts(args: argparse.Namespace, spec: ModelSpec) -> list[int]:
    contexts = sorted({min(int(part), spec.context_length) for part in args.contexts.split(",") if part.strip().isdecimal()})
    if not contexts or contexts[0] < 16:
        raise ConfigError("--contexts: must be numbers of at least 16 tokens, like 512,4096")
    return contexts


def parser() -> argparse.ArgumentParser:
    """The command line."""
    whole = argparse.ArgumentParser(prog="python -m router_service.quality", description=__doc__)
    whole.add_argument("--model", required=True, type=Path, metavar="DIR", help="the checkpoint")
    whole.add_argument(
        "--text", required=True, nargs="+", type=Path, metavar="FILE", help="UTF-8 text the model was not trained on"
    )
    whole.add_argument("--tokens", type=int, default=0, metavar="N", help="tokens of each file to run; 0: all (%(default)s)")
    default = ",".join(map(str, CONTEXTS))
    whole.add_argument("--contexts", default=default, metavar="N,N", help="tokens a prediction sees, at most (%(default)s)")
    whole.add_argument(
        "--formats", default=",".join(DEFAULT), metavar="NAMES", help="formats, baselines, int8-trunk (%(default)s)"
    )
    whole.add_argument("--page-size", type=int, default=128, metavar="N", help="tokens of a page (%(default)s)")
    whole.add_argument("--sinks", type=int, default=4, metavar="N", help="first tokens in float16 (%(default)s)")
    whole.add_argument("--recent", type=int, default=-1, metavar="N", help="newest tokens in float16; -1: the format's default")
    whole.add_argument("--outliers", type=int, default=1, metavar="N", help="channels of K in float16 (%(default)s)")
    whole.add_argument(
        "--thirds", type=int, default=32, metavar="N", help="mixed: channels of K with a third bit (%(default)s)"
    )
    whole.add_argument("--exempt-layers", default="", metavar="N,N", help="layers that stay float16")
    whole.add_argument("--layers", action="store_true", help="seal one layer at a time: which ones a model is sensitive in")
    whole.add_argument("--plot", type=Path, default=None, metavar="PNG", help="write cost against bits as a picture")
    whole.add_argument("--json", action="store_true", help="print a JSON list instead of a table")
    whole.add_argument("--device", default="auto", help="cpu, cuda, or auto (%(default)s)")
    whole.add_argument("--threads", type=int, default=0, help="CPU threads; 0 is torch's choice (%(default)s)")
    return whole


if __name__ == "__main__":
    sys.exit(main())
