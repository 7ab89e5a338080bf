"""Which worker holds which experts, followed and planned; the same for workers that a cluster lists and for those of a list.

Two threads: one asks workers what they hold by now and has the table follow, one plans while this router leads. None is needed
for a step: without them the table stays as it is.
"""

from __future__ import annotations

import logging
import secrets
import socket
import threading
from collections.abc import Sequence
from dataclasses import replace
from time import monotonic, time
from typing import Protocol

from expert_worker.client import Control
from forefetch import rpc
from forefetch.errors import ForefetchError
from router_service.config import RouterConfig
from router_service.endpoints import Endpoint
from router_service.reconciler import Reconciler
from router_service.workers import Workers

log = logging.getLogger("forefetch.router.planner")

LOOK_S = 0.5
"""How often workers are asked what they hold."""


class Lead(Protocol):
    """Whether this router may command workers."""

    @property
    def leads(self) -> bool:
        """Now."""
        ...

    @property
    def epoch(self) -> int:
        """What rides on commands. Whoever leads later has a higher one."""
        ...

    @property
    def away(self) -> bool:
        """Nobody can be asked who leads."""
        ...

    def turn(self) -> None:
        """Finds out. Raises nothing."""
        ...

    def lost(self) -> None:
        """A worker knows of a later one."""
        ...


class Alone:
    """A `Lead` without anybody to ask: leads from its start until a worker knows of a router that was started later."""

    away = False

    def __init__(self) -> None:
        self.leads, self.epoch = True, int(time() * 1000)

    def turn(self) -> None:
        """There is nobody to ask."""

    def lost(self) -> None:
        """For good."""
        self.leads = False


def identity() -> str:
    """Of this process, also between two starts of one pod."""
    return f"{socket.gethostname()}-{secrets.token_hex(4)}"


class Placing:
    """At work once it is made; `take` says who the workers are."""

    def __init__(self, config: RouterConfig, workers: Workers, lead: Lead, name: str, every_s: float = 1.0) -> None:
        self._workers, self._lead, self._name, self._every_s = workers, lead, name, every_s
        self._tls = rpc.tls_of(config)
        self._controls: dict[str, Control] = {}
        self._guard = threading.Lock()
        self._endpoints: Sequence[Endpoint] = ()
        self._stopped = threading.Event()
        self.reconciler = Reconciler(
            self.control,
            workers.spec.moe_layers,
            workers.spec.num_experts,
            copies=config.expert_copies,
            extra=config.expert_extra,
            rebalance_s=config.rebalance_s,
            planner=name,
        )
        for body in (self._look, self._plan):
            threading.Thread(target=body, name=body.__name__.strip("_"), daemon=True).start()

    def take(self, endpoints: Sequence[Endpoint]) -> None:
        """From now on these. Any thread."""
        self._endpoints = endpoints
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
                    held = self.control(worker.address).holdings(self._name, known.generation)
                except ForefetchError:
                    continue  # the link itself notices when a worker is gone
                if held.instance_id == known.instance_id and held.generation > known.generation:
                    self._workers.holds(link, replace(known, layers=held.layers, generation=held.generation))

    def _plan(self) -> None:
        lead = self._lead
        while not self._stopped.wait(self._every_s):
            lead.turn()
            try:
                if not self.reconciler.turn(self._endpoints, lead.epoch, monotonic(), leads=lead.leads, away=lead.away):
                    lead.lost()
            except Exception:
                log.exception("defect while planning")

    def close(self) -> None:
        """Ends the threads at their next turn and closes connections."""
        self._stopped.set()
        with self._guard:
            for control in self._controls.values():
                control.close()


def planned_list(config: RouterConfig, workers: Workers) -> Placing:
    """For the workers that --workers lists."""
    placing = Placing(config, workers, Alone(), identity())
    placing.take([Endpoint(address) for address in config.addresses()])
    return placing
