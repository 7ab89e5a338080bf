"""Follows the workers of a Service, keeps the router's table up to date, and stands for election as planner.

One thread lists and watches; the two of `placing.py` ask workers what they hold, and mind the Lease and the placement. None of
them is needed for a step: without them the table stays as it is.
"""

from __future__ import annotations

import datetime
import logging
import threading
from collections.abc import Callable, Sequence
from time import monotonic
from typing import Any

from router_service.config import RouterConfig
from router_service.election import Election, Record
from router_service.endpoints import Endpoint, read_slices
from router_service.kubernetes_api import ApiAway, Conflict, Expired, Json, KubernetesApi
from router_service.placing import Placing, identity
from router_service.workers import Workers

log = logging.getLogger("forefetch.router.discovery")

FIRST_PAUSE_S, LAST_PAUSE_S = 0.1, 10.0
"""After an API server that could not be reached."""


class Informer:
    """The endpoints of a Service: listed, watched, and listed again when a watch cannot go on. `follow` runs until `stop`."""

    def __init__(
        self, api: KubernetesApi, service: str, timeout_s: float, publish: Callable[[Sequence[Endpoint]], None]
    ) -> None:
        self._api, self._service, self._timeout_s, self._publish = api, service, timeout_s, publish
        self._slices: dict[str, Json] = {}
        self._last: Sequence[Endpoint] | None = None
        self._stopped = threading.Event()
        self.away = False

    def stop(self) -> None:
        """Ends `follow` at its next turn."""
        self._stopped.set()

    def follow(self) -> None:
        """Keeps what was last known while the API server is away."""
        pause = FIRST_PAUSE_S
        while not self._stopped.is_set():
            try:
                version = self._list()
                pause = FIRST_PAUSE_S
                while not self._stopped.is_set():
                    version = self._watch(version)
            except Expired:
                continue
            except ApiAway as error:
                if not self.away:
                    log.warning("the API server is away (%s); the workers stay as they are", error)
                self.away = True
            self._stopped.wait(pause)
            pause = min(2 * pause, LAST_PAUSE_S)

    def _list(self) -> str:
        slices, version = self._api.slices(self._service)
        if self.away:
            log.info("the API server is back")
        self.away = False
        self._slices = {thing["metadata"]["name"]: thing for thing in slices}
        self._tell()
        return version

    def _watch(self, version: str) -> str:
        """Takes changes in until the watch ends; the version to go on from."""
        for kind, thing in self._api.watch(self._service, version, self._timeout_s):
            version = str(thing["metadata"]["resourceVersion"])
            name = thing["metadata"].get("name", "")
            if kind == "DELETED":
                self._slices.pop(name, None)
            elif kind in ("ADDED", "MODIFIED"):
                self._slices[name] = thing
            self._tell()
            if self._stopped.is_set():
                break
        return version

    def _tell(self) -> None:
        """Slices are rewritten often; only another content is news."""
        endpoints = read_slices(self._slices.values())
        if endpoints != self._last:
            self._last = endpoints
            log.info("workers: %s", ", ".join(map(_shown, endpoints)) or "none")
            self._publish(endpoints)


def _shown(endpoint: Endpoint) -> str:
    return endpoint.address + (" (leaving)" if endpoint.leaving else "" if endpoint.serving else " (not ready)")


class Elector:
    """A `Lead` that minds a Lease. `turn` reads it and writes it if it is our turn to; nothing raises."""

    def __init__(self, api: KubernetesApi, lease: str, election: Election) -> None:
        self._api, self._lease, self.election = api, lease, election
        self.away = False

    @property
    def leads(self) -> bool:
        """Whether commands may be given now."""
        return self.election.leading(monotonic())

    @property
    def epoch(self) -> int:
        """What rides on commands while we lead."""
        return self.election.epoch

    def lost(self) -> None:
        """A worker has seen a higher epoch."""
        self.election.lost()

    def turn(self) -> None:
        """One look. A leader that cannot renew stops leading by its own clock."""
        try:
            found = self._api.lease(self._lease)
            action = self.election.decide(None if found is None else _record(found), monotonic())
            if action != "wait":
                self._write(action)
            self.away = False
        except Conflict:
            self.away = False
            self.election.lost()
        except ApiAway as error:
            if not self.away:
                log.warning("the Lease cannot be kept (%s); another router may plan", error)
            self.away = True

    def _write(self, action: Any) -> None:
        now, sent = datetime.datetime.now(datetime.UTC), monotonic()
        record = self.election.next_record(action, now.isoformat(timespec="microseconds").replace("+00:00", "Z"))
        spec = {
            "holderIdentity": record.holder,
            "leaseDurationSeconds": max(1, round(self.election.duration_s)),
            "renewTime": record.renewed,
            "leaseTransitions": record.transitions,
        }
        if action == "create":
            made = self._api.create_lease(self._lease, spec)
        else:
            made = self._api.replace_lease(self._lease, record.version, spec)
        if action != "renew":
            log.info("this router plans the placement now, epoch %d", record.transitions)
        self.election.written(_record(made), sent)


def _record(lease: Json) -> Record:
    spec = lease.get("spec") or {}
    version = str((lease.get("metadata") or {}).get("resourceVersion", ""))
    holder, renewed = str(spec.get("holderIdentity") or ""), str(spec.get("renewTime") or "")
    return Record(holder, renewed, int(spec.get("leaseTransitions") or 0), version)


class Discovery:
    """All of it for one router whose config names a Service; it is at work once it is made."""

    def __init__(self, config: RouterConfig, workers: Workers) -> None:
        """ConfigError without an API server."""
        namespace, service = config.service or ("", "")
        api = KubernetesApi(namespace, config.kube_api)
        self._workers, lease_s = workers, config.lease_s
        election = Election(identity(), lease_s, renew_s=lease_s / 4, margin_s=lease_s / 5)
        self.elector = Elector(api, f"{service}-planner", election)
        self.placing = Placing(config, workers, self.elector, election.identity, every_s=min(1.0, lease_s / 6))
        self.informer = Informer(api, service, config.kube_timeout_s, self._take)
        threading.Thread(target=self.informer.follow, name="informer", daemon=True).start()

    def _take(self, endpoints: Sequence[Endpoint]) -> None:
        self._workers.want(endpoints)
        self.placing.take(endpoints)

    def close(self) -> None:
        """Ends the threads at their next turn and closes connections."""
        self.informer.stop()
        self.placing.close()
