"""Writes deploy/observability/dashboard.json, the Grafana dashboard.

    python scripts/generate_dashboard.py

Panels are rows of the table below: a change is a line here and not a hundred of JSON.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, NamedTuple

TARGET = Path(__file__).resolve().parent.parent / "deploy" / "observability" / "dashboard.json"
SOURCE = {"type": "prometheus", "uid": "${datasource}"}
TOOLTIP = {"tooltip": {"mode": "multi"}}
WIDTH, HEIGHT = 8, 7  # three panels in a row
R = 'namespace=~"$namespace"'


class Panel(NamedTuple):
    """A panel: title, unit, what a reader learns from it, and (legend, expression) of each line."""

    title: str
    unit: str
    text: str
    lines: tuple[tuple[str, str], ...]
    kind: str = "timeseries"
    stacked: bool = False


def rate(metric: str, by: str = "", match: str = R) -> str:
    """Per second, summed over everything but `by`."""
    return f"sum{f' by ({by})' if by else ''} (rate({metric}{{{match}}}[$__rate_interval]))"


def quantile(q: float, metric: str) -> str:
    """A quantile of a histogram over all routers."""
    return f"histogram_quantile({q}, {rate(metric + '_bucket', 'le')})"


def share(part: str, *parts: str) -> str:
    """One rate over the sum of several."""
    return f"{rate(part)} / ({' + '.join(rate(name) for name in parts)})"


FIRST, PER_TOKEN = "gen_ai_server_time_to_first_token_seconds", "gen_ai_server_time_per_output_token_seconds"
STEP, STEPS = "forefetch_router_step_duration_seconds", "forefetch_router_steps_total"
CALLS = "forefetch_router_worker_calls_total"
FOUND = "forefetch_expert_found_total"
HITS, MISSES = "forefetch_kv_hits_total", "forefetch_kv_misses_total"

ROWS: dict[str, tuple[Panel, ...]] = {
    "Service": (
        Panel(
            "Requests",
            "reqps",
            "Requests that ended, by gRPC status.",
            (("{{status}}", rate("forefetch_router_requests_total", "status")),),
            stacked=True,
        ),
        Panel(
            "Time to first token",
            "s",
            "Arrival to first token: queue, then prefill.",
            (("p50", quantile(0.5, FIRST)), ("p99", quantile(0.99, FIRST))),
        ),
        Panel(
            "Time per output token",
            "s",
            "Between a token and the one before it, as a stream sees it.",
            (("p50", quantile(0.5, PER_TOKEN)), ("p99", quantile(0.99, PER_TOKEN))),
        ),
        Panel(
            "Running and waiting",
            "short",
            "Requests in the batch, and in the queue before it.",
            (("running", f"sum(forefetch_router_running{{{R}}})"), ("waiting", f"sum(forefetch_router_waiting{{{R}}})")),
        ),
        Panel(
            "Tokens",
            "short",
            "Tokens per second, computed of prompts and generated.",
            (
                ("prompt", rate("forefetch_router_prompt_tokens_total")),
                ("generated", rate("forefetch_router_completion_tokens_total")),
            ),
        ),
        Panel(
            "KV pages in use",
            "percentunit",
            "Of the router's page pool. Requests wait when their worst case does not fit.",
            (("{{instance}}", f"forefetch_router_pages_used{{{R}}} / forefetch_router_pages{{{R}}}"),),
        ),
    ),
    "Where a step's time goes": (
        Panel(
            "Parts of a step",
            "s",
            "Mean step, by disjoint part: what is large here is what to work on.",
            (("{{part}}", f"{rate('forefetch_router_step_part_seconds_total', 'part')} / on () group_left () {rate(STEPS)}"),),
            stacked=True,
        ),
        Panel(
            "Step duration",
            "s",
            "Whole steps, those of prompts included.",
            (("p50", quantile(0.5, STEP)), ("p99", quantile(0.99, STEP))),
        ),
        Panel(
            "Steps, and those run again",
            "short",
            "A step is run again when a worker was lost half-way.",
            (("steps", rate(STEPS)), ("run again", rate("forefetch_router_replayed_steps_total"))),
        ),
    ),
    "Experts": (
        Panel(
            "Call to a worker, by hop",
            "s",
            "Mean layer call: round trip at the router; queue, copy wait, compute at the worker. The rest is the link.",
            (("{{part}}", f"{rate('forefetch_router_worker_seconds_total', 'part')} / on () group_left () {rate(CALLS)}"),),
        ),
        Panel(
            "Pairs to each worker",
            "short",
            "(token, expert) pairs a second: how evenly the work is spread.",
            (("{{worker}}", rate("forefetch_router_worker_pairs_total", "worker")),),
        ),
        Panel(
            "Workers",
            "short",
            "Links that are up, and how often one had to be made again.",
            (
                ("up", f"sum(forefetch_router_worker_up{{{R}}})"),
                ("reconnects", f"sum(increase(forefetch_router_worker_reconnects_total{{{R}}}[$__rate_interval]))"),
            ),
        ),
        Panel(
            "Load of experts",
            "short",
            "Pairs a second of each expert of the chosen layer: hot experts are bright rows.",
            (("{{expert}}", rate("forefetch_expert_load_pairs_total", "expert", f'{R}, layer="$layer"')),),
            kind="heatmap",
        ),
        Panel(
            "Experts moved",
            "short",
            "Loaded and unloaded a second by the planner's commands, over all planned workers.",
            (("{{what}}", rate("forefetch_expert_moved_total", "what")),),
        ),
        Panel(
            "Compute",
            "percentunit",
            "Share of its time that a worker computes.",
            (("{{instance}}", rate("forefetch_expert_compute_seconds_total", "instance")),),
        ),
    ),
    "Hints and copies": (
        Panel(
            "Experts found",
            "percentunit",
            "Distinct experts that calls needed: resident, hit (hinted, and there in time), late (still copying), miss.",
            (("{{found}}", f"{rate(FOUND, 'found')} / on () group_left () {rate(FOUND)}"),),
            stacked=True,
        ),
        Panel(
            "Late prefetches and misses",
            "short",
            "Per second. Late: hints came too late or copies are too slow. Misses: nobody hinted.",
            tuple((what, rate(FOUND, match=f'{R}, found="{what}"')) for what in ("late", "miss")),
        ),
        Panel(
            "Copied and wasted bytes",
            "Bps",
            "Into fast memory, and of those what left it unused. Much waste: hints name too many.",
            (("copied", rate("forefetch_expert_copied_bytes_total")), ("wasted", rate("forefetch_expert_wasted_bytes_total"))),
        ),
        Panel(
            "Waiting for copies",
            "percentunit",
            "Share of time that a worker's calls wait for copies.",
            (("{{instance}}", rate("forefetch_expert_copy_wait_seconds_total", "instance")),),
        ),
        Panel(
            "Hints",
            "short",
            "Hints given to links, dropped there, and dropped by workers because they were stale.",
            (
                ("sent", rate("forefetch_router_hints_sent_total")),
                ("never left", rate("forefetch_router_hints_dropped_total")),
                ("stale", rate("forefetch_expert_hints_dropped_total")),
            ),
        ),
    ),
    "KV service": (
        Panel(
            "Prefix hits",
            "percentunit",
            "Blocks that were looked up and held, of all looked up.",
            (("hits", share(HITS, HITS, MISSES)),),
        ),
        Panel(
            "Prefixes loaded",
            "short",
            "Cached blocks that routers loaded instead of computing, per second.",
            (("blocks", rate("forefetch_router_kv_blocks_loaded_total")),),
        ),
        Panel(
            "Memory",
            "bytes",
            "Blocks held, and the budget.",
            (("held", f"sum(forefetch_kv_bytes{{{R}}})"), ("budget", f"sum(forefetch_kv_budget_bytes{{{R}}})")),
        ),
        Panel(
            "Hand-over",
            "short",
            "Sealed blocks sent, given up because the queue was full, and waiting.",
            (
                ("sent", rate("forefetch_router_kv_blocks_sent_total")),
                ("dropped", rate("forefetch_router_kv_blocks_dropped_total")),
                ("waiting", f"sum(forefetch_router_kv_blocks_waiting{{{R}}})"),
            ),
        ),
    ),
}


def panel(number: int, made: Panel, x: int, y: int) -> dict[str, Any]:
    """Grafana's form of a panel."""
    heat = made.kind == "heatmap"
    form = "heatmap" if heat else "time_series"
    targets = [
        {"refId": chr(65 + index), "datasource": SOURCE, "expr": expression, "legendFormat": legend, "format": form}
        for index, (legend, expression) in enumerate(made.lines)
    ]
    custom = {"fillOpacity": 30 if made.stacked else 5, "stacking": {"mode": "normal" if made.stacked else "none"}}
    return {
        "id": number,
        "type": made.kind,
        "title": made.title,
        "description": made.text,
        "datasource": SOURCE,
        "gridPos": {"x": x, "y": y, "w": WIDTH, "h": HEIGHT},
        "targets": targets,
        "fieldConfig": {"defaults": {"unit": made.unit, "min": 0, "custom": {} if heat else custom}, "overrides": []},
        "options": {"calculate": False, "color": {"mode": "scheme", "scheme": "Oranges"}} if heat else TOOLTIP,
    }


def panels() -> list[dict[str, Any]]:
    """Rows and their panels, laid out three abreast."""
    made: list[dict[str, Any]] = []
    y = 0
    for title, row in ROWS.items():
        place = {"x": 0, "y": y, "w": 24, "h": 1}
        made.append({"id": len(made) + 1, "type": "row", "title": title, "collapsed": False, "panels": [], "gridPos": place})
        y += 1
        for index, wanted in enumerate(row):
            made.append(panel(len(made) + 1, wanted, index % 3 * WIDTH, y + index // 3 * HEIGHT))
        y += -(-len(row) // 3) * HEIGHT
    return made


def variable(name: str, query: str, **more: Any) -> dict[str, Any]:
    """A drop-down filled from Prometheus."""
    return {"name": name, "type": "query", "datasource": SOURCE, "query": query, "refresh": 2, "sort": 3, **more}


def dashboard() -> dict[str, Any]:
    """The whole document."""
    everything = {"includeAll": True, "multi": True, "allValue": ".*", "current": {"text": "All", "value": "$__all"}}
    variables = [
        {"name": "datasource", "type": "datasource", "query": "prometheus"},
        variable("namespace", "label_values(forefetch_router_running, namespace)", **everything),
        variable("layer", "label_values(forefetch_expert_load_pairs_total, layer)"),
    ]
    return {
        "uid": "forefetch",
        "title": "Forefetch",
        "tags": ["forefetch", "llm"],
        "schemaVersion": 39,
        "refresh": "15s",
        "time": {"from": "now-1h", "to": "now"},
        "templating": {"list": variables},
        "annotations": {"list": []},
        "panels": panels(),
    }


def text() -> str:
    """The file's contents."""
    return json.dumps(dashboard(), indent=1) + "\n"


if __name__ == "__main__":
    TARGET.write_text(text(), encoding="utf-8")
