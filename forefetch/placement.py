"""Which worker holds which experts: equal shards, or a plan made from measured load. Pure.

Places beyond one for each expert go to replicas: again and again to the expert with the highest load per replica. Then replicas
are packed, heaviest first, each onto the worker with the least load so far that has a place left and not the same expert
already. `plan` makes a file of it, with as many places on every worker; `router_service/planner.py` does the same while workers
run, where an expert stays with who holds it as long as that is even enough.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from itertools import pairwise
from typing import Any

from forefetch.errors import ConfigError

Shard = dict[int, tuple[int, ...]]
"""MoE layer -> the experts of it that a worker holds, ascending."""

SLACK = 0.15
"""A holder keeps an expert while its load stays within this share of the fair one: a move costs reading the expert again."""

_KEY, _VERSION = "forefetch placement", 1


def shard_of(num_experts: int, shards: int) -> tuple[tuple[int, ...], ...]:
    """The experts of each shard: contiguous ranges in order whose sizes differ by at most one, larger ones first.

    `shards` need not divide `num_experts`. Raises ConfigError for less than one shard or more shards than experts.
    """
    if shards < 1:
        raise ConfigError(f"--shards: must be at least 1, got {shards}")
    if shards > num_experts:
        raise ConfigError(f"--shards: {shards} shards for {num_experts} experts would leave a worker without experts")
    size, larger = divmod(num_experts, shards)
    starts = [shard * size + min(shard, larger) for shard in range(shards + 1)]
    return tuple(tuple(range(start, end)) for start, end in pairwise(starts))


def plan(loads: Mapping[int, Sequence[float]], workers: int, extra: int = 0) -> list[Shard]:
    """MoE layer -> load of each expert (any unit), and places per layer and worker beyond what one copy of each takes.

    Returns each worker's shard. ConfigError for fewer experts than workers, or more places than experts to put there.
    """
    shards: list[Shard] = [{} for _ in range(workers)]
    for layer, load in loads.items():
        places = -(-len(load) // max(workers, 1)) + extra
        if not 0 < workers <= len(load):
            raise ConfigError(f"--workers: {workers} workers for {len(load)} experts of a layer cannot be")
        if extra < 0 or places > len(load):
            raise ConfigError(f"--extra: {places} places on each worker for {len(load)} experts cannot be")
        packed = pack(load, copies_of(load, workers, workers * places), [places] * workers)
        for shard, held in zip(shards, packed, strict=True):
            shard[layer] = tuple(sorted(held))
    return shards


def copies_of(load: Sequence[float], workers: int, places: int, least: int = 1) -> list[int]:
    """Replicas of each expert of a layer: `least` of each as far as `places` in all go, the heaviest first; what is left goes
    to the highest load per replica. At most one on each worker."""
    order = sorted(range(len(load)), key=lambda expert: (-load[expert], expert))
    copies = [0] * len(load)
    for expert in order * min(least, workers):
        copies[expert] += places > 0
        places -= 1
    for _ in range(places):
        growing = [expert for expert in order if 0 < copies[expert] < workers]
        if not growing:
            break
        copies[max(growing, key=lambda expert: (load[expert] / copies[expert], -expert))] += 1
    return copies


def pack(
    load: Sequence[float], copies: Sequence[int], rooms: Sequence[int], now: Sequence[Collection[int]] = ()
) -> list[set[int]]:
    """The experts of a layer for each worker. rooms: places of each. now: what each holds, and keeps if that is even enough."""
    now = now or [()] * len(rooms)
    held: list[set[int]] = [set() for _ in rooms]
    carried = [0.0] * len(rooms)
    fair = sum(load) / max(len(rooms), 1) * (1 + SLACK)
    for expert in sorted(range(len(load)), key=lambda expert: (-load[expert] / max(copies[expert], 1), expert)):
        share = load[expert] / max(copies[expert], 1)
        for _ in range(copies[expert]):
            free = [w for w, each in enumerate(held) if len(each) < rooms[w] and expert not in each]
            if not free:
                _make_room(held, carried, load, copies, expert, rooms)
                continue
            keeping = [worker for worker in free if expert in now[worker] and carried[worker] + share <= fair]
            worker = min(keeping or free, key=lambda worker: (carried[worker], expert not in now[worker], worker))
            held[worker].add(expert)
            carried[worker] += share
    return held


def _make_room(
    held: list[set[int]],
    carried: list[float],
    load: Sequence[float],
    copies: Sequence[int],
    expert: int,
    rooms: Sequence[int],
) -> None:
    """All workers with a place left hold `expert` already: one of them takes an expert over from one that does not. Where none
    can, the replica goes without."""
    takers = [worker for worker, each in enumerate(held) if len(each) < rooms[worker]]
    givers = [worker for worker, each in enumerate(held) if expert not in each and rooms[worker]]
    pairs = [(giver, taker) for giver in givers for taker in takers[:1] if held[giver] - held[taker]]
    if not pairs:
        return
    giver, taker = min(pairs, key=lambda pair: (carried[pair[0]], pair[0]))
    moved = min(held[giver] - held[taker], key=lambda other: (load[other] / copies[other], other))
    held[giver].remove(moved)
    held[taker].add(moved)
    held[giver].add(expert)
    carried[giver] += load[expert] / copies[expert] - load[moved] / copies[moved]
    carried[taker] += load[moved] / copies[moved]


def burden(loads: Mapping[int, Sequence[float]], shards: Sequence[Shard]) -> list[float]:
    """How uneven each layer is: the load of its most loaded worker over the mean, rows spread evenly over replicas."""
    found = []
    for layer, load in loads.items():
        copies = Counter(expert for shard in shards for expert in shard[layer])
        carried = [sum(load[expert] / copies[expert] for expert in shard[layer]) for shard in shards]
        found.append(max(carried) * len(shards) / total if (total := sum(load)) else 1.0)
    return found


def dump(shards: Sequence[Shard]) -> str:
    """A plan as the text of a placement file."""
    workers = [{str(layer): list(experts) for layer, experts in shard.items()} for shard in shards]
    return json.dumps({_KEY: _VERSION, "workers": workers})


def parse(text: str, layers: Sequence[int], num_experts: int) -> list[Shard]:
    """The shards of a placement file for a model. ConfigError, naming what is wrong, unless every expert has a worker."""
    try:
        content = json.loads(text)
        if content[_KEY] != _VERSION:
            raise ConfigError(f"--placement: version {content[_KEY]} is not known")
        shards = [_shard(worker, layers, num_experts) for worker in content["workers"]]
    except (ValueError, TypeError, KeyError, AttributeError):
        raise ConfigError("--placement: not a placement file of this model") from None
    for layer in layers:
        missing = set(range(num_experts)).difference(*(shard[layer] for shard in shards))
        if missing:
            raise ConfigError(f"--placement: no worker holds expert {min(missing)} of layer {layer}")
    return shards


def _shard(worker: Mapping[str, Any], layers: Sequence[int], num_experts: int) -> Shard:
    if sorted(map(int, worker)) != sorted(layers):
        raise ConfigError("--placement: its layers are not the model's MoE layers")
    shard = {layer: tuple(sorted(int(expert) for expert in worker[str(layer)])) for layer in layers}
    for layer, experts in shard.items():
        if not experts or len(set(experts)) != len(experts) or experts[0] < 0 or experts[-1] >= num_experts:
            raise ConfigError(f"--placement: a worker's experts of layer {layer} are not distinct indices below {num_experts}")
    return shard
