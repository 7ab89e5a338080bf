"""Follows the workers of a Service, keeps the router's table up to date, and stands for election as planner.

Three threads: one lists and watches, one asks workers what they hold by now, one minds the Lease and, while
this router leads, the placement. None of them is needed for a step: without them the table stays as it is.
"""

from __future__ import annotations

import datetime
import logging
import secrets
import socket
import threading
from collections.abc import Callable, Sequence
from dataclasses import replace
from time import monotonic
from typing import Any

from expert_worker.client import Control
from forefetch import rpc
from forefetch.errors import ForefetchError
from router_service.config import RouterConfig
from router_service.election import Election, Record
from router_service.endpoints import Endpoint, read_slices
from router_service.kubernetes_api import ApiAway, Conflict, Expired, Json, KubernetesApi
from router_service.reconciler import Reconciler
from router_service.workers import Workers

log = logging.getLogger("forefetch.router.discovery")

FIRST_PAUSE_S, LAST_PAUSE_S = 0.1, 10.0
"""After an API server that could not be reached."""
LOOK_S = 0.5
"""How often workers are asked what they hold."""


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
    """Minds a Lease. `turn` reads it and writes it if it is our turn to; nothing raises."""

    def __init__(self, api: KubernetesApi, lease: str, election: Election) -> None:
        self._api, self._lease, self.election = api, lease, election
        self.away = False

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
        self._workers, self._tls = workers, rpc.tls_of(config)
        self._controls: dict[str, Control] = {}
        self._guard = threading.Lock()
        self._endpoints: Sequence[Endpoint] = ()
        self._stopped = threading.Event()
        self._lease_s = lease_s = config.lease_s
        identity = f"{socket.gethostname()}-{secrets.token_hex(4)}"
        election = Election(identity, lease_s, renew_s=lease_s / 4, margin_s=lease_s / 5)
        self.informer = Informer(api, service, config.kube_timeout_s, self._take)
        self.elector = Elector(api, f"{service}-planner", election)
        self._identity = identity
        self.reconciler = Reconciler(
            self.control,
            workers.spec.moe_layers,
            workers.spec.num_experts,
            copies=config.expert_copies,
            extra=config.expert_extra,
            rebalance_s=config.rebalance_s,
            planner=identity,
        )
        for name, body in (("informer", self.informer.follow), ("holdings", self._look), ("planner", self._plan)):
            threading.Thread(target=body, name=name, daemon=True).start()

    def _take(self, endpoints: Sequence[Endpoint]) -> None:
        self._endpoints = endpoints
        self._workers.want(endpoints)
        with self._guard:
            gone = set(self._controls) - {endpoint.address for endpoint in endpoints}
            for address in gone:
                self._controls.pop(address).close()

    def control(self, address: str) -> Control:
        """The connection over which a worker is asked and told; its own, so that it never waits behind frames."""
        with self._guard:
            if address not in self._controls:
                self._controls[address] = Control(address, self._tls)
            return self._controls[address]

    def _look(self) -> None:
        """Has the table follow what workers hold, and tells them which generation of that it goes by."""
        while not self._stopped.wait(LOOK_S):
            for worker in self._workers.known:
                link = worker.link
                if link is None or not link.info.capacity:
                    continue
                known = link.info
                try:
                    held = self.control(worker.address).holdings(self._identity, known.generation)
                except ForefetchError:
                    continue  # the link itself notices when a worker is gone
                if held.instance_id == known.instance_id and held.generation > known.generation:
                    self._workers.holds(link, replace(known, layers=held.layers, generation=held.generation))

    def _plan(self) -> None:
        election = self.elector.election
        while not self._stopped.wait(min(1.0, self._lease_s / 6)):
            self.elector.turn()
            try:
                leads = election.leading(monotonic())
                if not self.reconciler.turn(self._endpoints, election.epoch, monotonic(), leads=leads, away=self.elector.away):
                    election.lost()
            except Exception:
                log.exception("defect while planning")

    def close(self) -> None:
        """Ends the threads at their next turn and closes connections."""
        self._stopped.set()
        self.informer.stop()
        with self._guard:
            for control in self._controls.values():
                control.close()
