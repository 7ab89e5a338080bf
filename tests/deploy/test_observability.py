"""deploy/observability: rules that Prometheus takes, a dashboard that is up to date, and a section for every alert.

That every metric they name is really exported is asked of a running cluster in tests/cluster/test_probes.py.
"""

from __future__ import annotations

import importlib.util
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import promql_parser as promql
import pytest
import yaml
from charts import ROOT, example

from forefetch import cli

FOLDER = ROOT / "deploy" / "observability"
PROMTOOL = shutil.which("promtool", path=os.pathsep.join((str(Path(sys.executable).parent), os.environ.get("PATH", ""))))
needs_promtool = pytest.mark.skipif(PROMTOOL is None, reason="`make promtool` takes it out of Debian's package prometheus")


def groups() -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = yaml.safe_load((FOLDER / "rules.yaml").read_text())["groups"]
    return found


def rules() -> list[dict[str, Any]]:
    return [rule for group in groups() for rule in group["rules"]]


def alerts() -> list[dict[str, Any]]:
    return [rule for rule in rules() if "alert" in rule]


def queries() -> list[str]:
    """What the dashboard asks, its variables filled in."""
    dashboard = json.loads((FOLDER / "dashboard.json").read_text())
    asked = [target["expr"] for panel in dashboard["panels"] for target in panel.get("targets", ())]
    return [re.sub(r"\$\{?\w+\}?", ".*", query.replace("$__rate_interval", "1m")) for query in asked]


def selectors(expression: Any) -> Iterator[tuple[str, bool]]:
    """(metric, whether a range of it is taken) of everything that an expression reads."""
    if isinstance(expression, promql.MatrixSelector):
        yield expression.vector_selector.name, True
    elif isinstance(expression, promql.VectorSelector):
        yield expression.name, False
    else:
        children = [getattr(expression, name, None) for name in ("expr", "lhs", "rhs", "param")]
        for child in (*children, *getattr(expression, "args", ())):
            if child is not None:
                yield from selectors(child)


@needs_promtool
@pytest.mark.parametrize("arguments", [("check", "rules", "--lint-fatal", "rules.yaml"), ("test", "rules", "rules.test.yaml")])
def test_promtool_is_content(arguments: tuple[str, ...]) -> None:
    done = subprocess.run([str(PROMTOOL), *arguments], cwd=FOLDER, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def test_every_expression_is_one() -> None:
    """A real parser of PromQL: syntax, functions, types of arguments. The dashboard's, too, which promtool does not read."""
    asked = [rule["expr"] for rule in rules()] + queries()
    assert len(asked) > 50
    for expression in asked:
        assert any(True for _ in selectors(promql.parse(expression))), expression


@pytest.mark.parametrize(
    "wrong", ["rate(forefetch_x_total)", "sum by (a rate(x[5m]))", "histogram_quantile(x[5m], 1)", "x[5q]"]
)
def test_the_parser_bites(wrong: str) -> None:
    with pytest.raises(ValueError, match=r"."):
        promql.parse(wrong)


def test_rules_have_the_form_that_prometheus_takes() -> None:
    names = [rule.get("alert") or rule["record"] for rule in rules()]
    assert len(set(names)) == len(names)
    assert len({group["name"] for group in groups()}) == len(groups())
    for rule in rules():
        if "alert" in rule:
            assert set(rule) <= {"alert", "expr", "for", "labels", "annotations"}
            assert promql.parse_duration(rule.get("for", "1s"))
        else:
            assert set(rule) == {"record", "expr"}
            assert re.fullmatch(r"forefetch:[a-z_]+:[a-z0-9_]+", rule["record"]), "level:metric:operations"


def test_ranges_are_taken_of_counters_and_recorded_series_exist() -> None:
    """What ends in _total, _bucket, _count or _sum only ever grows: its value alone says nothing, and a gauge's rate
    neither."""
    recorded = {rule["record"] for rule in rules() if "record" in rule}
    for expression in [rule["expr"] for rule in rules()] + queries():
        for name, ranged in selectors(promql.parse(expression)):
            if ":" in name:
                assert name in recorded, name
            elif name.startswith(("forefetch_", "gen_ai_")):
                assert ranged == name.endswith(("_total", "_bucket", "_count", "_sum")), f"{name} in {expression}"


def test_every_alert_has_its_section_and_leads_to_it() -> None:
    manual = (ROOT / "docs" / "operations.md").read_text()
    sections = set(re.findall(r"^### (\w+)$", manual, re.M))
    names = {alert["alert"] for alert in alerts()}
    assert names == {name for name in sections if name.startswith("Forefetch")}
    for alert in alerts():
        assert alert["annotations"]["runbook"] == f"docs/operations.md#{alert['alert'].lower()}"
        assert alert["labels"]["severity"] in ("critical", "warning", "info")


def anchor(heading: str) -> str:
    """As GitHub makes it."""
    return re.sub(r"[^a-z0-9 -]", "", heading.lower()).replace(" ", "-")


def test_the_manual_leads_to_sections_commands_and_objects_that_exist() -> None:
    """Links, `forefetch` commands with their flags, and the names of the release `demo` in kubectl's lines."""
    manual = (ROOT / "docs" / "operations.md").read_text()
    anchors = {anchor(heading) for heading in re.findall(r"^#+ (.+)$", manual, re.M)}
    links = re.findall(r"\]\(#([\w-]+)\)", re.sub(r"\]\n?\(", "](", manual))
    assert len(links) > 8
    assert set(links) <= anchors
    blocks = "\n".join(re.findall(r"^```\n(.*?)^```$", manual, re.M | re.S)).replace("\\\n", " ")
    calls = [shlex.split(line, comments=True)[1:] for line in blocks.splitlines() if line.startswith("forefetch ")]
    assert len(calls) >= 3
    for call in calls:
        cli.parser().parse_args([{"MODEL": "m", "HOST:50051": "h:1"}.get(word, word) for word in call])
    kinds = {"deployment": "Deployment", "statefulset": "StatefulSet", "lease": "Lease"}
    objects = {(thing["kind"], thing["metadata"]["name"]) for name in ("three-nodes", "planned") for thing in example(name)}
    objects.add(("Lease", "demo-forefetch-expert-planner"))
    named = re.findall(r"(deployment|statefulset|lease)[/ ](demo-[\w-]+)", manual)
    assert len(named) > 5
    for kind, name in named:
        whole = f"{name}0" if name.endswith("-") else name  # followed by $replica
        assert (kinds[kind], whole) in objects, name


def test_the_dashboard_is_what_its_script_makes() -> None:
    """`python scripts/generate_dashboard.py` after a change of the script."""
    spec = importlib.util.spec_from_file_location("dashboard", ROOT / "scripts" / "generate_dashboard.py")
    assert spec is not None
    assert spec.loader is not None
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    assert (FOLDER / "dashboard.json").read_text() == script.text()


def test_the_dashboard_holds_together() -> None:
    dashboard = json.loads((FOLDER / "dashboard.json").read_text())
    ids = [panel["id"] for panel in dashboard["panels"]]
    assert len(set(ids)) == len(ids)
    variables = {variable["name"] for variable in dashboard["templating"]["list"]}
    used = set(re.findall(r"\$\{?(\w+)", json.dumps(dashboard["panels"]))) - {"__rate_interval"}
    assert used <= variables
    taken: set[tuple[int, int]] = set()
    for place in (panel["gridPos"] for panel in dashboard["panels"]):
        cells = {(x, y) for x in range(place["x"], place["x"] + place["w"]) for y in range(place["y"], place["y"] + place["h"])}
        assert not cells & taken, "panels lie on one another"
        taken |= cells


def test_the_collector_uses_what_it_defines() -> None:
    config = yaml.safe_load((FOLDER / "collector.yaml").read_text())
    assert set(config["service"]["extensions"]) == set(config["extensions"])
    for kind in ("receivers", "processors", "exporters"):
        used = [name for pipeline in config["service"]["pipelines"].values() for name in pipeline[kind]]
        assert set(used) == set(config[kind]), kind
    assert config["service"]["pipelines"]["traces"]["processors"][0] == "memory_limiter"
