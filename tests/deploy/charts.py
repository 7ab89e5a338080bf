"""The chart, rendered by the real Helm engine: once per set of values and session."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import helm_python as helm
import yaml

from expert_worker.config import ExpertConfig
from forefetch import settings
from forefetch.cli.up import add_cluster_arguments
from forefetch.cluster import ClusterConfig
from kv_service.config import KvConfig
from router_service.config import RouterConfig

ROOT = Path(__file__).resolve().parents[2]
CHART = ROOT / "deploy" / "chart"
EXAMPLES = sorted(path.stem for path in (CHART / "examples").glob("*.yaml"))
CONFIGS: dict[str, type[settings.ServiceConfig]] = {
    "router_service": RouterConfig,
    "expert_worker": ExpertConfig,
    "kv_service": KvConfig,
}

Manifest = dict[str, Any]
UP = ["forefetch.cli", "up"]


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


def pods(objects: list[Manifest]) -> Iterator[tuple[str, Manifest]]:
    """(name, pod spec) of everything that makes pods."""
    for thing in objects:
        if thing["kind"] in ("Deployment", "StatefulSet"):
            yield thing["metadata"]["name"], thing["spec"]["template"]["spec"]
        elif thing["kind"] == "Pod":
            yield thing["metadata"]["name"], thing["spec"]


def containers(objects: list[Manifest]) -> Iterator[Manifest]:
    for _, spec in pods(objects):
        yield from (*spec.get("initContainers", ()), *spec["containers"])


def environment(container: Manifest, objects: list[Manifest]) -> dict[str, str]:
    """What the process would see: ConfigMaps first, then the container's own; "3" for what Kubernetes fills in."""
    seen: dict[str, str] = {}
    for source in container.get("envFrom", ()):
        name = source["configMapRef"]["name"]
        seen.update(next(t["data"] for t in objects if t["kind"] == "ConfigMap" and t["metadata"]["name"] == name))
    for entry in container.get("env", ()):
        seen[entry["name"]] = entry.get("value", "0")
    return seen


def configs(objects: list[Manifest]) -> Iterator[tuple[str, Any]]:
    """(service, its config as read from what the chart passes) of every container of a service."""
    for container in containers(objects):
        service = container.get("args", [""])[0]
        seen = environment(container, objects)
        if service in CONFIGS:
            yield service, settings.build(CONFIGS[service], {}, seen)
        elif container.get("args", [])[:2] == UP:
            for service, flags in started_by(container["args"][2:]):
                yield service, settings.build(CONFIGS[service], flags, seen)


def service_of(container: Manifest) -> str:
    """The service that a container is there for."""
    return "router_service" if container["args"][:2] == UP else str(container["args"][0])


def started_by(args: list[str]) -> Iterator[tuple[str, dict[str, str]]]:
    """(service, its flags) of what `forefetch up` starts."""
    parser = argparse.ArgumentParser()
    add_cluster_arguments(parser)
    flags = {**vars(parser.parse_args(args)), "model": "synthetic:qwen3-30b-a3b"}  # the folder is not there
    config = settings.build(ClusterConfig, flags, {}).resolved()
    assert (config.inherit, config.kv) == (True, False)
    yield (
        "router_service",
        {
            **{"device": config.device_of(0), "link": config.link, "drain_s": str(config.drain_s)},
            "workers": "local,127.0.0.1:1" if config.spread else "127.0.0.1:1",
        },
    )
    for place in range(1, config.workers + 1):
        part = {"shard": str(place - 1 + config.spread), "shards": str(config.shards)}
        yield "expert_worker", {"device": config.device_of(place), **part}
