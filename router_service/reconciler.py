"""Moves experts between workers while they serve: asks what each holds and how much it was used, plans, commands."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence

from expert_worker.client import Control, Holdings
from forefetch.errors import ForefetchError, StaleEpoch
from router_service import planner
from router_service.endpoints import Endpoint
from router_service.planner import Holder, Placement

log = logging.getLogger("forefetch.router.planner")

SETTLE_S = 2.0
"""Workers must be the same for so long before anything is planned: several usually come or go together."""
UNEVEN = 1.5
"""The busiest worker's load over the mean that is worth moving experts for."""
MEMORY = 0.98
"""Of a shard's load, what is remembered from one turn to the next: at a turn a second, half is forgotten in half a minute."""


class Reconciler:
    """One per router; acts while that one leads. `control(address)` gives the connection to a worker."""

    def __init__(self, control: Callable[[str], Control], *, copies: int, rebalance_s: float, planner: str) -> None:
        self._control, self._copies, self._rebalance_s, self._planner = control, copies, rebalance_s, planner
        self._members: frozenset[str] = frozenset()
        self._since = 0.0  # when the members last changed
        self._target: Placement | None = None
        self._planned_at = 0.0
        self._loads: list[float] = []
        self._counted: dict[tuple[str, int], int] = {}
        self._said: Placement = {}

    def turn(self, endpoints: Sequence[Endpoint], epoch: int, now: float, *, leads: bool, away: bool = False) -> bool:
        """One look and what follows from it. False when a worker knows a later planner than us.

        away: the API server cannot be asked, so a leader cannot stay one. It goes on to have lost shards loaded again, by its
        last plan and under its epoch, which a worker that heard of a later planner refuses; it plans and unloads nothing."""
        if not leads and not (away and self._target):
            self._target, self._members = None, frozenset()
            return True
        holdings = self._ask(endpoints)
        placed = {address: held for address, held in holdings.items() if held.capacity}
        if not placed:
            return True
        leaving = {endpoint.address for endpoint in endpoints if endpoint.leaving}
        holders = {a: Holder(frozenset(h.shards), h.capacity, a in leaving) for a, h in placed.items()}
        self._count(placed)
        if leads:
            self._replan(holders, now)
        if self._target is None:
            return True
        commands = planner.moves(holders, self._target)
        if not leads:
            commands = {name: shards for name, shards in commands.items() if shards > holders[name].held}
        taken = [self._tell(address, shards, epoch) for address, shards in commands.items()]
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

    def _count(self, placed: dict[str, Holdings]) -> None:
        """Pairs since the last turn, by shard, over all workers; older ones fade."""
        shards = max(held.of for held in placed.values())
        loads = [0.0] * shards
        counted: dict[tuple[str, int], int] = {}
        for address, held in placed.items():
            for shard, pairs in held.pairs.items():
                before = self._counted.get((address, shard), pairs)
                loads[shard] += pairs - before if pairs >= before else pairs  # it counts from zero when it was loaded again
                counted[address, shard] = pairs
        old = self._loads if len(self._loads) == shards else [0.0] * shards
        self._loads, self._counted = [MEMORY * a + b for a, b in zip(old, loads, strict=True)], counted

    def _replan(self, holders: dict[str, Holder], now: float) -> None:
        """Plans when the workers are others than those planned for, or are used unevenly; not while they come and go."""
        members = frozenset(name for name, holder in holders.items() if not holder.leaving)
        if members != self._members:
            self._members, self._since = members, now
        if now - self._since < SETTLE_S:
            return
        if self._target is not None and members == frozenset(self._target) and not self._uneven(holders, now):
            return
        self._target, self._planned_at = planner.plan(holders, self._loads, self._copies), now
        for name, shards in self._target.items():
            log.info("plan: %s to hold %s", name, sorted(shards))

    def _uneven(self, holders: dict[str, Holder], now: float) -> bool:
        due = self._rebalance_s > 0 and now - self._planned_at >= self._rebalance_s
        return due and planner.imbalance(holders, self._loads) > UNEVEN

    def _tell(self, address: str, shards: frozenset[int], epoch: int) -> bool:
        if self._said.get(address) != shards:
            log.info("worker %s: hold %s", address, sorted(shards))
        try:
            self._control(address).place(epoch, self._planner, sorted(shards))
        except StaleEpoch as error:
            log.warning("another router plans: %s", error)
            self._target = None
            return False
        except ForefetchError as error:
            log.warning("worker %s did not take a command: %s", address, error)
            return True
        self._said[address] = shards
        return True
