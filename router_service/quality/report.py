"""Results as JSON and as tables. Each format stands beside its twin: the min-max baseline of as many bytes, or a few more."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.table import Table

from forefetch.spec import ModelSpec
from router_service.quality.cells import Cell, Interval
from router_service.quality.measure import Measured
from router_service.quality.peers import PEERS

ROUNDING = 0.003
"""At 512 tokens, where two or three pages are sealed, min-max in the same float16 tokens can take 0.2 % less."""


def twin(one: Measured, found: Sequence[Measured], spec: ModelSpec, context: int) -> Measured | None:
    """The measured min-max baseline with the fewest bits that are no fewer than `one`'s: of a page, and, but for what pages of
    a short context round off, of a sequence."""
    if one.setup.format is None or one.setup.baseline is not None:
        return None
    page, whole = one.setup.page_bits(), one.setup.bits(spec, context) * (1 - ROUNDING)
    baselines = [each for each in found if each.setup.baseline is not None and each.setup.name not in PEERS]
    enough = [each for each in baselines if each.setup.page_bits() >= page and each.setup.bits(spec, context) >= whole]
    return min(enough, key=lambda each: each.setup.bits(spec, context), default=None)


def as_json(found: Sequence[Measured], spec: ModelSpec) -> list[dict[str, Any]]:
    """One object per setup and context. Intervals are [low, high] of 95 in 100, or null; shares, not per cent."""
    return [
        {
            "format": measured.setup.name,
            "bits": round(measured.setup.bits(spec, context), 4),
            "context": context,
            **_figures(cell),
            "page_bits": round(measured.setup.page_bits(), 4),
            "min_max": _beside(measured, twin(measured, found, spec, context), context, spec),
            "texts": {text: _figures(part) for (of, text), part in measured.by_text.items() if of == context},
        }
        for measured in found
        for context, cell in measured.cells.items()
    ]


def _figures(cell: Cell) -> dict[str, Any]:
    change, divergence = cell.change, cell.divergence
    return {
        "ppl": round(cell.ppl, 5),
        "ppl_fp16": round(cell.ppl_fp16, 5),
        "greedy_agreement": round(cell.agreement, 5),
        "change": round(change.value, 6),
        "change_interval": _range(change),
        "divergence": round(divergence.value, 7),
        "divergence_interval": _range(divergence),
        "predictions": cell.count,
    }


def _beside(one: Measured, other: Measured | None, context: int, spec: ModelSpec) -> dict[str, Any] | None:
    if other is None:
        return None
    change, divergence = one.cells[context].beside(other.cells[context])
    return {
        "format": other.setup.name,
        "bits": round(other.setup.bits(spec, context), 4),
        "change": round(change.value, 6),
        "change_interval": _range(change),
        "divergence": round(divergence.value, 6),
        "divergence_interval": _range(divergence),
    }


def _range(interval: Interval) -> list[float] | None:
    return None if math.isnan(interval.low) else [round(interval.low, 7), round(interval.high, 7)]


def table(found: Sequence[Measured], spec: ModelSpec, contexts: Sequence[int]) -> Table:
    """A row per setup, fewest bits first; intervals at the longest context."""
    longest = contexts[-1]
    shown = _empty(f"{spec.name}: ppl over float16's, KL from its predictions, by context; per cent [95 %]")
    shown.add_column("format", no_wrap=True)
    heads = ["bits\npage", f"bits\n{longest}", *(f"ppl\n{context}" for context in contexts)]
    for head in [*heads, "same\ntoken", f"KL\n{longest}"]:
        shown.add_column(head, justify="right", no_wrap=True)
    for measured in in_order(found, spec, longest):
        cells = [measured.cells[context] for context in contexts]
        shown.add_row(
            measured.setup.name,
            f"{measured.setup.page_bits():.2f}",
            f"{measured.setup.bits(spec, longest):.2f}",
            *(f"{100 * cell.change.value:+.2f}" for cell in cells[:-1]),
            cells[-1].change.percent(),
            f"{100 * cells[-1].agreement:.1f}",
            cells[-1].divergence.percent(3, signed=False),
        )
    return shown


def pairs(found: Sequence[Measured], spec: ModelSpec, contexts: Sequence[int]) -> Table:
    """Each format relative to its twin, by context."""
    shown = _empty("beside min-max of as many bits or more, per cent [95 %]; below 0 is better")
    for name in ("format", "bits", "min-max", "bits", "context", "KL", "perplexity"):
        shown.add_column(name, no_wrap=True, justify="left" if name in {"format", "min-max"} else "right")
    for measured in in_order(found, spec, contexts[-1]):
        for context in contexts:
            if other := twin(measured, found, spec, context):
                change, divergence = measured.cells[context].beside(other.cells[context])
                bits = [f"{each.setup.bits(spec, context):.2f}" for each in (measured, other)]
                names = measured.setup.name, other.setup.name
                shown.add_row(names[0], bits[0], names[1], bits[1], str(context), divergence.percent(0), change.percent())
    return shown


def _empty(title: str) -> Table:
    return Table(title=title, title_justify="left", box=SIMPLE_HEAD, collapse_padding=True, pad_edge=False)


def in_order(found: Sequence[Measured], spec: ModelSpec, context: int) -> list[Measured]:
    """Fewest bits first."""
    return sorted(found, key=lambda one: (one.setup.bits(spec, context), one.setup.name))
