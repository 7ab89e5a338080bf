"""Writes deploy/chart/values.schema.json: no unknown key anywhere, and the services' own settings by name, type and choices.

    python scripts/generate_chart_schema.py

`$defs` of settings come from the config classes, so that the chart refuses what a service would not read. What the chart sets
itself (addresses, files, ports) cannot be set twice.
"""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any, get_type_hints

from expert_worker.config import ExpertConfig
from forefetch.settings import Config
from kv_service.config import KvConfig
from router_service.config import RouterConfig

TARGET = Path(__file__).resolve().parent.parent / "deploy" / "chart" / "values.schema.json"
SERVICES: dict[str, type[Config]] = {"router": RouterConfig, "expert": ExpertConfig, "kv": KvConfig}
# Decided by the chart's other values.
CHART_OWN = frozenset(
    {
        *("listen", "metrics_listen", "health_listen", "otlp_endpoint", "trace_ratio", "drain_s", "allow_plaintext"),
        *("tls_cert", "tls_key", "tls_ca", "model", "workers", "kv", "shard", "shards", "dir", "disk_gb", "allow_anonymous"),
        *("placed", "plan", "kube_api", "auth_tokens"),
    }
)
JSON_TYPES = {bool: "boolean", int: "integer", float: "number", str: "string"}

TEXT: dict[str, Any] = {"type": "string"}
FLAG: dict[str, Any] = {"type": "boolean"}
MAP: dict[str, Any] = {"type": "object", "additionalProperties": {"type": "string"}}
TEXTS: dict[str, Any] = {"type": "array", "items": TEXT}
OBJECTS: dict[str, Any] = {"type": "array", "items": {"type": "object"}}


def whole(least: int, most: int | None = None) -> dict[str, Any]:
    """An integer within bounds."""
    return {"type": "integer", "minimum": least, **({} if most is None else {"maximum": most})}


def one_of(*values: str) -> dict[str, Any]:
    """A string of a closed set."""
    return {"type": "string", "enum": list(values)}


def strict(**properties: Any) -> dict[str, Any]:
    """An object that takes these keys and no others."""
    return {"type": "object", "additionalProperties": False, "properties": properties}


def settings(cls: type[Config]) -> dict[str, Any]:
    """A service's settings, but those that the chart sets."""
    hints = get_type_hints(cls)
    properties: dict[str, Any] = {}
    for field in dataclasses.fields(cls):
        if field.name not in CHART_OWN:
            kind = {"type": JSON_TYPES[hints[field.name]]}
            choices = field.metadata["choices"]
            properties[field.name] = {**kind, **({"enum": list(choices)} if choices else {})}
    return strict(**properties)


RESOURCES = strict(
    requests={"type": "object", "additionalProperties": {"type": ["string", "integer", "number"]}},
    limits={"type": "object", "additionalProperties": {"type": ["string", "integer", "number"]}},
)


SERVICE = strict(type=one_of("ClusterIP", "NodePort", "LoadBalancer"), port=whole(1, 65535), annotations=MAP)


def pods(kind: str, **more: Any) -> dict[str, Any]:
    """What the services' sections have in common."""
    return strict(settings={"$ref": f"#/$defs/{kind}Settings"}, resources=RESOURCES, **more)


def services() -> dict[str, Any]:
    """The sections of the three services, and of what they serve."""
    return {
        "image": strict(
            repository=TEXT,
            tag=TEXT,
            digest={"type": "string", "pattern": "^(sha256:[0-9a-f]{64})?$"},
            pullPolicy=one_of("Always", "IfNotPresent", "Never"),
            pullSecrets=TEXTS,
        ),
        "model": strict(
            path={"type": "string", "pattern": "^[A-Za-z0-9][A-Za-z0-9._/-]*$"},
            sizeGiB=whole(1),
            readMiBs=whole(1),
            persistentVolumeClaim=TEXT,
            hostPath={"type": "string", "pattern": "^(/.*)?$"},
            init=strict(image=TEXT, command=TEXTS, args=TEXTS, envFromSecret=TEXT),
        ),
        "router": pods("router", replicas=whole(1), gpus=whole(0), maxSurge=whole(0), service=SERVICE),
        "expert": pods(
            "expert",
            mode=one_of("pods", "sidecars", "processes", "local"),
            apart=FLAG,
            shards=whole(1, 256),
            replicas=whole(1),
            planned=strict(enabled=FLAG, workers=whole(1), leaveSeconds=whole(0)),
            gpus=whole(0),
        ),
        "kv": pods("kv", enabled=FLAG, replicas=whole(1), storage=strict(sizeGiB=whole(0), storageClass=TEXT)),
    }


def surroundings() -> dict[str, Any]:
    """Where pods run, who may reach them, how they are watched and scaled."""
    return {
        "scheduling": strict(nodeSelector=MAP, tolerations=OBJECTS, runtimeClassName=TEXT, priorityClassName=TEXT, spread=TEXT),
        "shmSizeLimit": {"type": "string", "pattern": "^[0-9]+(Mi|Gi)$"},
        "tls": strict(existingSecret=TEXT, allowPlaintext=FLAG),
        "auth": strict(existingSecret=TEXT),
        "drain": strict(preStopSeconds=whole(0), seconds=whole(0)),
        "telemetry": strict(
            otlpEndpoint={"type": "string", "pattern": "^((https?://)?[^/:]+:[0-9]+)?$"},
            traceRatio={"type": "number", "minimum": 0, "maximum": 1},
            serviceMonitor=strict(enabled=FLAG, interval={"type": "string", "pattern": "^[0-9]+(s|m)$"}, labels=MAP),
        ),
        "autoscaling": strict(
            enabled=FLAG, minReplicas=whole(1), maxReplicas=whole(1), waitingPerReplica=whole(1), prometheusAddress=TEXT
        ),
        "networkPolicy": strict(enabled=FLAG, clients=OBJECTS, monitoring=OBJECTS),
        "podDisruptionBudget": strict(enabled=FLAG),
        "serviceAccount": strict(create=FLAG, name=TEXT, annotations=MAP),
        "podLabels": MAP,
        "podAnnotations": MAP,
        "clusterDomain": TEXT,
    }


def schema() -> dict[str, Any]:
    """The whole document."""
    own = {"global": {"type": "object"}}  # Helm's, for charts that include this one
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "Values of the Forefetch chart",
        "$comment": "Written by scripts/generate_chart_schema.py.",
        **strict(**own, **services(), **surroundings()),
        "$defs": {f"{service}Settings": settings(cls) for service, cls in SERVICES.items()},
    }


def text() -> str:
    """The file's contents."""
    return json.dumps(schema(), indent=1) + "\n"


if __name__ == "__main__":
    TARGET.write_text(text(), encoding="utf-8")
