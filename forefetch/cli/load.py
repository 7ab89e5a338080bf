"""How the load is spread over a model's experts, as `forefetch stats --load` and `forefetch place` show it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise

from rich.console import Console, ConsoleOptions
from rich.measure import Measurement
from rich.table import Table

from forefetch.v1 import router_pb2

_LEVELS = " ▁▂▃▄▅▆▇█"
_CELLS = 64


def table(stats: router_pb2.GetStatsResponse) -> Table:
    """A row for each layer: its experts from the most to the least loaded, and how much the hottest has beyond the mean."""
    shown = Table(box=None, pad_edge=False, header_style="dim")
    for heading in ("layer", "pairs", "hottest", "x mean", "busiest tenth"):
        shown.add_column(heading, justify="right", no_wrap=True)
    shown.add_column("experts, most loaded first", overflow="crop")
    for layer in stats.expert_load:
        loads = sorted(layer.pairs, reverse=True)
        total = sum(loads)
        if not total:
            continue
        hottest = max(range(len(layer.pairs)), key=lambda expert: layer.pairs[expert])
        tenth = sum(loads[: max(1, len(loads) // 10)])
        cells = (f"{total:,}", str(hottest), f"{loads[0] * len(loads) / total:.1f}", f"{100 * tenth / total:.0f} %")
        shown.add_row(str(layer.layer), *cells, _Histogram(loads))
    return shown


@dataclass(frozen=True)
class _Histogram:
    """`histogram` in the width that its column has left."""

    loads: list[int]

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[str]:
        yield histogram(self.loads, min(options.max_width, _CELLS))

    def __rich_measure__(self, console: Console, options: ConsoleOptions) -> Measurement:
        return Measurement(min(16, options.max_width), min(len(self.loads), _CELLS, options.max_width))


def histogram(loads: list[int], most: int = _CELLS) -> str:
    """Descending loads as bars, `most` of them at most: each the mean of its share of experts, full height the largest."""
    cells = min(len(loads), most)
    edges = [round(cell * len(loads) / cells) for cell in range(cells + 1)]
    means = [sum(loads[a:b]) / (b - a) for a, b in pairwise(edges)]
    top = max(means) or 1
    return "".join(_LEVELS[max(round(mean / top * (len(_LEVELS) - 1)), 1 if mean else 0)] for mean in means)
