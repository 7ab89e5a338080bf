"""deploy/observability: rules that Prometheus takes, a dashboard that is up to date, and a section for every alert.

That every metric they name is really exported is asked of a running cluster in tests/cluster/test_probes.py.
"""

from __future__ import annotations

import importlib.util
import json
import re
import shutil
import subprocess
from typing import Any

import pytest
import yaml
from charts import ROOT

FOLDER = ROOT / "deploy" / "observability"
PROMTOOL = shutil.which("promtool")
needs_promtool = pytest.mark.skipif(PROMTOOL is None, reason="promtool comes with Debian's package prometheus")


def alerts() -> list[dict[str, Any]]:
    groups = yaml.safe_load((FOLDER / "rules.yaml").read_text())["groups"]
    return [rule for group in groups for rule in group["rules"] if "alert" in rule]


@needs_promtool
@pytest.mark.parametrize("arguments", [("check", "rules", "--lint-fatal", "rules.yaml"), ("test", "rules", "rules.test.yaml")])
def test_promtool_is_content(arguments: tuple[str, ...]) -> None:
    done = subprocess.run([str(PROMTOOL), *arguments], cwd=FOLDER, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def test_every_alert_has_its_section_and_leads_to_it() -> None:
    manual = (ROOT / "docs" / "operations.md").read_text()
    sections = set(re.findall(r"^### (\w+)$", manual, re.M))
    names = {alert["alert"] for alert in alerts()}
    assert names == {name for name in sections if name.startswith("Forefetch")}
    for alert in alerts():
        assert alert["annotations"]["runbook"] == f"docs/operations.md#{alert['alert'].lower()}"
        assert alert["labels"]["severity"] in ("critical", "warning", "info")


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
