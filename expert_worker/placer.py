"""Experts that come and go while a worker runs: takes the planner's commands, loads and unloads in the background."""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterable
from dataclasses import replace
from time import monotonic

from expert_worker.core import Core
from expert_worker.evaluator import Placeable
from expert_worker.retiring import Retiring, Unit
from forefetch.errors import BadRequest, Mismatch, StaleEpoch

log = logging.getLogger("forefetch.expert")

RETRY_S = 5.0
"""Pause after an expert that could not be loaded."""
ANNOUNCE_S = 0.25
"""While more are being loaded, those that are there are named so often: each time has every router make its table anew."""
LOOK_S = 0.1
"""How often withdrawn experts are looked at."""


class Placer:
    """Moves a core towards what the latest command of the highest epoch names. Commands may come from any thread.

    An expert is *here* when it is evaluated, *named* when Describe says so. Between the two it arrives, or is withdrawn.
    """

    def __init__(self, core: Core) -> None:
        if not isinstance(core.experts, Placeable):
            raise Mismatch("this worker holds a fixed shard")
        self._core, self._experts = core, core.experts
        self.loaded = self.unloaded = 0
        self._here: set[Unit] = set()
        self._named: frozenset[Unit] = frozenset()
        self._wanted: frozenset[Unit] = frozenset()
        self._epoch = 0
        self._retiring = Retiring()
        self._named_at = self._again_at = 0.0
        self._changed = threading.Condition()
        self._closed = False
        self._thread = threading.Thread(target=self._work, name="placer", daemon=True)
        self._thread.start()

    def command(self, epoch: int, planner: str, experts: Iterable[Unit]) -> int:
        """Takes a command; how many are still to be loaded. StaleEpoch for an earlier planner's, BadRequest for what cannot
        be."""
        wanted, info = frozenset(experts), self._core.info
        if len(wanted) > info.capacity:
            raise BadRequest("experts", f"{len(wanted)} experts; this worker holds {info.capacity} at most (--max-experts)")
        if stray := [unit for unit in wanted if not self._experts.knows(*unit)]:
            raise BadRequest("experts", f"the model has no expert {stray[0][1]} of layer {stray[0][0]}")
        with self._changed:
            if epoch < self._epoch:
                raise StaleEpoch(f"epoch {epoch} of {planner} is over; epoch {self._epoch} commands here")
            if (epoch, wanted) != (self._epoch, self._wanted):
                log.info("epoch %d (%s): to hold %d experts", epoch, planner, len(wanted))
            self._epoch, self._wanted = epoch, wanted
            self._changed.notify()
            return len(wanted - self._here)

    def acknowledge(self, router: str, generation: int) -> None:
        """A router's table goes by this generation of what is named here. Any thread."""
        with self._changed:
            self._retiring.acknowledge(router, generation, monotonic())

    def close(self) -> None:
        """Ends the thread after what it is loading."""
        with self._changed:
            self._closed = True
            self._changed.notify()
        self._thread.join()

    # ---- the thread ----

    def _work(self) -> None:
        while True:
            with self._changed:
                while not self._closed and not self._pending():
                    self._changed.wait()
                if self._closed:
                    return
                wanted = self._wanted
                due = self._retiring.due(monotonic(), wanted)
            self._step(wanted, due)

    def _pending(self) -> bool:
        """Whether anything is to be done, now or soon."""
        return self._here != self._wanted or self._named != self._wanted

    def _step(self, wanted: frozenset[Unit], due: list[Unit]) -> None:
        """One change: what may go goes, then one that is missing comes; names what is here and wanted."""
        for unit in due:
            with self._core.turn:
                self._experts.drop(*unit)
            self._here.discard(unit)
            self.unloaded += 1
        missing = wanted - self._here
        if not missing or self._named - wanted or monotonic() - self._named_at > ANNOUNCE_S:
            self._name(wanted)
        if missing and self._experts.room and monotonic() >= self._again_at:
            self._load(min(missing))
        else:
            with self._changed:
                if self._wanted == wanted:
                    self._changed.wait(LOOK_S if self._pending() else None)

    def _load(self, unit: Unit) -> None:
        try:
            self._experts.put(*unit)
        except Exception:
            log.exception("expert %d of layer %d could not be loaded; trying again in %g s", *reversed(unit), RETRY_S)
            self._again_at = monotonic() + RETRY_S
            return
        self._here.add(unit)
        self.loaded += 1

    def _name(self, wanted: frozenset[Unit]) -> None:
        """What is here and wanted is named from now on, what is named and not wanted is withdrawn."""
        self._named_at = now = monotonic()
        named, info = frozenset(self._here & wanted), self._core.info
        generation = info.generation + (named != self._named)
        with self._changed:
            for unit in self._here - named:
                self._retiring.withdraw(unit, generation, now)
        if named != self._named:
            self._named = named
            self._core.info = replace(info, layers=by_layer(named), generation=generation)
            log.info("generation %d: %d experts are served", generation, len(named))


def by_layer(experts: Iterable[Unit]) -> dict[int, tuple[int, ...]]:
    """MoE layer -> its experts, ascending."""
    layers: dict[int, list[int]] = {}
    for layer, expert in sorted(experts):
        layers.setdefault(layer, []).append(expert)
    return {layer: tuple(found) for layer, found in layers.items()}
