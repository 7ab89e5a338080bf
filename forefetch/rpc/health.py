"""What a process says of itself over grpc.health.v1, name by name.

| name | SERVING when | who asks |
|---|---|---|
| `startup` | it has loaded what it serves | a startup probe, sized by the model |
| `liveness` | its work moves, or there is none | a liveness probe; a restart is the remedy |
| `readiness`, "", the service's name | calls are welcome: loaded, not draining, able to serve | load balancers, clients |

`--health-listen` serves these names, and nothing else, without TLS: the kubelet's gRPC probes know no certificates.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any


def _always() -> bool:
    return True


@dataclass(frozen=True)
class Vitals:
    """What a service knows of its own state; asked a few times a second, from the thread that serves.

    ready: it could serve a call now (a router: every expert has a worker). alive: its work moves, see `Pulse`."""

    ready: Callable[[], bool] = _always
    alive: Callable[[], bool] = _always


class Pulse:
    """Whether work moves: False when `progress` has stood still for `limit_s` seconds while `busy` all along.

    A long queue is no illness and neither is idleness; only work that has begun and does not move is."""

    def __init__(
        self,
        progress: Callable[[], int],
        busy: Callable[[], bool],
        limit_s: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._progress, self._busy, self._limit_s, self._clock = progress, busy, limit_s, clock
        self._seen, self._since = progress(), clock()

    def __call__(self) -> bool:
        """The verdict of this moment."""
        seen, now = self._progress(), self._clock()
        if seen != self._seen or not self._busy():
            self._seen, self._since = seen, now
        return now - self._since <= self._limit_s


class States:
    """The names and what was last said about each. `loaded` and `accepting` are set by the server that owns it."""

    def __init__(self, name: str, vitals: Vitals) -> None:
        self.loaded = self.accepting = False
        self._name, self._vitals = name, vitals
        self._said: dict[str, bool] = {}

    def changes(self) -> Iterator[tuple[str, Any]]:
        """(name, ServingStatus) of every name whose state is another than last time."""
        from grpc_health.v1.health_pb2 import HealthCheckResponse

        welcome = self.accepting and self._vitals.ready()
        now = {"startup": self.loaded, "liveness": self._vitals.alive()}
        for name, serving in {**now, "": welcome, self._name: welcome, "readiness": welcome}.items():
            if self._said.get(name) is not serving:
                self._said[name] = serving
                yield name, HealthCheckResponse.SERVING if serving else HealthCheckResponse.NOT_SERVING
