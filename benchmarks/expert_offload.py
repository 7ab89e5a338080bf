"""What a step costs when only some experts fit on the GPU: slots, recall of the hints, format and batch as parameters.

    python -m benchmarks.expert_offload [--layers 48] [--slots 25 50 75] [--recall 0 80 90 95 100] [--experts int4 bfloat16]
                                        [--batch 1 4 16] [--on-demand 50] [--attention-us 100] [--steps 40] [--record]

Qwen3-30B-A3B's expert sizes, routing and hints as in drawn_routing.py. A step is recorded as a graph: per layer a kernel that
takes as long as attention would, then the choice, what is brought ahead, and the experts. Compared in one run: all experts
resident; slots with hints of a recall (0: none, what was missed comes in behind); loading on demand with lists of the least
recently used, without a host in between, with one, and with one that launches every kernel (`on_demand.py`). Outputs are
compared bit by bit. "link" is the share of the step in which copies and reads in place keep PCIe busy at the bandwidth measured
first: at 100 % the bytes forbid more.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from statistics import median
from time import perf_counter
from typing import Any, Literal

import torch
from torch import Tensor

from benchmarks.drawn_routing import Drawn, FewSlots, all_resident, blobs_of, few_slots, routing
from benchmarks.on_demand import HostLoader, Planned
from benchmarks.results import Row, append
from forefetch.kernels.residency import COUNTERS
from forefetch.synthetic import open_model

HOSTS: tuple[Literal["", "recorded", "eager"], ...] = ("", "recorded", "eager")
WARM = 96  # steps before anything is timed: until then averages of use are still forming


def attention(us: int, device: torch.device) -> Callable[[], None]:
    """A kernel that takes so long."""
    if device.type != "cuda":
        return lambda: None
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    for _ in range(2):
        begin.record()
        torch.cuda._sleep(10**7)  # type: ignore[no-untyped-call]
        end.record()
        end.synchronize()
    cycles = int(us * 1e-3 * 10**7 / begin.elapsed_time(end))
    return lambda: torch.cuda._sleep(cycles)  # type: ignore[no-untyped-call]


def bandwidth(device: torch.device) -> float:
    """Bytes per second of one large copy from pinned memory."""
    if device.type != "cuda":
        return float("inf")
    host, there = torch.empty(2**28, dtype=torch.uint8, pin_memory=True), torch.empty(2**28, dtype=torch.uint8, device=device)
    best = 0.0
    for _ in range(4):
        torch.cuda.synchronize()
        began = perf_counter()
        there.copy_(host, non_blocking=True)
        torch.cuda.synchronize()
        best = max(best, host.numel() / (perf_counter() - began))
    return best


class Steps:
    """A step of `experts`, recorded where there is a GPU. host: as `HostLoader` does it, its pieces "recorded" or "eager"."""

    def __init__(
        self,
        experts: Any,
        drawn: Drawn,
        wait: Callable[[], None],
        device: torch.device,
        dtype: torch.dtype,
        host: Literal["", "recorded", "eager"] = "",
    ) -> None:
        self.experts, self.drawn, self.cuda = experts, drawn, device.type == "cuda"
        rows = drawn.logits.shape[1]
        x = torch.randn(rows, experts.spec.hidden_size, generator=torch.Generator().manual_seed(4)).to(device, dtype)
        idle = torch.zeros(rows, 1, dtype=torch.bool, device=device)
        self._read = x, idle  # by the recorded step, which does not keep them from being freed and written over
        self.out = torch.zeros(len(experts.layers), *x.shape, dtype=dtype, device=device)

        def step() -> None:
            experts.begin(idle)
            for place, layer in enumerate(experts.spec.moe_layers):
                wait()
                self.out[place].copy_(experts.route(layer, x, x))
            experts.settle(idle)

        def record(function: Callable[[], None]) -> Callable[[], None]:
            return self._recorded(function) if self.cuda and host != "eager" else function

        self.planned = isinstance(experts, Planned) and not host
        self._replay = HostLoader(experts, wait, x, self.out, record).step if host else record(step)

    @staticmethod
    def _recorded(step: Callable[[], None]) -> Callable[[], None]:
        stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            step()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            step()
        return graph.replay

    @torch.inference_mode()
    def run(self, count: int, recall: float) -> tuple[list[float], list[Tensor]]:
        """(ms of each step after WARM, outputs of the last)."""
        spent = []
        for number in range(count + WARM):
            self.drawn.load(number, recall)
            if self.planned:
                self.experts.prepare([sorted(set(layer.flatten().tolist())) for layer in self.drawn.choices[number]])
            if self.cuda:
                torch.cuda.synchronize()
            began = perf_counter()
            self._replay()
            if self.cuda:
                torch.cuda.synchronize()
            spent.append(1e3 * (perf_counter() - began))
            if number == WARM - 1 and isinstance(self.experts, Planned):
                self.experts.lists.needed = self.experts.lists.found = 0
            elif number == WARM - 1 and isinstance(self.experts, FewSlots):
                self.experts.state.counters.zero_()
        return spent[WARM:], self.out.clone()


def one(args: argparse.Namespace, kind: Any, batch: int, link: float, wait: Callable[[], None], rows: list[Row]) -> None:
    """All cases of a format and a batch."""
    spec, device, dtype = args.spec, args.device, args.dtype
    drawn = Drawn(routing(args.steps + WARM, args.layers, spec.num_experts, spec.top_k, batch), spec.num_experts, device, dtype)
    format, blobs = args.blobs[kind]
    place = {"device": device, "dtype": dtype, "max_rows": batch}
    label = f"{kind}, batch {batch}, {args.layers} layers, attention {args.attention_us} us"

    def case(name: str, steps: Steps, recall: float) -> Tensor:
        spent, out = steps.run(args.steps, recall)
        step, tail = median(spent), sorted(spent)[int(0.99 * (len(spent) - 1))]
        base = args.base = step if name == "all resident" else args.base
        text = f"{label}, {name}"
        line = f"{kind} b{batch} {name:32} {step:7.2f} ms (p99 {tail:6.2f}) {step / base:5.2f}x"
        rows.extend(
            (Row("expert_offload", text, "step p50", step, "ms"), Row("expert_offload", text, "x resident", step / base, ""))
        )
        if isinstance(steps.experts, Planned):
            there = steps.experts.lists.found / steps.experts.lists.needed
            line += f"  there {there:6.1%}"
            rows.append(Row("expert_offload", text, "in slots", 100 * there, "%"))
        elif isinstance(steps.experts, FewSlots):
            found = dict(zip(COUNTERS, steps.experts.state.counters.tolist(), strict=True))
            needed = sum(found[what] for what in ("hits", "late", "misses", "resident")) or 1
            there = (found["hits"] + found["resident"]) / needed
            busy = steps.experts.expert_bytes * (found["brought"] + found["absent"]) / args.steps / link  # or read in place
            line += f"  there {there:6.1%} late {found['late'] / needed:5.1%} miss {found['misses'] / needed:5.1%}"
            line += f"  brought {found['brought'] / args.steps:5.1f}/step  looks {found['waits'] / args.steps:5.0f}"
            line += f"  link {busy / step * 1e3:4.0%}"
            rows.append(Row("expert_offload", text, "in slots", 100 * there, "%"))
            rows.append(Row("expert_offload", text, "link busy", 1e5 * busy / step, "%"))
        print(line, flush=True)
        return out

    expected = case("all resident", Steps(all_resident(spec, format, blobs, drawn, **place), drawn, wait, device, dtype), 0.0)

    def compared(name: str, steps: Steps, recall: float) -> None:
        if not torch.equal(case(name, steps, recall), expected):
            raise SystemExit("the output is not that of resident experts")

    for share in args.slots:
        few = few_slots(spec, format, blobs, drawn, share, FewSlots, args.copies, **place)
        for recall in args.recall:
            few.restart(recall)
            name = f"recall {recall}%" if recall else "no hints"
            compared(f"{share}% slots, {name}", Steps(few, drawn, wait, device, dtype), recall / 100)
        del few
        if batch > 1 or share not in args.on_demand:
            continue
        planned = few_slots(spec, format, blobs, drawn, share, Planned, spec.top_k, **place)
        for host in HOSTS:
            planned.restart()
            name = f"{share}% slots, on demand, LRU, " + (f"host, {host}" if host else "no host")
            compared(name, Steps(planned, drawn, wait, device, dtype, host), 0.0)
        del planned


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=48)
    parser.add_argument("--sizes", default="", help="more of the synthetic model's numbers, for a try on a CPU")
    parser.add_argument("--experts", nargs="+", default=["int4"], choices=("float32", "bfloat16", "int8", "int4"))
    parser.add_argument("--slots", type=int, nargs="+", default=[25, 50, 75], metavar="PERCENT")
    parser.add_argument("--recall", type=int, nargs="+", default=[0, 80, 90, 95, 100], metavar="PERCENT")
    parser.add_argument("--on-demand", type=int, nargs="*", default=[50], metavar="PERCENT", help="slots of the opponents")
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 4, 16])
    parser.add_argument("--copies", type=int, default=2, help="most experts brought per layer (%(default)s)")
    parser.add_argument("--attention-us", type=int, default=100)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--record", action="store_true", help="add rows to results.csv")
    args = parser.parse_args()
    args.device = torch.device(args.device)
    args.dtype = torch.bfloat16 if args.device.type == "cuda" else torch.float32
    args.spec, _ = open_model(f"synthetic:qwen3-30b-a3b,layers={args.layers}{args.sizes}", allow_synthetic=True)
    args.blobs = {kind: blobs_of(args.spec, kind, args.dtype, args.device) for kind in args.experts}
    link, wait, rows = bandwidth(args.device), attention(args.attention_us, args.device), list[Row]()
    print(f"pinned memory to the device: {link / 1e9:.1f} GB/s")
    for kind in args.experts:
        for batch in args.batch:
            one(args, kind, batch, link, wait, rows)
    if args.record:
        append(rows)


if __name__ == "__main__":
    main()
