"""Where a step's milliseconds went, for a terminal."""

from __future__ import annotations

from collections.abc import Iterable
from statistics import fmean

from rich.table import Table
from rich.text import Text

from forefetch.client import StepTimings
from forefetch.v1 import router_pb2

# Label, field of StepTimings, colour. "other" is what the parts leave of the total.
PARTS = (
    ("attention", "attention_ns", "blue"),
    ("gate", "gate_ns", "cyan"),
    ("lookahead", "lookahead_ns", "bright_magenta"),
    ("link", "link_ns", "yellow"),
    ("expert compute", "expert_ns", "green"),
    ("copy wait", "copy_wait_ns", "red"),
    ("queue", "queue_ns", "magenta"),
    ("combine", "combine_ns", "bright_blue"),
    ("sampling", "sampling_ns", "bright_cyan"),
)
OTHER = ("other", "bright_black")


def mean_parts(steps: Iterable[StepTimings | router_pb2.StepTimings]) -> dict[str, float]:
    """Mean milliseconds per step of each part, "other" last. Empty without steps."""
    timings = list(steps)
    if not timings:
        return {}
    means = {label: fmean(_ms(t, name) for t in timings) for label, name, _ in PARTS}
    total = fmean(_ms(t, "total_ns") for t in timings)
    return {**means, OTHER[0]: max(0.0, total - sum(means.values()))}


def _ms(timings: StepTimings | router_pb2.StepTimings, name: str) -> float:
    """A duration by its proto name, from the message or from the client's form of it."""
    if isinstance(timings, StepTimings):
        return float(getattr(timings, name.removesuffix("ns") + "ms"))
    return float(getattr(timings, name)) / 1e6


def colours() -> dict[str, str]:
    """Colour by label."""
    return {**{label: colour for label, _, colour in PARTS}, OTHER[0]: OTHER[1]}


def bar(parts: dict[str, float], width: int = 60) -> Text:
    """One line of `width` cells, each part as long as its share; rounding never loses or adds a cell."""
    total = sum(parts.values())
    text, used, done = Text(), 0, 0.0
    for label, value in parts.items():
        done += value
        upto = round(width * done / total) if total else 0
        text.append("█" * (upto - used), style=colours()[label])
        used = upto
    return text


def breakdown(parts: dict[str, float]) -> Table:
    """A row for each part that took time: label, milliseconds, share."""
    table = Table.grid(padding=(0, 2))
    table.add_column()
    table.add_column(justify="right")
    table.add_column(justify="right")
    total = sum(parts.values())
    for label, value in parts.items():
        if value >= 0.0005:
            name = Text.assemble(("■ ", colours()[label]), label)
            table.add_row(name, f"{value:.3f} ms", f"{100 * value / total:.0f} %")
    return table
