"""How evenly expert workers are used under placements made from measured load: equal parts, parts moved whole, single experts.

    python -m benchmarks.placement [--model models/reference] [--tokens 6000] [--workers 4] [--streams 8]

Replays what the model chose on its held-out texts (routing_trace.py). Plans are made from the first half of a text's documents,
or from another text, and judged on the second half. A layer waits for its busiest worker, so what is printed is the load of the
busiest over the mean, layer by layer: of all tokens together (what the planner looks at), and step by step with so many streams
(what a step waits for). 1 is even.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt

from benchmarks.results import Row, append
from benchmarks.routing_trace import Document, held_out, steps
from forefetch.placement import pack, shard_of
from router_service.planner import Holder, plan

Held = npt.NDArray[np.bool_]  # [W, L, E]
PARTS = 16


def loads_of(documents: Sequence[Document], experts: int) -> npt.NDArray[np.float64]:
    """[L, E] pairs."""
    chosen = np.concatenate(documents)
    return np.stack([np.bincount(chosen[:, layer].ravel(), minlength=experts) for layer in range(chosen.shape[1])]).astype(
        float
    )


def equal_parts(workers: int, loads: npt.NDArray[np.float64]) -> Held:
    held = np.zeros((workers, *loads.shape), dtype=bool)
    for worker, experts in enumerate(shard_of(loads.shape[1], workers)):
        held[worker][:, list(experts)] = True
    return held


def parts_moved_whole(workers: int, loads: npt.NDArray[np.float64]) -> Held:
    """The same experts of every layer together, as the planner did before it moved single ones."""
    parts = shard_of(loads.shape[1], PARTS)
    weights = [float(loads[:, list(part)].sum()) for part in parts]
    held = np.zeros((workers, *loads.shape), dtype=bool)
    for worker, mine in enumerate(pack(weights, [1] * PARTS, [PARTS] * workers)):
        for part in mine:
            held[worker][:, list(parts[part])] = True
    return held


def single_experts(workers: int, loads: npt.NDArray[np.float64], extra: int = 0) -> Held:
    names = [f"{worker:02}" for worker in range(workers)]
    target = plan({name: Holder(frozenset(), loads.size) for name in names}, dict(enumerate(loads.tolist())), 1, extra)
    held = np.zeros((workers, *loads.shape), dtype=bool)
    for worker, name in enumerate(names):
        for layer, expert in target[name]:
            held[worker, layer, expert] = True
    return held


def uneven(held: Held, loads: npt.NDArray[np.float64]) -> float:
    """Busiest over mean, mean of the layers; replicas share evenly."""
    carried = (held * (loads / held.sum(axis=0))).sum(axis=2)  # [W, L]
    return float((carried.max(axis=0) * len(held) / loads.sum(axis=1)).mean())


def uneven_steps(held: Held, documents: Sequence[Document], streams: int) -> float:
    """The same, step by step; row t's pair with expert e goes to replica (t + e) % R, as the router sends it."""
    workers, layers, _ = held.shape
    ranks, counts = held.cumsum(axis=0) - 1, held.sum(axis=0)
    found = []
    for chosen in steps(documents, streams):  # [B, L, K]
        turn = (np.arange(len(chosen))[:, None, None] + chosen) % counts[np.arange(layers)[:, None], chosen]
        pairs = np.zeros((workers, layers))
        for worker in range(workers):
            mine = held[worker][np.arange(layers)[:, None], chosen]
            mine &= ranks[worker][np.arange(layers)[:, None], chosen] == turn
            pairs[worker] = mine.sum(axis=(0, 2))
        found.append((pairs.max(axis=0) * workers / pairs.sum(axis=0)).mean())
    return float(np.mean(found))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, default=Path("models/reference"))
    parser.add_argument("--tokens", type=int, default=6000, help="of each text (default: %(default)s)")
    parser.add_argument("--experts", type=int, default=64)
    parser.add_argument("--workers", type=int, default=4)
    parser.add_argument("--streams", type=int, default=8)
    parser.add_argument("--write", action="store_true", help="write rows to benchmarks/results.csv")
    args = parser.parse_args()
    texts = held_out(args.model, args.tokens)
    half = {name: (documents[::2], documents[1::2]) for name, documents in texts.items()}
    kinds = {
        "equal parts": equal_parts,
        f"{PARTS} parts moved whole": parts_moved_whole,
        "single experts": single_experts,
        "single experts, 1 place more": lambda workers, loads: single_experts(workers, loads, 1),
        "single experts, 4 places more": lambda workers, loads: single_experts(workers, loads, 4),
    }
    rows: list[Row] = []
    print(f"{'placement':32} {'planned on':12} {'all tokens':>10} {f'{args.streams} streams':>10}")
    for kind, make in kinds.items():
        for where in ("its own text", "another text"):
            names = list(half)
            sources = names if where == "its own text" else [*names[1:], names[0]]
            made = {
                name: make(args.workers, loads_of(half[source][0], args.experts))
                for name, source in zip(names, sources, strict=True)
            }
            long = np.mean([uneven(made[name], loads_of(half[name][1], args.experts)) for name in names])
            short = np.mean([uneven_steps(made[name], half[name][1], args.streams) for name in names])
            print(f"{kind:32} {where:12} {long:10.2f} {short:10.2f}")
            case = f"{kind}, planned on {where}, {args.workers} workers"
            rows.append(Row("placement", case, "busiest over mean, all tokens", float(long), "x"))
            rows.append(Row("placement", case, f"busiest over mean, {args.streams} streams", float(short), "x"))
    if args.write:
        append(rows)


if __name__ == "__main__":
    main()
