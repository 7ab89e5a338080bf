"""What the commands print: tables for people, one object for programs."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table

from router_service.lookahead.evaluate import (
    CONTROL,
    HEADS,
    METHODS,
    METRICS,
    NEXT,
    REFINED,
    SECOND,
    TIER0,
    Row,
    Scores,
    report,
)
from router_service.lookahead.store import Trained

DISTANCES = (NEXT, REFINED, SECOND)
COLUMNS = {NEXT: 11, REFINED: 0, SECOND: 12, "L+1 without attention": 1, "L+2 without attention": 2}


def as_json(scores: Mapping[str, Scores]) -> dict[str, Any]:
    """{domain: {"L+1": {"slots@k": ...}, "L+2": ..., "layers": ..., "baselines": ..., "control": ...}}."""
    return {domain: report(found) for domain, found in scores.items()}


def trained(found: Trained, path: Path) -> RenderableType:
    """What was kept per layer, and its slots@k+2 on documents kept aside."""
    table = Table(title=f"{path.name}: slots@k+2 on documents kept aside", title_justify="left")
    table.add_column("at layer", justify="right")
    for name in COLUMNS:
        table.add_column(name, justify="right")
    for layer in sorted({layer for layer, _ in found.heads}):
        table.add_row(str(layer), *(_kept(found, layer, distance) for distance in COLUMNS.values()))
    return table


def _kept(found: Trained, layer: int, distance: int) -> str:
    head = found.heads.get((layer, distance))
    if head is None:
        return ""
    return _percent(found.recall[layer, distance]) + ("" if head.correction is None else " head")


def evaluated(scores: Mapping[str, Scores]) -> RenderableType:
    """Two tables per domain: methods, then layers."""
    parts: list[RenderableType] = []
    for domain, found in scores.items():
        parts += [_methods(domain, found), _layers(domain, found), ""]
    return Group(*parts)


def _methods(domain: str, scores: Scores) -> Table:
    control = _percent(scores.mean(CONTROL, CONTROL)["slots@k"])
    table = _table(f"{domain}, mean over layers (a gate on its own input: {control})", ("named at", "by"))
    for distance in DISTANCES:
        for place, (method, row) in enumerate(_rows(scores, distance)):
            last = method == METHODS[-1] or (distance == REFINED and method == TIER0)
            table.add_row(*(distance if place == 0 else "", method), *_cells(row), end_section=last)
    return table


def _rows(scores: Scores, distance: str) -> Iterator[tuple[str, Row]]:
    for method in METHODS:
        if row := scores.mean(method, distance):
            yield method, row


def _layers(domain: str, scores: Scores) -> Table:
    table = _table(f"{domain}, heads by layer looked ahead to", ("named at", "layer"))
    for distance in DISTANCES:
        layers = scores.layers(HEADS, distance)
        for place, (layer, row) in enumerate(layers.items()):
            first = distance if place == 0 else ""
            table.add_row(first, str(layer), *_cells(row), end_section=place + 1 == len(layers))
    return table


def _table(title: str, keys: tuple[str, ...]) -> Table:
    table = Table(title=title, title_justify="left")
    for key in keys:
        table.add_column(key)
    for metric in METRICS:
        table.add_column(metric, justify="right")
    return table


def _cells(row: Row) -> list[str]:
    return [_percent(row[metric]) for metric in METRICS]


def _percent(share: float) -> str:
    return f"{100 * share:.1f} %"
