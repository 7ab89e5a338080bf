"""The few requests to a Kubernetes API server that a router makes, as JSON. Errors are ApiAway, Conflict and Expired.

Every request has a deadline, watches too: a connection whose other end has vanished says nothing for ever.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple

import urllib3
from kubernetes import client, config
from kubernetes.client.exceptions import ApiException

from forefetch.errors import ConfigError, ForefetchError, Unavailable

CALL_S = 5.0
"""Deadline of everything but watches, seconds."""
SERVICE_LABEL = "kubernetes.io/service-name"

Json = dict[str, Any]


class ApiAway(Unavailable):
    """The API server cannot be reached, or does not answer in time, or answers nonsense."""


class Conflict(ForefetchError):
    """Somebody else wrote first."""


class Expired(ForefetchError):
    """The API server has forgotten the version that a watch was to begin at: list again."""


class Event(NamedTuple):
    """One line of a watch. kind: ADDED, MODIFIED, DELETED, BOOKMARK."""

    kind: str
    thing: Json


class KubernetesApi:
    """Of one namespace. url "": the cluster that this pod runs in. ConfigError when there is none."""

    def __init__(self, namespace: str, url: str = "") -> None:
        settings = client.Configuration()
        if url:
            settings.host = url
        else:
            try:
                config.load_incluster_config(settings)  # type: ignore[no-untyped-call]
            except config.ConfigException:
                raise ConfigError("--workers kubernetes: this is no pod of a cluster; --kube-api names an API server") from None
        settings.retries = False
        self._namespace = namespace
        api = client.ApiClient(settings)
        # Answers are read here, as JSON: the client's types know nothing of that.
        self._slices: Any = client.DiscoveryV1Api(api)
        self._leases: Any = client.CoordinationV1Api(api)

    def slices(self, service: str) -> tuple[list[Json], str]:
        """The EndpointSlices of a Service, and the version that they are of."""
        with _errors():
            call, label = self._slices.list_namespaced_endpoint_slice, f"{SERVICE_LABEL}={service}"
            found = _read(call(self._namespace, label_selector=label, _preload_content=False, _request_timeout=CALL_S))
            return list(found.get("items") or ()), str(found["metadata"]["resourceVersion"])

    def watch(self, service: str, version: str, timeout_s: float) -> Iterator[Event]:
        """Changes after `version`. Ends when the server ends it, which it is asked to do before `timeout_s`; ApiAway when
        nothing at all came for so long. Expired when the version is too old."""
        with _errors():
            reply = self._slices.list_namespaced_endpoint_slice(
                self._namespace,
                label_selector=f"{SERVICE_LABEL}={service}",
                watch=True,
                allow_watch_bookmarks=True,
                resource_version=version,
                timeout_seconds=max(1, int(timeout_s * 0.8)),
                _preload_content=False,
                _request_timeout=(CALL_S, timeout_s),
            )
            try:
                for line in _lines(reply):
                    yield _event(json.loads(line))
            finally:
                reply.close()

    def lease(self, name: str) -> Json | None:
        """A Lease, None if there is none."""
        with _errors():
            try:
                return _read(
                    self._leases.read_namespaced_lease(name, self._namespace, _preload_content=False, _request_timeout=CALL_S)
                )
            except ApiException as error:
                if error.status == 404:
                    return None
                raise

    def create_lease(self, name: str, spec: Mapping[str, Any]) -> Json:
        """Conflict when there is one by now."""
        body = {"apiVersion": "coordination.k8s.io/v1", "kind": "Lease", "metadata": {"name": name}, "spec": spec}
        with _errors():
            call = self._leases.create_namespaced_lease
            return _read(call(self._namespace, body, _preload_content=False, _request_timeout=CALL_S))

    def replace_lease(self, name: str, version: str, spec: Mapping[str, Any]) -> Json:
        """Conflict when it is not of that version any more."""
        metadata = {"name": name, "namespace": self._namespace, "resourceVersion": version}
        body = {"apiVersion": "coordination.k8s.io/v1", "kind": "Lease", "metadata": metadata, "spec": spec}
        with _errors():
            call = self._leases.replace_namespaced_lease
            return _read(call(name, self._namespace, body, _preload_content=False, _request_timeout=CALL_S))


def _read(reply: Any) -> Json:
    try:
        value = json.loads(reply.data)
    finally:
        reply.release_conn()
    if not isinstance(value, dict):
        raise ValueError("not an object")
    return value


def _lines(reply: Any) -> Iterator[bytes]:
    """Lines of a body that arrives in pieces. What is left without a newline at the end was cut off, and is dropped."""
    rest = b""
    for piece in reply.stream(amt=None, decode_content=False):
        *lines, rest = (rest + piece).split(b"\n")
        yield from filter(None, lines)


def _event(line: Json) -> Event:
    thing = line["object"]
    if line["type"] == "ERROR":
        if thing.get("code") == 410:
            raise Expired(str(thing.get("message", "")))
        raise ApiAway(str(thing.get("message", "the watch failed")))
    return Event(str(line["type"]), thing)


@contextmanager
def _errors() -> Iterator[None]:
    try:
        yield
    except ApiException as error:
        if error.status == 409:
            raise Conflict("somebody else wrote first") from None
        if error.status == 410:
            raise Expired("the version is too old") from None
        raise ApiAway(f"status {error.status} {error.reason}") from None
    except (urllib3.exceptions.HTTPError, OSError) as error:
        raise ApiAway(type(error).__name__) from None
    except (ValueError, KeyError, TypeError) as error:
        raise ApiAway(f"an answer that makes no sense ({type(error).__name__})") from None
