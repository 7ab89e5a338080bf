"""The part of `forefetch stats` about lookahead: what was named, what of it was chosen, and what that was worth to workers."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from rich.console import Console, ConsoleOptions, RenderableType
from rich.table import Table
from rich.text import Text

from forefetch.v1 import router_pb2

_PREDICTED = ("chosen", "recall", "next", "second", "refined", "named")
_FOUND = ("hit", "late", "miss", "resident", "wasted MB", "copied MB", "stall ms")


def tables(stats: router_pb2.GetStatsResponse) -> Iterator[RenderableType]:
    """A line, and a row for each layer where anything was named or missing."""
    hints = stats.hints
    if not hints.mode:  # a router that knows none
        return
    yield ""
    yield _line(hints)
    seen = [layer for layer in hints.layers if layer.chosen or layer.misses or layer.hits or layer.late]
    if seen:
        yield _Layers(seen)


def _line(hints: router_pb2.HintStats) -> Text:
    if hints.setting == "off":
        return Text("lookahead off", "dim")
    state = ("now off: copies cost less than heads would", "dim") if hints.mode == "off" else (f"now {hints.mode}", "green")
    heads = "trained heads" if hints.trained else "untrained heads"
    counts = f"  {hints.sent:,} hints sent, {hints.dropped:,} dropped, {hints.failures:,} failures"
    return Text.assemble(("lookahead ", "dim"), (f"{hints.setting}, {heads}  ", "bold"), state, counts)


@dataclass(frozen=True)
class _Layers:
    """A row for each layer. Distinct experts per step, summed over steps; shares are of those chosen. Where the line is too
    short for all columns, what was predicted comes first and what workers found in a table below."""

    layers: list[router_pb2.LayerHints]

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[RenderableType]:
        whole = self._table((*_PREDICTED, *_FOUND))
        if console.measure(whole, options=options.update(width=1000)).maximum <= options.max_width:
            yield whole
            return
        yield self._table(_PREDICTED)
        yield ""
        yield self._table(_FOUND)

    def _table(self, columns: Sequence[str]) -> Table:
        table = Table(box=None, pad_edge=False, header_style="dim")
        for heading in ("layer", *columns):
            table.add_column(heading, justify="right", no_wrap=True)
        for layer in self.layers:
            table.add_row(str(layer.layer), *_row(layer, columns))
        if len(self.layers) > 1:
            table.add_row("all", *_row(_sum(self.layers), columns), style="bold")
        return table


def _row(layer: router_pb2.LayerHints, columns: Sequence[str]) -> list[str]:
    cells = dict(zip((*_PREDICTED, *_FOUND), _cells(layer), strict=True))
    return [cells[column] for column in columns]


def _cells(layer: router_pb2.LayerHints) -> Iterator[str]:
    yield f"{layer.chosen:,}"
    for count in (layer.all, layer.next, layer.second, layer.refined):
        yield f"{100 * count.found / layer.chosen:.1f} %" if count.named and layer.chosen else ""
    yield f"{layer.all.named:,}"
    for number in (layer.hits, layer.late, layer.misses, layer.resident):
        yield f"{number:,}"
    for size in (layer.wasted_bytes, layer.copied_bytes):
        yield f"{size / 1e6:,.1f}"
    yield f"{layer.stall_ns / 1e6:,.1f}"


def _sum(layers: list[router_pb2.LayerHints]) -> router_pb2.LayerHints:
    total = router_pb2.LayerHints()
    for field in router_pb2.LayerHints.DESCRIPTOR.fields:
        values = [getattr(layer, field.name) for layer in layers]
        if field.message_type is None:
            setattr(total, field.name, sum(values))
        else:
            count = router_pb2.HintCount(named=sum(v.named for v in values), found=sum(v.found for v in values))
            getattr(total, field.name).CopyFrom(count)
    return total
