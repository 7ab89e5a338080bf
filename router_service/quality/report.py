"""Results as JSON, as a table with bars, and as a picture."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.table import Table

from forefetch.errors import ConfigError
from forefetch.spec import ModelSpec
from router_service.quality.measure import Measured

BAR = 24
"""Width of the longest bar, in characters."""


def as_json(found: Sequence[Measured], spec: ModelSpec) -> list[dict[str, Any]]:
    """One object per setup and context; `text` "" is all texts together."""
    rows = []
    for measured in found:
        cells = [(context, "", cell) for context, cell in measured.cells.items()]
        cells += [(context, text, cell) for (context, text), cell in measured.by_text.items()]
        for context, text, cell in cells:
            rows.append(
                {
                    "format": measured.setup.name,
                    "bits": round(measured.setup.bits(spec, context), 4),
                    "context": context,
                    "ppl": round(cell.ppl, 5),
                    "ppl_fp16": round(cell.ppl_fp16, 5),
                    "greedy_agreement": round(cell.agreement, 5),
                    "page_bits": round(measured.setup.page_bits(), 4),
                    "standard_error": round(cell.error, 6),
                    "divergence": round(cell.divergence, 7),
                    "divergence_error": round(cell.divergence_error, 7),
                    "predictions": cell.count,
                    "text": text,
                }
            )
    return rows


def table(found: Sequence[Measured], spec: ModelSpec, contexts: Sequence[int]) -> Table:
    """A row per setup, fewest bits first, with a bar of what it costs at the longest context."""
    longest = contexts[-1]
    shown = Table(title=f"{spec.name}: perplexity against float16 K and V, by context", title_justify="left")
    shown.add_column("format")
    shown.add_column("bits, page", justify="right")
    shown.add_column(f"bits, {longest}", justify="right")
    for context in contexts:
        shown.add_column(f"ppl {context}", justify="right")
    shown.add_column("KL", justify="right")
    shown.add_column("greedy", justify="right")
    shown.add_column(f"cost at {longest}")
    worst = max(1e-9, *(measured.cells[longest].change for measured in found))
    for measured in sorted(found, key=lambda one: (one.setup.bits(spec, longest), one.setup.name)):
        cells = [measured.cells[context] for context in contexts]
        bar = "█" * round(BAR * max(0.0, cells[-1].change) / worst)
        shown.add_row(
            measured.setup.name,
            f"{measured.setup.page_bits():.2f}",
            f"{measured.setup.bits(spec, longest):.2f}",
            *(f"{cell.ppl:.3f} {100 * cell.change:+.2f} %" for cell in cells),
            f"{100 * cells[-1].divergence:.3f} %",
            f"{100 * cells[-1].agreement:.1f} %",
            f"{bar} ±{100 * cells[-1].error:.2f}",
        )
    return shown


def picture(found: Sequence[Measured], spec: ModelSpec, context: int, path: Path) -> None:
    """Cost against bits as a PNG. ConfigError without matplotlib."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise ConfigError("--plot: needs matplotlib; install forefetch[plot]") from None
    figure = Figure(figsize=(8, 5), layout="constrained")
    axes = figure.add_subplot()
    for number, measured in enumerate(found):
        cell, bits = measured.cells[context], measured.setup.bits(spec, context)
        marker = ("sD^v" if measured.setup.baseline else "oPX*")[number // 10 % 4]  # colours begin anew after ten
        axes.errorbar(
            bits, 100 * cell.change, 100 * cell.error, marker=marker, capsize=3, linestyle="", label=measured.setup.name
        )
    axes.legend(fontsize="small")  # names beside the points would cover one another: formats of equal bits are close
    axes.set_xlabel(f"bits per element at {context} tokens, everything counted")
    axes.set_ylabel("perplexity over float16's, %")
    axes.set_title(f"{spec.name}, predictions that see {context // 2} to {context} tokens")
    axes.grid(visible=True, alpha=0.3)
    figure.savefig(path, dpi=150)
