"""Quality against bits: as lines of text, and as a picture."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console
from rich.text import Text

from forefetch.errors import ConfigError
from forefetch.spec import ModelSpec
from router_service.quality.cells import Interval
from router_service.quality.measure import Measured
from router_service.quality.peers import PEERS
from router_service.quality.report import in_order, pairs, table

if TYPE_CHECKING:
    from matplotlib.axes import Axes

COLUMNS = 100
WIDTH = 48
"""Characters of the terminal's scale."""
KINDS = {"formats": ("o", "-", "C0"), "min-max": ("s", "--", "C1"), "transformers": ("D", "", "C2")}
"""Marker, line, colour."""


def show(found: Sequence[Measured], spec: ModelSpec, contexts: Sequence[int]) -> None:
    """Prints tables and chart on standard output, as wide as they need: a terminal may wrap them, nothing is cut."""
    screen = Console(highlight=False)
    screen.width = max(screen.width, COLUMNS)
    screen.print(table(found, spec, contexts))
    if (beside := pairs(found, spec, contexts)).row_count:
        screen.print(beside)
    screen.print(chart(found, spec, contexts[-1]), no_wrap=True)


def chart(found: Sequence[Measured], spec: ModelSpec, context: int) -> Text:
    """A line per setup, fewest bits first, with its divergence and interval on a logarithmic scale."""
    lines = [(one, one.cells[context].divergence) for one in in_order(found, spec, context) if not _plain(one, context)]
    shown = Text(f"KL of predictions at {context // 2} to {context} tokens from float16's, 95 % interval; logarithmic\n")
    if not lines:
        return shown
    low = min(_ends(interval)[0] for _, interval in lines)
    reach = math.log(max(_ends(interval)[1] for _, interval in lines) / low) or 1.0

    def place(value: float) -> int:
        return round((WIDTH - 1) * max(0.0, math.log(max(value, low) / low)) / reach)

    for one, interval in lines:
        track = [" "] * WIDTH
        first, last = map(place, _ends(interval))
        track[first : last + 1] = "─" * (last + 1 - first)
        track[place(interval.value)] = "○" if one.setup.baseline else "●"
        shown.append(f"{one.setup.bits(spec, context):6.2f} bits  {one.setup.name:<14} ")
        shown.append("".join(track), style="yellow" if one.setup.baseline else "cyan")
        shown.append(f" {100 * interval.value:.3f} %\n")
    return shown


def _plain(one: Measured, context: int) -> bool:
    return one.cells[context].divergence.value <= 0


def _ends(interval: Interval) -> tuple[float, float]:
    """Of a bar on a logarithmic scale, without an interval the value."""
    value, low, high = interval
    return (value, value) if math.isnan(low) else (max(low, value / 10), high)


def picture(found: Sequence[Measured], spec: ModelSpec, context: int, path: Path) -> None:
    """Perplexity and divergence against bits as a PNG. ConfigError without matplotlib."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise ConfigError("--plot: needs matplotlib; install forefetch[plot]") from None
    figure = Figure(figsize=(11, 5), layout="constrained")
    perplexity, divergence = figure.subplots(1, 2)
    sealed = [one for one in in_order(found, spec, context) if not _plain(one, context)]
    for kind, style in KINDS.items():
        of_kind = [one for one in sealed if _kind(one) == kind]
        bits = [one.setup.bits(spec, context) for one in of_kind]
        _draw(perplexity, kind, style, bits, [one.cells[context].change for one in of_kind])
        _draw(divergence, kind, style, bits, [one.cells[context].divergence for one in of_kind])
        for number, (one, at) in enumerate(zip(of_kind, bits, strict=True)):
            _name(divergence, one, (at, 100 * one.cells[context].divergence.value), 6 + 11 * (number % 2))
    perplexity.axhline(0, color="0.5", linewidth=0.8)
    perplexity.set_ylabel("perplexity over float16's, %")
    divergence.set_yscale("log")
    for scale in (divergence.yaxis.set_major_formatter, divergence.yaxis.set_minor_formatter):
        scale(lambda value, _: f"{value:g}" if f"{value:e}"[0] in "125" else "")
    divergence.set_ylabel("KL from float16's predictions, %")
    if sealed:
        perplexity.legend()
    for axes in (perplexity, divergence):
        axes.set_xlabel(f"bits per element at {context} tokens, everything counted")
        axes.grid(visible=True, which="both", alpha=0.3)
        axes.margins(x=0.16, y=0.12)
    figure.suptitle(f"{spec.name}, predictions that see {context // 2} to {context} tokens, 95 % intervals")
    figure.savefig(path, dpi=150)


def _kind(one: Measured) -> str:
    return "transformers" if one.setup.name in PEERS else "min-max" if one.setup.baseline else "formats"


def _draw(axes: Axes, kind: str, style: tuple[str, str, str], bits: list[float], intervals: list[Interval]) -> None:
    if not bits:
        return
    marker, line, colour = style
    values = [100 * each.value for each in intervals]
    ends = [(each.value, each.value) if math.isnan(each.low) else (each.low, each.high) for each in intervals]
    down = [max(0.0, value - 100 * low) for value, (low, _) in zip(values, ends, strict=True)]
    up = [max(0.0, 100 * high - value) for value, (_, high) in zip(values, ends, strict=True)]
    axes.errorbar(bits, values, [down, up], marker=marker, linestyle=line, color=colour, capsize=3, label=kind)


def _name(axes: Axes, one: Measured, point: tuple[float, float], away: int) -> None:
    """Baselines are named above and right of their point, formats below and left, the next one farther `away`: formats and
    baselines of equal bits lie close together."""
    right = one.setup.baseline is not None
    axes.annotate(
        one.setup.name,
        point,
        xytext=(6, away) if right else (-6, -away),
        textcoords="offset points",
        ha="left" if right else "right",
        va="bottom" if right else "top",
        fontsize="small",
    )
