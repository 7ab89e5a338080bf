"""Moves experts between workers while they serve: asks what each holds and how much it was used, plans, commands."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence

import numpy as np
import numpy.typing as npt

from expert_worker.client import Control, Holdings
from forefetch.errors import ForefetchError, StaleEpoch
from router_service import planner
from router_service.endpoints import Endpoint
from router_service.planner import Holder, Placement, Unit

log = logging.getLogger("forefetch.router.planner")

SETTLE_S = 2.0
"""Workers must be the same for so long before anything is planned: several usually come or go together."""
UNEVEN, GAIN = 1.25, 0.1
"""How much longer layers take than with even load (`planner.imbalance`) that is worth a plan, and what it has to take away."""
MEMORY = 0.98
"""Of an expert's load, what is remembered from one turn to the next: at a turn a second, half is forgotten in half a minute."""
LEAST = 20
"""Pairs per expert, in the mean, below which nothing is called uneven: a few tokens say little."""


class Reconciler:
    """One per router; acts while that one leads. `control(address)` gives the connection to a worker.

    layers: the model's MoE layers. experts: of each. copies, extra: see `planner.plan`."""

    def __init__(
        self,
        control: Callable[[str], Control],
        layers: Sequence[int],
        experts: int,
        *,
        copies: int,
        extra: int,
        rebalance_s: float,
        planner: str,
    ) -> None:
        self._control, self._layers, self._rebalance_s, self._planner = control, tuple(layers), rebalance_s, planner
        self._copies, self._extra = copies, extra
        self._members: frozenset[str] = frozenset()
        self._since = 0.0  # when the members last changed
        self._target: Placement | None = None
        self._planned_at = 0.0
        self._loads: npt.NDArray[np.float64] = np.zeros((len(layers), experts))
        self._counted: dict[str, npt.NDArray[np.float64]] = {}  # by worker, as it last said; -1 where it did not
        self._said: Placement = {}

    def turn(self, endpoints: Sequence[Endpoint], epoch: int, now: float, *, leads: bool, away: bool = False) -> bool:
        """One look and what follows from it. False when a worker knows a later planner than us.

        away: the API server cannot be asked, so a leader cannot stay one. It goes on to have lost experts loaded again, by its
        last plan and under its epoch, which a worker that heard of a later planner refuses; it plans and unloads nothing."""
        if not leads and not (away and self._target):
            self._target, self._members = None, frozenset()
            return True
        placed = {address: held for address, held in self._ask(endpoints).items() if held.capacity}
        if not placed:
            return True
        leaving = {endpoint.address for endpoint in endpoints if endpoint.leaving}
        holders = {address: Holder(_units(held), held.capacity, address in leaving) for address, held in placed.items()}
        if leads:
            self._count(placed)
            self._replan(holders, now)
        if self._target is None:
            return True
        commands = planner.moves(holders, self._target)
        if not leads:
            commands = {name: experts for name, experts in commands.items() if experts > holders[name].held}
        taken = [self._tell(address, experts, epoch) for address, experts in commands.items()]
        return all(taken)

    def _ask(self, endpoints: Sequence[Endpoint]) -> dict[str, Holdings]:
        """What each worker holds; one that does not answer is not counted on."""
        found: dict[str, Holdings] = {}
        for endpoint in endpoints:
            try:
                found[endpoint.address] = self._control(endpoint.address).holdings()
            except ForefetchError as error:
                log.debug("worker %s does not say what it holds: %s", endpoint.address, error)
        return found

    def _count(self, placed: Mapping[str, Holdings]) -> None:
        """Pairs since the last turn, by expert, over all workers; older ones fade."""
        self._loads *= MEMORY
        counted: dict[str, npt.NDArray[np.float64]] = {}
        for address in placed:
            now, before = self._pairs(address), self._counted.get(address)
            if now is None:
                continue
            counted[address] = now
            if before is not None:
                since = np.where(now >= before, now - before, now)  # one that was started again counts from zero
                self._loads += np.where((now >= 0) & (before >= 0), since, 0)
        self._counted = counted

    def _pairs(self, address: str) -> npt.NDArray[np.float64] | None:
        """[L, E] as a worker counts them, -1 where it names no expert."""
        pairs = np.full(self._loads.shape, -1.0)
        try:
            for layer, experts in self._control(address).pairs().items():
                pairs[self._layers.index(layer), list(experts)] = list(experts.values())
        except ForefetchError:
            return None
        return pairs

    def _replan(self, holders: dict[str, Holder], now: float) -> None:
        """Plans when the workers are others than those planned for, or are used unevenly; not while they come and go."""
        members = frozenset(name for name, holder in holders.items() if not holder.leaving)
        if members != self._members:
            self._members, self._since = members, now
        if now - self._since < SETTLE_S:
            return
        if self._target is None or members != frozenset(self._target):
            self._adopt(planner.plan(holders, self._by_layer(), self._copies, self._extra), holders)
        elif 0 < self._rebalance_s <= now - self._planned_at and self._loads.mean() >= LEAST:
            better = self._better(holders)
            if better is not None:
                self._adopt(better, holders)
        else:
            return
        self._planned_at = now

    def _better(self, holders: dict[str, Holder]) -> Placement | None:
        """A plan that is worth its moves, if the load is uneven."""
        loads = self._by_layer()
        uneven = planner.imbalance(holders, loads)
        if uneven <= UNEVEN:
            return None
        target = planner.plan(holders, loads, self._copies, self._extra)
        then = planner.imbalance({name: Holder(experts, len(experts)) for name, experts in target.items()}, loads)
        log.info("layers take %.2f times as long as with even load; another placement: %.2f", uneven, then)
        return target if then <= uneven - GAIN else None

    def _adopt(self, target: Placement, holders: dict[str, Holder]) -> None:
        self._target = target
        for name, experts in target.items():
            held = holders[name].held
            log.info("plan: %s to hold %d experts, %d of them new", name, len(experts), len(experts - held))

    def _by_layer(self) -> planner.Loads:
        return dict(zip(self._layers, self._loads.tolist(), strict=True))

    def _tell(self, address: str, experts: frozenset[Unit], epoch: int) -> bool:
        if self._said.get(address) != experts:
            log.info("worker %s: hold %d experts", address, len(experts))
        layers: dict[int, list[int]] = {}
        for layer, expert in sorted(experts):
            layers.setdefault(layer, []).append(expert)
        try:
            self._control(address).place(epoch, self._planner, layers)
        except StaleEpoch as error:
            log.warning("another router plans: %s", error)
            self._target = None
            return False
        except ForefetchError as error:
            log.warning("worker %s did not take a command: %s", address, error)
            return True
        self._said[address] = experts
        return True


def _units(held: Holdings) -> frozenset[Unit]:
    return frozenset((layer, expert) for layer, experts in held.layers.items() for expert in experts)
