"""Which worker should hold which shards of the experts, and the next safe move towards it. Pure.

Greedy: heaviest shard first, to a worker that already holds it if that one is not too full already, else to the least loaded
one. A shard that is heavier than a worker's fair share gets several holders. Staying put is worth `SLACK` of imbalance, since a
move costs the load of a shard.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import ceil

SLACK = 0.15
"""A holder keeps a shard while its load stays within this share of the fair one."""

Placement = dict[str, frozenset[int]]


@dataclass(frozen=True)
class Holder:
    """A worker: the shards it serves now, how many it may hold, and whether it is about to go."""

    held: frozenset[int]
    capacity: int
    leaving: bool = False


def plan(holders: Mapping[str, Holder], loads: Sequence[float], copies: int = 1) -> Placement:
    """Worker -> shards it should hold. loads: one per shard, in any unit; all equal (also all zero) means no preference.

    Each shard gets at least `copies` holders, or as many as there are workers. With too little capacity the lightest shards go
    without. Workers that leave are given nothing.
    """
    staying = {name: holder for name, holder in sorted(holders.items()) if not holder.leaving}
    if not staying:
        return {}
    floor = max(loads, default=0.0) / 100 or 1.0  # a shard that nobody used lately still has to lie somewhere
    weights = [max(load, floor) for load in loads]
    fair = sum(weights) / len(staying)
    target: dict[str, set[int]] = {name: set() for name in staying}
    filled = dict.fromkeys(staying, 0.0)
    for round_ in range(len(staying)):  # every shard once before any gets a second holder
        for shard in sorted(range(len(weights)), key=lambda s: (-weights[s], s)):
            wanted = min(len(staying), max(copies, ceil(weights[shard] / fair - SLACK)))
            if round_ < wanted:
                weight = weights[shard] / wanted
                name = _choose(shard, weight, staying, target, filled, fair)
                if name is not None:
                    target[name].add(shard)
                    filled[name] += weight
    return {name: frozenset(shards) for name, shards in target.items()}


def _choose(
    shard: int,
    weight: float,
    staying: Mapping[str, Holder],
    target: Mapping[str, set[int]],
    filled: Mapping[str, float],
    fair: float,
) -> str | None:
    free = [name for name, holder in staying.items() if shard not in target[name] and len(target[name]) < holder.capacity]
    if not free:
        return None
    keepers = [name for name in free if shard in staying[name].held and filled[name] + weight <= fair * (1 + SLACK)]
    return min(keepers or free, key=lambda name: (filled[name], shard not in staying[name].held, name))


def moves(holders: Mapping[str, Holder], target: Placement) -> Placement:
    """The next command of each worker that needs one: the exact shards it is to hold.

    First everybody loads what is missing. Only when nothing is missing any more do workers unload, and only what a worker whose
    it is to be serves already. A worker that leaves is not commanded: it goes by itself.
    """
    known = {name: shards for name, shards in target.items() if name in holders}
    lacking = {name: shards for name, shards in known.items() if shards - holders[name].held}
    if lacking:
        grown = {name: _grow(name, holders, target) for name in lacking}
        return {name: shards for name, shards in grown.items() if shards != holders[name].held}
    commands: Placement = {}
    for name in known:
        safe = _spare(name, holders, target)
        if safe:
            commands[name] = holders[name].held - safe
    return commands


def _spare(name: str, holders: Mapping[str, Holder], target: Placement) -> frozenset[int]:
    """What a worker may unload: not its own to be, and served by one whose it is to be."""
    kept = [shards & holders[other].held for other, shards in target.items() if other != name and other in holders]
    extra = holders[name].held - target.get(name, frozenset())
    return frozenset(shard for shard in extra if any(shard in shards for shards in kept))


def _grow(name: str, holders: Mapping[str, Holder], target: Placement) -> frozenset[int]:
    """What it holds and what it should; where both are too much, what it may spare goes, and what has no room waits."""
    holder, spare = holders[name], _spare(name, holders, target)
    keep = holder.held - spare
    wanted = sorted(target[name] - holder.held)[: max(0, holder.capacity - len(keep))]
    room = holder.capacity - len(keep) - len(wanted)
    return keep | frozenset(wanted) | frozenset(sorted(spare)[: max(0, room)])


def imbalance(holders: Mapping[str, Holder], loads: Sequence[float]) -> float:
    """The busiest worker's load over the mean; 1 is even. A shard's load is spread over those that hold it."""
    staying = [holder for holder in holders.values() if not holder.leaving]
    total = sum(loads)
    if not staying or total <= 0:
        return 1.0
    counts = [sum(shard in holder.held for holder in staying) or 1 for shard in range(len(loads))]
    busiest = max(sum(loads[shard] / counts[shard] for shard in holder.held) for holder in staying)
    return busiest * len(staying) / total
