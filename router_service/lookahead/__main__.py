"""`python -m router_service.lookahead train|eval --model DIR --text FILES`; `forefetch lookahead` runs this."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path

import torch
from rich.console import Console

from forefetch.errors import ConfigError, ForefetchError
from router_service.lookahead import commands, tables
from router_service.lookahead.train import Options

GENERATED = {"cpu": 24_576, "cuda": 49_152}
EPOCHS = {"cpu": 5, "cuda": 12}
HEAD_EPOCHS = {"cpu": 3, "cuda": 4}
"""What a device does in minutes with the reference model; more epochs gain a few tenths of a percent (benchmarks/LOG.md)."""


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point of the process. Errors end as one line on standard error."""
    args = parser().parse_args(argv)
    # Progress goes to standard error, so that a table or JSON on standard output stays whole.
    console = Console(stderr=True, highlight=False)
    try:
        if args.threads:
            torch.set_num_threads(args.threads)
        return _train(args, console) if args.command == "train" else _eval(args, console)
    except ForefetchError as error:
        print(f"forefetch lookahead: error: {error}", file=sys.stderr)
        return 2 if isinstance(error, ConfigError) else 1
    except KeyboardInterrupt:
        return 130


def _train(args: argparse.Namespace, console: Console) -> int:
    source = _source(args)
    generate, epochs, head_epochs = (
        defaults[source.device.type] if given is None else given
        for given, defaults in ((args.generate, GENERATED), (args.epochs, EPOCHS), (args.head_epochs, HEAD_EPOCHS))
    )
    options = Options(args.distilled, args.rank, epochs, head_epochs, args.batch, args.rate)
    path, trained = commands.train(source, generate, args.temperature, options, console)
    Console(highlight=False).print(tables.trained(trained, path))
    return 0


def _eval(args: argparse.Namespace, console: Console) -> int:
    scores = commands.evaluate(_source(args), console)
    if args.json:
        print(json.dumps(tables.as_json(scores)))
    else:
        Console(highlight=False).print(tables.evaluated(scores))
    return 0


def _source(args: argparse.Namespace) -> commands.Source:
    device = args.device if args.device != "auto" else "cuda" if torch.cuda.is_available() else "cpu"
    if device.startswith("cuda") and not torch.cuda.is_available():
        raise ConfigError(f"--device {device}: there is no such device here")
    return commands.Source(Path(args.model), args.text, args.tokens, args.context, args.separator, torch.device(device))


def parser() -> argparse.ArgumentParser:
    """The command line."""
    whole = argparse.ArgumentParser(prog="python -m router_service.lookahead", description=__doc__)
    commands_of = whole.add_subparsers(dest="command", required=True)
    train = commands_of.add_parser("train", help="train heads and write lookahead.safetensors beside the weights")
    _add_source(train, 1024, 98_304, "tokens of text to record, over all files; 1,000 take about 9 MB with the reference model")
    by_device = "on a CPU {cpu}, on a GPU {cuda}".format_map
    train.add_argument("--generate", type=int, help=f"tokens of the model's own to record ({by_device(GENERATED)})")
    train.add_argument("--temperature", type=float, default=0.8, help="of those tokens (%(default)s)")
    defaults = Options()
    train.add_argument(
        "--distilled", type=int, default=defaults.distilled, help="units in a sketch of a layer's experts (%(default)s)"
    )
    train.add_argument("--rank", type=int, default=defaults.rank, help="width of a correction (%(default)s)")
    train.add_argument("--epochs", type=int, help=f"passes over the recorded rows ({by_device(EPOCHS)})")
    train.add_argument("--head-epochs", type=int, help=f"the same for corrections ({by_device(HEAD_EPOCHS)})")
    train.add_argument("--batch", type=int, default=defaults.batch, help="rows per update (%(default)s)")
    train.add_argument("--rate", type=float, default=defaults.rate, help="peak learning rate (%(default)s)")
    evaluate = commands_of.add_parser("eval", help="measure hints on text that heads were not trained on")
    _add_source(evaluate, 512, 0, "tokens of each file to run (default: all)")
    evaluate.add_argument("--json", action="store_true", help="print one JSON object")
    return whole


def _add_source(command: argparse.ArgumentParser, context: int, tokens: int, text: str) -> None:
    command.add_argument("--model", required=True, metavar="DIR", help="the checkpoint")
    command.add_argument("--text", required=True, nargs="+", type=Path, metavar="FILE", help="UTF-8 text; one file per domain")
    command.add_argument("--tokens", type=int, default=tokens, metavar="N", help=text)
    command.add_argument("--context", type=int, default=context, metavar="N", help="longest sequence (%(default)s)")
    command.add_argument(
        *("--separator",), default="<|endoftext|>", help="what a line ends with that ends a document (%(default)s); '' for none"
    )
    command.add_argument("--device", default="auto", help="cpu, cuda, or auto (%(default)s)")
    command.add_argument("--threads", type=int, default=0, help="CPU threads; 0 is torch's choice (%(default)s)")


if __name__ == "__main__":
    sys.exit(main())
