"""Which worker should hold which experts, and the next safe move towards it. Pure.

Layer by layer, since every layer waits for its busiest worker: `forefetch/placement.py` says how many holders each expert gets
and packs them. An expert that is heavier than a worker's fair share gets several holders by itself.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import ceil

from forefetch.placement import SLACK, copies_of, pack

Unit = tuple[int, int]
"""(layer, expert)."""
Loads = Mapping[int, Sequence[float]]
"""MoE layer -> load of each expert, in any unit; all equal (also all zero) means no preference."""
Placement = dict[str, frozenset[Unit]]


@dataclass(frozen=True)
class Holder:
    """A worker: the experts it serves now, how many it may hold, and whether it is about to go."""

    held: frozenset[Unit]
    capacity: int
    leaving: bool = False


def plan(holders: Mapping[str, Holder], loads: Loads, copies: int = 1, extra: int = 0) -> Placement:
    """Worker -> experts it should hold.

    Each expert gets at least `copies` holders, or as many as there are workers; with `extra`, so many places per layer and
    worker go to more holders of the hottest. With too little capacity, which is shared out evenly over layers, replicas and
    then the least used go without. Workers that leave are given nothing.
    """
    staying = {name: holder for name, holder in sorted(holders.items()) if not holder.leaving}
    if not staying or not loads:
        return {}
    target: dict[str, set[Unit]] = {name: set() for name in staying}
    held = {name: _by_layer(holder.held) for name, holder in staying.items()}
    for place, (layer, load) in enumerate(sorted(loads.items())):
        floor = max(load, default=0.0) / 100 or 1.0  # an expert that nobody used lately still has to lie somewhere
        rooms = [_room(holder.capacity, place, len(loads)) for holder in staying.values()]
        now = [held[name].get(layer, set()) for name in staying]
        packed = _layer([max(one, floor) for one in load], rooms, now, copies, extra)
        for name, experts in zip(target, packed, strict=True):
            target[name] |= {(layer, expert) for expert in experts}
    return {name: frozenset(experts) for name, experts in target.items()}


def _by_layer(held: frozenset[Unit]) -> dict[int, set[int]]:
    layers: dict[int, set[int]] = {}
    for layer, expert in held:
        layers.setdefault(layer, set()).add(expert)
    return layers


def _room(capacity: int, place: int, layers: int) -> int:
    """Places of a worker for the layer at `place`."""
    return capacity // layers + (place < capacity % layers)


def _layer(weights: Sequence[float], rooms: Sequence[int], now: Sequence[set[int]], copies: int, extra: int) -> list[set[int]]:
    workers, room = len(rooms), sum(rooms)
    wanted = len(weights) * min(copies, workers) + extra * workers
    counts = copies_of(weights, workers, min(room, wanted), copies)
    fair, left = sum(weights) / workers, room - sum(counts)
    for expert in sorted(range(len(weights)), key=lambda expert: -weights[expert]):
        more = min(workers, ceil(weights[expert] / fair - SLACK)) - counts[expert]
        if more <= 0 or left <= 0:
            continue
        counts[expert] += min(more, left)
        left -= min(more, left)
    return pack(weights, counts, rooms, now)


def moves(holders: Mapping[str, Holder], target: Placement) -> Placement:
    """The next command of each worker that needs one: the exact experts it is to hold.

    First everybody loads what is missing. Only when nothing is missing any more do workers unload, and only what a worker whose
    it is to be serves already. A worker that leaves is not commanded: it goes by itself.
    """
    known = {name: experts for name, experts in target.items() if name in holders}
    lacking = {name: experts for name, experts in known.items() if experts - holders[name].held}
    if lacking:
        grown = {name: _grow(name, holders, target) for name in lacking}
        return {name: experts for name, experts in grown.items() if experts != holders[name].held}
    commands: Placement = {}
    for name in known:
        safe = _spare(name, holders, target)
        if safe:
            commands[name] = holders[name].held - safe
    return commands


def _spare(name: str, holders: Mapping[str, Holder], target: Placement) -> frozenset[Unit]:
    """What a worker may unload: not its own to be, and served by one whose it is to be."""
    kept: set[Unit] = set()
    for other, experts in target.items():
        if other != name and other in holders:
            kept |= experts & holders[other].held
    return (holders[name].held - target.get(name, frozenset())) & kept


def _grow(name: str, holders: Mapping[str, Holder], target: Placement) -> frozenset[Unit]:
    """What it holds and what it should; where both are too much, what it may spare goes, and what has no room waits."""
    holder, spare = holders[name], _spare(name, holders, target)
    keep = holder.held - spare
    wanted = sorted(target[name] - holder.held)[: max(0, holder.capacity - len(keep))]
    room = holder.capacity - len(keep) - len(wanted)
    return keep | frozenset(wanted) | frozenset(sorted(spare)[: max(0, room)])


def imbalance(holders: Mapping[str, Holder], loads: Loads) -> float:
    """How long layers take over how long they would if workers shared their loads evenly; 1 is even. An expert's load is spread
    over those that hold it."""
    staying = [holder for holder in holders.values() if not holder.leaving]
    total = sum(map(sum, loads.values()))
    if not staying or total <= 0:
        return 1.0
    counts: dict[Unit, int] = {}
    for holder in staying:
        for unit in holder.held:
            counts[unit] = counts.get(unit, 0) + 1
    busiest = dict.fromkeys(loads, 0.0)
    for holder in staying:
        mine = dict.fromkeys(loads, 0.0)
        for layer, expert in holder.held:
            mine[layer] += loads[layer][expert] / counts[layer, expert]
        busiest = {layer: max(most, mine[layer]) for layer, most in busiest.items()}
    return sum(busiest.values()) * len(staying) / total
