"""EndpointSlices, as the API server gives them in JSON, read into the workers of a Service. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, order=True)
class Endpoint:
    """A worker as the cluster sees it. `address` is host:port.

    serving: its readiness probe passes (with a Service that publishes unready addresses, `ready` would say nothing).
    leaving: it terminates; it may serve a little longer and must not be given anything new."""

    address: str
    serving: bool = True
    leaving: bool = False


def read_slices(slices: Iterable[Mapping[str, Any]], port: str = "grpc") -> tuple[Endpoint, ...]:
    """The endpoints of a Service's slices, by address.

    An endpoint may be in two slices while one is rewritten: the better state counts, so that none is missed for a moment.
    Slices without the named port have no address of ours.
    """
    found: dict[str, Endpoint] = {}
    for one in slices:
        number = next((p.get("port") for p in one.get("ports") or () if p.get("name") == port), None)
        for entry in one.get("endpoints") or () if number else ():
            endpoint = _endpoint(one, entry, int(number or 0))
            known = found.get(endpoint.address)
            if known is None or _worth(endpoint) > _worth(known):
                found[endpoint.address] = endpoint
    return tuple(sorted(found.values()))


def _endpoint(one: Mapping[str, Any], entry: Mapping[str, Any], port: int) -> Endpoint:
    conditions = entry.get("conditions") or {}
    ready = conditions.get("ready")  # unset means ready, says the API
    serving = conditions.get("serving")
    state = (ready is not False) if serving is None else bool(serving)
    return Endpoint(f"{_host(one, entry)}:{port}", state, bool(conditions.get("terminating")))


def _host(one: Mapping[str, Any], entry: Mapping[str, Any]) -> str:
    """A StatefulSet's pod by its stable name, which certificates can carry; else its address."""
    metadata = one.get("metadata") or {}
    service = (metadata.get("labels") or {}).get("kubernetes.io/service-name")
    if entry.get("hostname") and service and metadata.get("namespace"):
        return f"{entry['hostname']}.{service}.{metadata['namespace']}.svc"
    address = str(entry["addresses"][0])
    return f"[{address}]" if ":" in address else address


def _worth(endpoint: Endpoint) -> tuple[bool, bool]:
    return not endpoint.leaving, endpoint.serving
