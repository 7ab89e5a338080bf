"""A request's waterfall: in a terminal, and as one HTML file that needs nothing else."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console, ConsoleOptions, Group, RenderableType
from rich.measure import Measurement
from rich.rule import Rule
from rich.table import Table
from rich.text import Text

from forefetch.cli.show import OTHER, PARTS, colours
from forefetch.v1 import router_pb2

Step = router_pb2.StepTrace
Segment = tuple[str, float]  # label of show.PARTS, nanoseconds

_BLOCKS = " ▏▎▍▌▋▊▉█"
_NUMBERS = ("attention", "link", "expert compute", "copy wait")


def terminal(trace: router_pb2.GetTraceResponse, console: Console, *, most_steps: int = 60, most_layers: int = 12) -> None:
    """Prints every step, the layers of the median and of the slowest token, and a summary.

    Of more than `most_steps` steps the first and the slowest are shown, of more than `most_layers` layers the slowest.
    """
    console.print(_head(trace))
    if not trace.steps:
        console.print("No step of it is recorded.")
        return
    console.print(_legend())
    console.print(_steps(trace, most_steps))
    for title, step in _remarkable(trace.steps):
        console.print(_layers(trace, title, step, most_layers))
    console.print(_summary(trace))


def html(trace: router_pb2.GetTraceResponse) -> str:
    """The page. Everything from the trace is data in it, never markup."""
    template = Path(__file__).with_name("waterfall.html").read_text(encoding="utf-8")
    data = json.dumps(_data(trace), separators=(",", ":")).replace("<", "\\u003c")
    return template.replace("__TRACE__", data)


# ---- the page's data ----

# The page's colours go by these names; the same order as show.PARTS.
_KEYS = tuple(field.removesuffix("_ns") for _, field, _ in PARTS)


def _data(trace: router_pb2.GetTraceResponse) -> dict[str, Any]:
    return {
        "request": trace.request_id,
        "trace": trace.trace_id,
        "arrival": trace.arrival_unix_ns,
        "queued": trace.queued_ns,
        "lost": trace.steps_lost,
        "workers": list(trace.workers),
        "parts": [[key, label] for key, (label, _, _) in zip(_KEYS, PARTS, strict=True)],
        "steps": [_step_data(step) for step in trace.steps],
    }


def _step_data(step: Step) -> dict[str, Any]:
    return {
        "number": step.step,
        "at": step.start_ns,
        "token": step.token_index if step.HasField("token_index") else None,
        "prefill": step.prefill_tokens,
        "total": step.timings.total_ns,
        "parts": [getattr(step.timings, field) for _, field, _ in PARTS],
        "batch": step.timings.batch,
        "tokens": step.timings.tokens,
        "layers": [
            [
                *(layer.layer, layer.start_ns, layer.attention_ns, layer.gate_ns, layer.experts_ns, layer.combine_ns),
                [
                    [
                        *(call.worker, call.rows, call.round_trip_ns, call.queue_ns, call.copy_wait_ns, call.compute_ns),
                        *(call.hits, call.late, call.misses, call.shadowed, call.copy_ns),
                    ]
                    for call in layer.calls
                ],
                *(layer.lookahead_ns, layer.chosen, layer.named, layer.found),
            ]
            for layer in step.layers
        ],
    }


# ---- the terminal ----


def ms(ns: float) -> str:
    """Milliseconds with three significant digits or three decimals."""
    value = ns / 1e6
    return (
        f"{value:.0f}" if value >= 100 else f"{value:.1f}" if value >= 10 else f"{value:.2f}" if value >= 1 else f"{value:.3f}"
    )


def bar(segments: Sequence[Segment], scale: float, cells: int, offset: float = 0.0) -> Text:
    """Coloured segments from `offset` on, `scale` nanoseconds over `cells` cells. Cells go to the segment that fills most of
    them; the last one is drawn to an eighth."""
    text = Text()
    at, used = offset / scale * cells, round(offset / scale * cells)
    text.append(" " * used)
    for label, ns in segments:
        at += ns / scale * cells
        text.append("█" * (round(at) - used), style=colours()[label])
        used = max(used, round(at))
    rest = at - used
    if segments and rest > 0.06:
        text.append(_BLOCKS[round(rest * 8)], style=colours()[segments[-1][0]])
    return text


@dataclass(frozen=True)
class _Bar:
    """`bar` in whatever width its column has left, so that a narrow terminal costs cells of bars and no figures."""

    segments: Sequence[Segment]
    scale: float
    offset: float = 0.0

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[Text]:
        drawn = bar(self.segments, self.scale, max(options.max_width - 1, 1), self.offset)  # and a cell for the eighths
        drawn.truncate(options.max_width)
        yield drawn

    def __rich_measure__(self, console: Console, options: ConsoleOptions) -> Measurement:
        return Measurement(min(8, options.max_width), options.max_width)


def _table(*headings: tuple[str, str]) -> Table:
    """Columns (heading, side) of figures that are never cut, and one of bars that takes the rest of the line."""
    table = Table(box=None, pad_edge=False, header_style="dim", expand=True)
    for heading, side in headings:
        table.add_column(heading, justify="right" if side == "right" else "left", no_wrap=True)
    table.add_column("", ratio=1)
    return table


def name(step: Step) -> str:
    """What the step did for the request."""
    token = f"token {step.token_index}" if step.HasField("token_index") else ""
    prompt = f"prompt {step.prefill_tokens}" if step.prefill_tokens else ""
    return " + ".join(filter(None, (prompt, token)))


def parts(timings: router_pb2.StepTimings) -> list[Segment]:
    """A step's disjoint parts, "other" last."""
    known: list[Segment] = [(label, float(getattr(timings, field))) for label, field, _ in PARTS]
    return [*known, (OTHER[0], max(0.0, timings.total_ns - sum(ns for _, ns in known)))]


def _head(trace: router_pb2.GetTraceResponse) -> Text:
    facts = [f"queued {ms(trace.queued_ns)} ms", f"{len(trace.steps)} steps"]
    if trace.load_ns:
        facts.insert(1, f"{trace.cached_tokens:,} tokens loaded in {ms(trace.load_ns)} ms")
    if trace.steps_lost:
        facts.append(f"{trace.steps_lost} no longer recorded")
    if trace.trace_id:
        facts.append(f"trace {trace.trace_id}")
    if trace.workers:
        facts.append("workers " + ", ".join(trace.workers))
    return Text.assemble((trace.request_id, "bold"), ("  " + " · ".join(facts), "dim"))


def _legend() -> Text:
    return Text("   ").join(Text.assemble(("█ ", colour), label) for label, colour in colours().items())


def _steps(trace: router_pb2.GetTraceResponse, most: int) -> Table:
    """A line for each step. Steps that computed prompt tokens have a scale of their own, so that tokens stay readable."""
    table = _table(("step", "left"), *((heading.split()[0], "right") for heading in ("ms", *_NUMBERS)))
    scales = {prompt: _slowest(trace.steps, prompt) for prompt in (True, False)}
    before = -1
    for index in _shown(trace.steps, most):
        if skipped := index - before - 1:
            table.add_row(Text(f"… {skipped} faster", "dim"))
        before, step = index, trace.steps[index]
        spent = dict(parts(step.timings))
        numbers = [Text(ms(spent[label]), colours()[label]) if spent[label] else Text("") for label in _NUMBERS]
        scale = scales[bool(step.prefill_tokens)]
        table.add_row(name(step), ms(step.timings.total_ns), *numbers, _Bar(parts(step.timings), scale))
    if skipped := len(trace.steps) - before - 1:
        table.add_row(Text(f"… {skipped} faster", "dim"))
    return table


def _slowest(steps: Sequence[Step], prompt: bool) -> int:
    return max((step.timings.total_ns for step in steps if bool(step.prefill_tokens) == prompt), default=1) or 1


def _shown(steps: Sequence[Step], most: int) -> list[int]:
    """Indices of the steps to show: the first half of `most`, and the slowest of the others."""
    first = min(most // 2, len(steps))
    others = sorted(range(first, len(steps)), key=lambda index: steps[index].timings.total_ns, reverse=True)
    return [*range(first), *sorted(others[: most - first])]


def _remarkable(steps: Sequence[Step]) -> Iterator[tuple[str, Step]]:
    """The median and the slowest of the steps that computed only tokens, or else of all."""
    tokens = [step for step in steps if not step.prefill_tokens] or list(steps)
    ranked = sorted(tokens, key=lambda step: step.timings.total_ns)
    yield "Median", ranked[len(ranked) // 2]
    if len(ranked) > 1:
        yield "Slowest", ranked[-1]


def _layers(trace: router_pb2.GetTraceResponse, title: str, step: Step, most: int) -> RenderableType:
    """A row for each layer and for each worker's part in it, from the layer's start."""
    heading = _section(f"{title}: {name(step)}, {ms(step.timings.total_ns)} ms")
    if not step.layers:
        return Group(heading, Text("recorded without layers", "dim"))
    total = {layer.layer: sum(ns for _, ns in _layer_parts(layer)) for layer in step.layers}
    chosen = sorted(total, key=lambda index: total[index], reverse=True)[:most]
    hinted = any(layer.named or any(call.copy_ns for call in layer.calls) for layer in step.layers)
    headings = (("layer", "left"), ("at ms", "right"), ("ms", "right"), ("rows", "right"))
    table = _table(*headings, *((("experts", "right"),) if hinted else ()))
    scale = max(total.values()) or 1
    for layer in step.layers:
        if layer.layer in chosen:
            row = _Bar(_layer_parts(layer), scale)
            cell = [Text(f"{layer.found} of {layer.chosen} hinted" if layer.named else "")] if hinted else []
            table.add_row(f"layer {layer.layer}", ms(layer.start_ns), ms(total[layer.layer]), "", *cell, row)
            for call in layer.calls:
                worker = trace.workers[call.worker] if call.worker < len(trace.workers) else f"worker {call.worker}"
                drawn = _Bar(_call_parts(call, call.round_trip_ns), scale, layer.attention_ns + layer.gate_ns)
                cell = [_verified(call)] if hinted else []
                table.add_row(Text(f"  {worker}", "dim"), "", ms(call.round_trip_ns), str(call.rows), *cell, drawn)
    hidden = len(total) - len(chosen)
    return Group(heading, table, *([Text(f"{hidden} faster layers are not shown", "dim")] if hidden else []))


def _verified(call: router_pb2.WorkerCall) -> Text:
    """What a worker had to copy for a call."""
    counts = (
        *(("hit", call.hits, "green"), ("late", call.late, "yellow")),
        *(("miss", call.misses, "red"), ("shadowed", call.shadowed, "magenta")),
    )
    parts = [Text(f"{count} {name}", colour) for name, count, colour in counts if count]
    if call.copy_ns:  # what no call waited for passed beside something else
        waited = min(call.copy_wait_ns, call.copy_ns)
        parts.append(Text(f"copies {ms(call.copy_ns)} ms, {100 * (1 - waited / call.copy_ns):.0f} % hidden", "dim"))
    return Text(" ").join(parts)


def _layer_parts(layer: router_pb2.LayerTrace) -> list[Segment]:
    slowest = max(layer.calls, key=_busy, default=router_pb2.WorkerCall())
    experts = _call_parts(slowest, layer.experts_ns)
    return [
        ("attention", layer.attention_ns),
        ("gate", layer.gate_ns),
        *experts,
        ("combine", layer.combine_ns),
        ("lookahead", layer.lookahead_ns),
    ]


def _call_parts(call: router_pb2.WorkerCall, waited_ns: int) -> list[Segment]:
    """What the worker reports in the middle of what the router waited; the rest is the way there and back."""
    way = max(waited_ns - _busy(call), 0) / 2
    reported = [("queue", call.queue_ns), ("copy wait", call.copy_wait_ns), ("expert compute", call.compute_ns)]
    return [("link", way), *reported, ("link", way)]


def _busy(call: router_pb2.WorkerCall) -> int:
    return call.queue_ns + call.copy_wait_ns + call.compute_ns


def _summary(trace: router_pb2.GetTraceResponse) -> RenderableType:
    """Share of time, mean, p50 and p99 of each part over the steps that computed only tokens (or all, if none did)."""
    steps = [step for step in trace.steps if not step.prefill_tokens] or list(trace.steps)
    table = _table(("part", "left"), *((heading, "right") for heading in ("share", "mean ms", "p50 ms", "p99 ms")))
    whole = sum(step.timings.total_ns for step in steps) or 1
    spent = [dict(parts(step.timings)) for step in steps]
    for label, colour in colours().items():
        values = [step[label] for step in spent]
        drawn = _Bar([(label, sum(values))], whole)
        table.add_row(Text.assemble(("█ ", colour), label), *_statistics(values, whole), drawn)
    table.add_row("whole step", *_statistics([float(step.timings.total_ns) for step in steps], whole), style="bold")
    over = "tokens" if not steps[0].prefill_tokens else "steps"
    return Group(_section(f"Where the time went, over {len(steps)} {over}"), table)


def _section(title: str) -> RenderableType:
    return Group("", Rule(title, align="left", style="dim"))


def _statistics(values: Sequence[float], whole: float) -> list[str]:
    ranked = sorted(values)
    quantiles = [ranked[min(int(q * len(ranked)), len(ranked) - 1)] for q in (0.5, 0.99)]
    return [f"{100 * sum(values) / whole:.1f} %", ms(sum(values) / len(values)), *map(ms, quantiles)]
