"""Values of deploy/chart that run what `forefetch plan` was asked for. Pure."""

from __future__ import annotations

from typing import Any

from forefetch.plan import ELEMENT_BYTES, GIB, Fit, Wanted, sizes
from forefetch.spec import ModelSpec

MODES = {"local": "local", "p2p": "processes", "shm": "sidecars", "grpc": "pods"}
"""Link -> where the chart puts workers that are reached over it."""


def chart_values(spec: ModelSpec, wanted: Wanted, placed: Fit, *, model: str, gpu: bool) -> dict[str, Any]:
    """Sizes with a fifth to spare, rounded up."""
    size, mode = sizes(spec, wanted), MODES[wanted.link]
    slots = "100%" if placed.slots == size.experts else f"{100 * placed.slots / size.experts:.0f}%"
    rounded = {} if wanted.trunk_format == "stored" else {"trunk": wanted.trunk_format}
    stored = {"experts": wanted.expert_format} if wanted.expert_format in ("int8", "int4") else {}
    router = {**_router(spec, wanted, size.kv_stream), **rounded}
    device = {} if mode == "processes" else {"device": "cuda" if gpu else "cpu"}
    own, each = 4 * GIB + (0 if gpu else placed.router), 4 * GIB + _host(wanted, placed, gpu)
    gpus = {"gpus": 1} if gpu else {}
    expert: dict[str, Any] = {"mode": mode}
    if mode == "local":
        router |= {"slots": slots, **stored}
        own += placed.host
    elif mode == "processes":
        router |= stored
        expert |= {"apart": placed.shares == wanted.workers, "settings": {"slots": slots}}
        gpus, own = {"gpus": wanted.workers + 1}, own + wanted.workers * each
    else:
        router |= {"link": wanted.link, **stored}
        settings = {**device, "slots": slots, **stored}
        expert |= {"shards": wanted.workers, "settings": settings, **gpus, "resources": _resources(each)}
    return {
        "model": {"path": model, "sizeGiB": max(1, _up((size.trunk + _stored(spec)) / GIB, 1))},
        "router": {"settings": {**device, **router}, **gpus, "resources": _resources(own)},
        "expert": expert,
    }


def _router(spec: ModelSpec, wanted: Wanted, kv_stream: float) -> dict[str, Any]:
    return {
        "max_batch": wanted.batch,
        "max_step_tokens": max(512, 2 * wanted.batch),
        "max_context": wanted.context,
        "kv_memory_mb": _up(wanted.batch * kv_stream / 2**20, 256),
        "kv_format": "auto" if wanted.kv_format == spec.dtype else wanted.kv_format,
    }


def _host(wanted: Wanted, placed: Fit, gpu: bool) -> float:
    """Bytes of host memory for one worker's experts."""
    return placed.host / max(1, wanted.workers) + (0 if gpu else placed.worker)


def _stored(spec: ModelSpec) -> float:
    """Bytes of the experts in the checkpoint."""
    return 3.0 * spec.hidden_size * spec.expert_width * len(spec.moe_layers) * spec.num_experts * ELEMENT_BYTES[spec.dtype]


def _resources(need: float) -> dict[str, Any]:
    """Requests and limits for so many bytes of host memory."""
    ask = _up(need / GIB, 1)
    return {"requests": {"cpu": "4", "memory": f"{ask}Gi"}, "limits": {"memory": f"{_up(1.2 * ask, 1)}Gi"}}


def _up(number: float, unit: int) -> int:
    """Rounded up to a multiple."""
    return -int(-number // unit) * unit
