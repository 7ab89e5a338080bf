"""Where a step's milliseconds went, for a terminal."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from rich.table import Table
from rich.text import Text

# Label, field of StepTimings, colour. "other" is what the parts leave of the total.
PARTS = (
    ("attention", "attention_ns", "blue"),
    ("gate", "gate_ns", "cyan"),
    ("link", "link_ns", "yellow"),
    ("expert compute", "expert_ns", "green"),
    ("copy wait", "copy_wait_ns", "red"),
    ("queue", "queue_ns", "magenta"),
    ("combine", "combine_ns", "bright_blue"),
    ("sampling", "sampling_ns", "bright_cyan"),
)
OTHER = ("other", "bright_black")


def mean_parts(steps: Iterable[Any]) -> dict[str, float]:
    """Mean milliseconds per step of each part, "other" last, from objects with StepTimings' fields. Empty without steps."""
    timings = list(steps)
    if not timings:
        return {}
    means = {label: sum(getattr(t, name) for t in timings) / len(timings) / 1e6 for label, name, _ in PARTS}
    total = sum(t.total_ns for t in timings) / len(timings) / 1e6
    return {**means, OTHER[0]: max(0.0, total - sum(means.values()))}


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
