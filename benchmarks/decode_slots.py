"""Decode steps of the captured engine with experts in slots: what the whole step costs when half of the experts fit.

    python -m benchmarks.decode_slots [--kv e2m0] [--batch 1 4 16] [--slots 50] [--recall 0 95 100] [--context 4096] [--record]

As benchmarks.decode (the engine; Qwen3-30B-A3B shapes, int4 experts), but which experts a token chooses and what hints say of
them is drawn (drawn_routing.py) and brought to the device before each step, so that recall is a parameter. So a step is read
before the next is launched, and timed from its launch to its tokens. All experts resident, with the same choices, is measured
in the same run. The heads' own time is not in it; hints are noted, picked and copied in the step.
"""

from __future__ import annotations

import argparse
from typing import Any

import torch

from benchmarks.decode import Case, pages_of
from benchmarks.decode_rig import Rig
from benchmarks.drawn_routing import Drawn, FewSlots, all_resident, blobs_of, few_slots, routing
from benchmarks.results import Row, append
from forefetch.kernels.residency import COUNTERS

WARM = 96  # steps before anything is timed: until then averages of use are still forming
Measured = tuple[list[float], list[int]]


def measure(rig: Rig, experts: Any, drawn: Drawn, recall: float, count: int, batch: int, context: int) -> Measured:
    """Milliseconds of each step after WARM, sorted, and what was counted in them."""
    rig.experts, spent, before = experts, list[float](), experts.counters
    if isinstance(experts, FewSlots):
        experts.restart(recall)
    engine = rig.engine(batch, context, count + WARM + 4, ahead=False, sink=[])
    for step in range(count + WARM):
        drawn.load(step, recall)
        torch.cuda.synchronize()
        engine.step()
        record = engine.parts.recorder.ring.read(step)
        assert record is not None
        spent.append(record.timings.total_ns / 1e6)
        if step == WARM - 1:
            before = experts.counters.clone()
    return sorted(spent[WARM:]), (experts.counters - before).tolist()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="synthetic:qwen3-30b-a3b")
    parser.add_argument("--experts", default="int4", choices=("bfloat16", "int8", "int4"))
    parser.add_argument("--kv", default="e2m0")
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 4, 16])
    parser.add_argument("--slots", type=int, nargs="+", default=[50], metavar="PERCENT")
    parser.add_argument("--recall", type=int, nargs="+", default=[0, 95, 100], metavar="PERCENT")
    parser.add_argument("--copies", type=int, default=2, help="most experts brought per layer (%(default)s)")
    parser.add_argument("--context", type=int, default=4096)
    parser.add_argument("--steps", type=int, default=64)
    parser.add_argument("--record", action="store_true", help="add rows to results.csv")
    args = parser.parse_args()
    most, rows = max(args.batch), list[Row]()
    rig = Rig(args.model)
    rig.put_cache(args.kv, pages_of(Case(args.experts, args.kv, most, args.context), args.steps + WARM), most)
    spec, device, dtype = rig.spec, torch.device("cuda"), torch.bfloat16
    format, blobs = blobs_of(spec, args.experts, dtype, device)
    for batch in args.batch:
        choices = routing(args.steps + WARM, len(spec.moe_layers), spec.num_experts, spec.top_k, batch)
        drawn, place = Drawn(choices, spec.num_experts, device, dtype), {"device": device, "dtype": dtype, "max_rows": batch}
        cases: list[tuple[str, Any, list[int]]] = [("all resident", all_resident(spec, format, blobs, drawn, **place), [0])]
        cases += [
            (f"{s}% slots", few_slots(spec, format, blobs, drawn, s, FewSlots, args.copies, **place), args.recall)
            for s in args.slots
        ]
        base = 0.0
        for name, experts, recalls in cases:
            for recall in recalls:
                spent, counted = measure(rig, experts, drawn, recall / 100, args.steps, batch, args.context)
                p50, p99 = spent[len(spent) // 2], spent[int(0.99 * (len(spent) - 1))]
                base, line = base or p50, ""
                case = f"{args.model} {args.experts} experts, {args.kv} KV, batch {batch}, context {args.context}, {name}"
                if isinstance(experts, FewSlots):
                    case += f", recall {recall}%" if recall else ", no hints"
                    found = dict(zip(COUNTERS, counted, strict=True))
                    line = "  ".join(f"{what} {count / args.steps:.1f}" for what, count in found.items())
                print(f"{case}: p50 {p50:.2f} p99 {p99:.2f} ms {p50 / base:.2f}x  per step: {line}", flush=True)
                rows += [Row("decode_slots", case, what, value, "ms") for what, value in (("p50", p50), ("p99", p99))]
    if args.record:
        append(rows)


if __name__ == "__main__":
    main()
