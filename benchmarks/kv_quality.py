"""What KV formats cost beside min-max of as many bytes, on more text than fits one sitting: `forefetch quality` by windows.

    python -m models.recipe.excerpts --heldout --data data --out text          # models/recipe/README.md says where data is from
    python -m benchmarks.kv_quality --text text/*.txt --keep kv_quality.jsonl [--windows 20] [--formats NAMES] [--write]

Windows of 4,096 tokens, one behind the other, of each text in turn. What a window gives is added to the file at once and never
measured again: a run that was cut goes on, and runs with fewer formats take windows that others lack. At the end the tables
of `forefetch quality` over all windows that have every format asked for; `--windows 0` prints what there is.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Iterator, Sequence
from itertools import zip_longest
from pathlib import Path
from typing import Any

import torch

from benchmarks.results import Row, append
from forefetch.kernels.kv_codec import KvFormat
from forefetch.spec import ModelSpec
from router_service.quality import plots, report
from router_service.quality.cells import Cell
from router_service.quality.measure import Measured, Meter, Window, windows
from router_service.quality.setups import MIN_MAX, OWN, Setup, setups

CONTEXTS = (1024, 2048, 4096)
Key = tuple[str, int, str]
"""Text, number of the window in it, setup."""


class Kept:
    """Sums of blocks by window, setup and context, in a file of JSON lines."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.cells: dict[Key, dict[int, Cell]] = {}
        if path.exists():
            for line in path.read_text().splitlines():
                self._take(json.loads(line))

    def _take(self, entry: dict[str, Any]) -> None:
        cells = {
            int(context): Cell(list(torch.tensor(blocks, dtype=torch.float64))) for context, blocks in entry["blocks"].items()
        }
        self.cells[entry["text"], entry["window"], entry["setup"]] = cells

    def add(self, text: str, window: int, found: Measured) -> None:
        """Writes it down before it is used."""
        blocks = {context: [block.tolist() for block in cell.blocks] for context, cell in found.cells.items()}
        entry = {"text": text, "window": window, "setup": found.setup.name, "blocks": blocks}
        with self.path.open("a") as out:
            out.write(json.dumps(entry) + "\n")
        self._take(json.loads(json.dumps(entry)))

    def together(self, wanted: Sequence[Setup]) -> tuple[list[Measured], int]:
        """Each setup over all windows that have every one of them, and how many these are."""
        of = {setup.name: {key[:2] for key in self.cells if key[2] == setup.name} for setup in wanted}
        shared = sorted(set.intersection(*of.values()))
        found = [Measured(setup) for setup in wanted]
        for measured in found:
            for text, window in shared:
                for context, cell in self.cells[text, window, measured.setup.name].items():
                    measured.cells.setdefault(context, Cell()).blocks.extend(cell.blocks)
                    measured.by_text.setdefault((context, text), Cell()).blocks.extend(cell.blocks)
        return found, len(shared)


def in_turn(model: Path, texts: Sequence[Path]) -> Iterator[tuple[int, Window]]:
    """The first window of each text, the second, ..."""
    for number, row in enumerate(zip_longest(*(windows(model, [text], CONTEXTS[-1], 0) for text in texts))):
        yield from ((number, window) for window in row if window is not None)


def measure(args: argparse.Namespace, wanted: Sequence[Setup], kept: Kept) -> None:
    """Adds the first `--windows` windows, as far as they are not there."""
    meter = Meter(args.model, torch.device("cpu"))
    for count, (number, window) in enumerate(in_turn(args.model, args.text)):
        if count == args.windows:
            return
        missing = [setup for setup in wanted if (window.text, number, setup.name) not in kept.cells]
        began = time.monotonic()
        for measured in meter.run(missing, [window] if missing else [], CONTEXTS, lambda setup: None):
            kept.add(window.text, number, measured)
        print(f"{window.text} {number}: {len(missing)} setups in {time.monotonic() - began:.0f} s", flush=True)


def rows(found: Sequence[Measured], count: int, spec: ModelSpec) -> Iterator[Row]:
    """Rows of results.csv, the difference to min-max with its interval."""
    for entry in report.as_json(found, spec):
        case = f"{spec.name}, {count} windows, {entry['format']}, {entry['bits']:.2f} bits, context {entry['context']}"
        yield Row("kv_quality", case, "greedy agreement", 100 * entry["greedy_agreement"], "%")
        yield from _rows(case, entry, "")
        if beside := entry["min_max"]:
            yield from _rows(case, beside, f" beside {beside['format']} of {beside['bits']:.2f} bits")


def _rows(case: str, figures: dict[str, Any], what: str) -> Iterator[Row]:
    for name, metric in (("change", f"perplexity change{what}"), ("divergence", f"KL{what}")):
        yield Row("kv_quality", case, metric, 100 * figures[name], "%")
        for end, value in zip(("low", "high"), figures[f"{name}_interval"] or (), strict=False):
            yield Row("kv_quality", case, f"{metric}, {end} end of 95 %", 100 * value, "%")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, default=Path("models/reference"))
    parser.add_argument("--text", type=Path, nargs="+", default=sorted(Path("models/reference/heldout").glob("*.txt")))
    parser.add_argument("--keep", type=Path, default=Path("kv_quality.jsonl"), help="where windows are kept (%(default)s)")
    parser.add_argument("--windows", type=int, default=6, help="of all texts together (%(default)s)")
    parser.add_argument("--formats", default=",".join((*OWN[1:], *MIN_MAX)))
    parser.add_argument("--plot", type=Path, default=None, metavar="PNG")
    parser.add_argument("--write", action="store_true", help="add rows to results.csv")
    args = parser.parse_args()
    spec, kept = ModelSpec.load(args.model), Kept(args.keep)
    wanted = setups(args.formats.split(","), KvFormat("e2m0", spec.head_dim), 32, -1, frozenset())
    with torch.inference_mode():
        if args.windows:
            measure(args, wanted, kept)
    found, count = kept.together(wanted)
    print(f"{count} windows of {CONTEXTS[-1]} tokens")
    plots.show(found, spec, CONTEXTS)
    if args.plot:
        plots.picture(found, spec, CONTEXTS[-1], args.plot)
    if args.write:
        append(list(rows(found, count, spec)))


if __name__ == "__main__":
    main()
