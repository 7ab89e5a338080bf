"""What a step costs when only some experts fit on the GPU: slots, recall of the hints, format and batch as parameters.

    python -m benchmarks.expert_offload [--layers 48] [--slots 50 100] [--recall 0 95 100] [--experts int4] [--batch 1]
                                        [--attention-us 100] [--steps 60] [--record]

Qwen3-30B-A3B's expert sizes; every expert has the same weights, since only bytes and times matter here. A layer is: attention
(a kernel that waits so long), the gate's synchronisation, hints for the next layer, the worker's `forward`. Routing is drawn:
popularities log-normal (sigma 1) per layer; a token keeps an expert of the token before with probability 0.4. A hint names each
expert that the next layer will choose with probability `recall`, and two more; recall 0 means no hints, which is loading on
demand. Reported: the median step, its ratio to all-resident in the same run, and what became of the experts needed.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from statistics import median
from time import perf_counter
from typing import Any
from unittest import mock

import numpy as np
import numpy.typing as npt
import torch

from benchmarks.results import Row, append
from expert_worker.experts import Storage
from expert_worker.host import Host
from expert_worker.packed import PackedExperts, packed_format
from expert_worker.packed_slots import SlottedExperts
from forefetch.hints import ExpertHint
from forefetch.kernels.grouped_mlp.formats import pack
from forefetch.synthetic import open_model
from forefetch.wire import LayerCall, Verified

Choices = list[list[npt.NDArray[np.int32]]]  # step -> layer -> [B, K]
KEEP, SIGMA, WRONG, WARM = 0.4, 1.0, 2, 10


def routing(steps: int, layers: int, experts: int, top_k: int, batch: int) -> Choices:
    draw = np.random.default_rng(1)
    weights = np.exp(SIGMA * draw.standard_normal((layers, experts)))
    chances = weights / weights.sum(1, keepdims=True)
    before: list[list[list[int]]] = [[[] for _ in range(batch)] for _ in range(layers)]
    found: Choices = []
    for _ in range(steps):
        step = []
        for layer in range(layers):
            for row in range(batch):
                kept = [e for e in before[layer][row] if draw.random() < KEEP]
                others = [int(e) for e in draw.choice(experts, 3 * top_k, replace=False, p=chances[layer]) if e not in kept]
                before[layer][row] = (kept + others)[:top_k]
            step.append(np.array(before[layer], dtype=np.int32))
        found.append(step)
    return found


def call_of(step: int, layer: int, ids: npt.NDArray[np.int32], x: torch.Tensor) -> LayerCall:
    rows, top_k = ids.shape
    row = torch.arange(rows, dtype=torch.int32).repeat_interleave(top_k)
    return LayerCall(step, layer, x, row, torch.from_numpy(ids.ravel().copy()), torch.full((rows * top_k,), 1 / top_k))


def hint_of(
    step: int, layer: int, ids: npt.NDArray[np.int32], recall: float, window_ns: int, draw: Any, experts: int
) -> ExpertHint:
    chosen = np.unique(ids)
    named = chosen[draw.random(len(chosen)) < recall]
    wrong = np.setdiff1d(draw.choice(experts, WRONG, replace=False), chosen)
    both = np.concatenate([named, wrong]).astype(np.int32)
    chances = np.concatenate([np.full(len(named), 0.9), np.full(len(wrong), 0.3)]).astype(np.float32)
    return ExpertHint(step, max(layer - 1, 0), layer, 0, both, chances, window_ns)


def run(experts: Any, choices: Choices, recall: float, wait: Callable[[], None], device: torch.device, args: Any) -> Any:
    """(ms of each step after WARM, what became of the experts needed)."""
    hidden, number = args.spec.hidden_size, args.spec.num_experts
    x = torch.randn(args.batch, hidden, device=device, dtype=args.dtype)
    out, draw = torch.empty_like(x), np.random.default_rng(2)
    spent, found, pace = [], np.zeros(len(Verified._fields), dtype=np.int64), 10**6
    for step, layers in enumerate(choices):
        began = perf_counter()
        for layer, ids in enumerate(layers):
            layer_began = perf_counter()
            wait()
            if recall and layer + 1 < len(layers):
                experts.hint(hint_of(step, layer + 1, layers[layer + 1], recall, pace, draw, number))
            _, verified = experts.forward(call_of(step, layer, ids, x), out)
            if step >= WARM:
                found += verified
            pace = int(0.9 * pace + 0.1 * 1e9 * (perf_counter() - layer_began))
        if device.type == "cuda":
            torch.cuda.synchronize()
        if step >= WARM:
            spent.append(1e3 * (perf_counter() - began))
    return spent, Verified(*found.tolist())


def attention(us: int, device: torch.device) -> Callable[[], None]:
    """A kernel that takes so long, and the synchronisation behind it."""
    if device.type != "cuda":
        return lambda: None
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
    begin.record()
    torch.cuda._sleep(10**7)  # type: ignore[no-untyped-call]
    end.record()
    end.synchronize()
    cycles = int(us * 1e-3 * 10**7 / begin.elapsed_time(end))

    def wait() -> None:
        torch.cuda._sleep(cycles)  # type: ignore[no-untyped-call]
        torch.cuda.current_stream().synchronize()

    return wait


def same_for_all(blob: torch.Tensor) -> Callable[..., None]:
    def fill(host: Host, *_: Any) -> None:
        host.blobs.copy_(blob)

    return fill


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=48)
    parser.add_argument("--sizes", default="", help="more of the synthetic model's numbers, for a try on a CPU")
    parser.add_argument("--experts", default="int4", choices=("bfloat16", "int8", "int4"))
    parser.add_argument("--slots", type=int, nargs="+", default=[25, 50, 75], metavar="PERCENT")
    parser.add_argument("--recall", type=int, nargs="+", default=[0, 80, 95, 100], metavar="PERCENT")
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--attention-us", type=int, default=100)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--record", action="store_true", help="add rows to results.csv")
    args = parser.parse_args()
    device = torch.device(args.device)
    args.dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    args.spec, checkpoint = open_model(f"synthetic:qwen3-30b-a3b,layers={args.layers}{args.sizes}", allow_synthetic=True)
    spec, rows = args.spec, []
    format = packed_format(spec, args.experts, args.dtype, device)
    w13 = torch.randn(2 * spec.expert_width, spec.hidden_size) * spec.hidden_size**-0.5
    blob = pack(w13, torch.randn(spec.hidden_size, spec.expert_width) * spec.expert_width**-0.5, format)
    held, wait = tuple(range(spec.num_experts)), attention(args.attention_us, device)
    choices = routing(args.steps + WARM, args.layers, spec.num_experts, spec.top_k, args.batch)
    place = {"device": device, "dtype": args.dtype}

    def case(name: str, experts: Any, recall: float, base: float | None) -> float:
        spent, found = run(experts, choices, recall, wait, device, args)
        step, needed = median(spent), sum(found[:4]) or 1
        shares = "  ".join(f"{what} {count / needed:6.1%}" for what, count in zip(Verified._fields, found[:4], strict=False))
        print(
            f"{name:28} {step:8.2f} ms {step / (base or step):6.2f}x   {shares}   {found.copied_bytes / 1e9:6.2f} GB",
            flush=True,
        )
        label = f"{args.experts}, batch {args.batch}, {args.layers} layers, attention {args.attention_us} us, {name}"
        rows.append(Row("expert_offload", label, "step p50", step, "ms"))
        return step

    with mock.patch("expert_worker.packed.pack", return_value=blob.to(device)):
        whole = PackedExperts(spec, checkpoint, held, format, max_rows=args.batch, **place)
    base = case("all resident", whole, 0.0, None)
    del whole
    with mock.patch("expert_worker.experts.fill", same_for_all(blob)):
        for share in args.slots:
            storage = Storage(len(held) * args.layers * share // 100, format, max_rows=args.batch)
            few = SlottedExperts(spec, checkpoint, dict.fromkeys(spec.moe_layers, held), storage, **place)
            for recall in args.recall:
                case(f"{share}% slots, " + (f"recall {recall}%" if recall else "on demand"), few, recall / 100, base)
            assert few.residency is not None
            few.residency.close()
    if args.record:
        append(rows)


if __name__ == "__main__":
    main()
