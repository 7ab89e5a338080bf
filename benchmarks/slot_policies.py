"""Which share of needed experts is in its slot: LRU, LFU, our rule and Belady's optimum on recorded traces, without any hints.

    python -m benchmarks.slot_policies [--model models/reference] [--tokens 6000]

Replays what the model chose on its held-out texts (routing_trace.py) against the worker's own `Slots` and three others, and
prints the table of expert_worker/README.md. Counted are distinct experts per call, so at several streams one that several rows
need counts once. Every policy keeps what the call at hand needs.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterable
from pathlib import Path

import numpy as np
import numpy.typing as npt

from benchmarks.routing_trace import Document, held_out, steps
from expert_worker.slots import NOWHERE, Slots, uses_of
from forefetch.spec import ModelSpec

Ints = npt.NDArray[np.int64]
Calls = list[Ints]  # distinct expert numbers of each layer call, layer after layer, step after step
SHARES = (0.25, 0.5, 0.75)


def calls_of(documents: list[Document], streams: int, experts: int, most: int) -> Calls:
    """At most `most` steps."""
    found: Calls = []
    for step, chosen in enumerate(steps(documents, streams)):
        if step == most:
            break
        found += [np.unique(chosen[:, layer]).astype(np.int64) + layer * experts for layer in range(chosen.shape[1])]
    return found


def replay(calls: Calls, capacity: int, total: int, worth: Callable[[int, Ints], npt.NDArray[np.float64]]) -> int:
    """Misses of a policy that evicts the least worth; worth(call number, its experts) -> [total], after counting the call."""
    held, misses = np.zeros(total, dtype=bool), 0
    for number, needed in enumerate(calls):
        value = worth(number, needed)
        missing = needed[~held[needed]]
        misses += len(missing)
        out = int(held.sum()) + len(missing) - capacity
        if out > 0:
            kept = np.where(held, value, np.inf)
            kept[needed] = np.inf
            held[np.argpartition(kept, out - 1)[:out]] = False
        held[missing] = True
    return misses


def lru(total: int) -> Callable[[int, Ints], npt.NDArray[np.float64]]:
    last = np.full(total, -1.0)

    def worth(number: int, needed: Ints) -> npt.NDArray[np.float64]:
        last[needed] = number
        return last

    return worth


def lfu(total: int) -> Callable[[int, Ints], npt.NDArray[np.float64]]:
    uses = np.zeros(total)

    def worth(number: int, needed: Ints) -> npt.NDArray[np.float64]:
        uses[needed] += 1
        return uses

    return worth


def belady(calls: Calls, total: int) -> Callable[[int, Ints], npt.NDArray[np.float64]]:
    """Knows the future: evicts what is needed farthest away."""
    after: list[Ints] = []
    coming = np.full(total, np.iinfo(np.int64).max)
    for number in range(len(calls) - 1, -1, -1):
        after.append(coming[calls[number]].copy())
        coming[calls[number]] = number
    after.reverse()
    next_use = np.zeros(total)

    def worth(number: int, needed: Ints) -> npt.NDArray[np.float64]:
        next_use[needed] = after[number]
        return -next_use

    return worth


def ours(calls: Calls, capacity: int, layers: int, experts: int, top_k: int) -> int:
    """Misses of the worker's policy."""
    slots, misses = Slots(capacity, [experts] * layers, top_k), 0
    for number, needed in enumerate(calls):
        slots.used(number % layers, needed, uses_of([1] * len(needed), 1))
        experts_needed = needed.tolist()
        missing = [expert for expert in experts_needed if not slots.is_ready(expert)]
        ready = [expert for expert in experts_needed if slots.is_ready(expert)]
        slots.pin(ready)
        for expert in missing:
            assert slots.place(expert, needed=True) != NOWHERE
            slots.filled(expert)
            slots.pin([expert])
        slots.unpin(experts_needed)
        misses += len(missing)
    return misses


def rows(traces: dict[str, list[Document]], spec: ModelSpec) -> Iterable[list[str]]:
    layers, experts = len(spec.moe_layers), spec.num_experts
    total = layers * experts
    mixed = [document for group in zip(*traces.values(), strict=False) for document in group]
    workloads = [(name, documents, 1, 1500) for name, documents in traces.items()]
    workloads += [("all in turn", mixed, streams, most) for streams, most in ((1, 3000), (4, 1000), (8, 600))]
    for name, documents, streams, most in workloads:
        calls = calls_of(documents, streams, experts, most)
        needed = sum(map(len, calls))
        cells = [name, str(streams)]
        for share in SHARES:
            capacity = int(total * share)
            misses = [replay(calls, capacity, total, policy) for policy in (lru(total), lfu(total))]
            misses.append(ours(calls, capacity, layers, experts, spec.top_k))
            misses.append(replay(calls, capacity, total, belady(calls, total)))
            cells.append(" / ".join(f"{100 * (1 - missed / needed):.1f}" for missed in misses))
        yield cells


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, default=Path("models/reference"))
    parser.add_argument("--tokens", type=int, default=6000, help="of each text (%(default)s)")
    args = parser.parse_args()
    headings = ["text", "streams", *(f"{share:.0%} slots" for share in SHARES)]
    print("| " + " | ".join(headings) + " |\n" + "|---" * len(headings) + "|", flush=True)
    for cells in rows(held_out(args.model, args.tokens), ModelSpec.load(args.model)):
        print("| " + " | ".join(cells) + " |", flush=True)


if __name__ == "__main__":
    main()
