"""Draws what `expert_offload` has measured: a step against one with all experts resident, over slots and over recall.

    python -m benchmarks.expert_offload_plot [--out docs/expert-offload.svg]

Points are the latest rows of results.csv. A dashed line is the least that the bytes allow: what was moved, at PCIe's full
speed, if all of it could be hidden. Horizontal lines load on demand, with lists of the least recently used. Needs the extra
`plot`.
"""

from __future__ import annotations

import argparse
import csv
import re
from pathlib import Path
from typing import Any

from benchmarks.results import FILE

Points = dict[tuple[int, int], float]  # (percent in slots, recall in percent) -> times the resident step
SERIES = (("int4", 1, "C0"), ("int4", 4, "C1"), ("bfloat16", 1, "C2"))
HOSTS = {"no host": ":", "host, recorded": "-.", "host, eager": (0, (1, 4))}


def latest(file: Path = FILE) -> dict[tuple[str, str], float]:
    """(case, metric) -> the last value that `expert_offload` wrote."""
    with file.open(newline="") as rows:
        return {
            (row["case"], row["metric"]): float(row["value"])
            for row in csv.DictReader(rows)
            if row["benchmark"] == "expert_offload"
        }


def series(found: dict[tuple[str, str], float], kind: str, batch: int) -> tuple[Points, Points, dict[str, float]]:
    """Steps, the least that their bytes allow, and loading on demand at half the slots."""
    label, steps, floors, demand = (
        f"{kind}, batch {batch}, 48 layers, attention 100 us, ",
        Points(),
        Points(),
        dict[str, float](),
    )
    for (case, metric), value in found.items():
        if metric != "x resident" or not case.startswith(label):
            continue
        name = case.removeprefix(label)
        if slots := re.fullmatch(r"(\d+)% slots, (?:recall (\d+)%|no hints)", name):
            at = int(slots[1]), int(slots[2] or 0)
            steps[at] = value
            floors[at] = max(1.0, value * found.get((case, "link busy"), 0.0) / 100)
        elif name.startswith("50% slots, on demand, LRU, "):
            demand[name.removeprefix("50% slots, on demand, LRU, ")] = value
    return steps, floors, demand


def line(axes: Any, points: Points, floors: Points, axis: int, fixed: int, colour: str, label: str) -> None:
    """A series along one axis of (slots, recall), the other fixed."""
    chosen = sorted((at[axis], value, floors[at]) for at, value in points.items() if at[1 - axis] == fixed)
    if axis == 0:
        chosen.append((100, 1.0, 1.0))  # nothing to move
    places, values, least = zip(*chosen, strict=True)
    axes.plot(places, values, marker="o", color=colour, label=label)
    axes.plot(places, least, linestyle="--", color=colour, linewidth=1)


def picture(file: Path, path: Path) -> None:
    """Both panels, as an SVG with its text as text."""
    import matplotlib
    from matplotlib.figure import Figure

    matplotlib.rcParams.update({"svg.fonttype": "none", "svg.hashsalt": "forefetch"})
    figure, found = Figure(figsize=(10, 4.2), layout="constrained"), latest(file)
    over_slots, over_recall = figure.subplots(1, 2, sharey=True)
    for kind, batch, colour in SERIES:
        steps, floors, demand = series(found, kind, batch)
        line(over_slots, steps, floors, 0, 95, colour, f"{kind}, batch {batch}")
        line(over_recall, steps, floors, 1, 50, colour, f"{kind}, batch {batch}")
        for host, style in HOSTS.items():
            if host in demand and kind == "int4":
                over_recall.axhline(demand[host], linestyle=style, color=colour, label=f"{kind}, on demand, {host}")
    for axes, where, name in (
        (over_slots, "slots, % of the experts", "recall 95 %"),
        (over_recall, "recall of hints, %", "50 % slots"),
    ):
        axes.set(xlabel=where, title=name, ylabel="step, times all resident", yscale="log", yticks=[1, 1.15, 1.5, 2, 3, 5])
        axes.yaxis.set_major_formatter(lambda value, _: f"{value:g}")
        axes.minorticks_off()
        axes.grid(visible=True, alpha=0.3)
        axes.legend(fontsize="x-small")
    figure.savefig(path, metadata={"Date": None})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=FILE.parents[1] / "docs" / "expert-offload.svg")
    picture(FILE, parser.parse_args().out)


if __name__ == "__main__":
    main()
