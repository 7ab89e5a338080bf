"""The chart, rendered by the real Helm engine: once per set of values and session."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import helm_python as helm
import yaml

ROOT = Path(__file__).resolve().parents[2]
CHART = ROOT / "deploy" / "chart"
EXAMPLES = sorted(path.stem for path in (CHART / "examples").glob("*.yaml"))

Manifest = dict[str, Any]


@cache
def _chart() -> Any:
    return helm.Chart.load(CHART)


def render(values: Manifest) -> dict[str, str]:
    """Template path -> text, as `helm install demo --namespace llm` would make it."""
    rendered: dict[str, str] = _chart().render(values, name="demo", namespace="llm")
    return rendered


def manifests(values: Manifest) -> list[Manifest]:
    """Every object that these values make."""
    texts = [text for path, text in render(values).items() if not path.endswith("NOTES.txt")]
    return [document for text in texts for document in yaml.safe_load_all(text) if document]


@cache
def example(name: str) -> list[Manifest]:
    return manifests(values_of(name))


def values_of(name: str) -> Manifest:
    """The values of an example; none for "defaults"."""
    values: Manifest = {} if name == "defaults" else yaml.safe_load((CHART / "examples" / f"{name}.yaml").read_text())
    return values
