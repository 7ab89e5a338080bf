"""One MoE layer's routed experts on a GPU, Qwen3-30B-A3B shapes: every format, checked and timed in one run.

    python -m benchmarks.expert_mlp [--tokens 1 4 16 64 512 2048] [--formats int4 int8 bfloat16 ...] [--processes 16] [--dry]

A time is that of a whole layer (choice from logits, both products, sum) in microseconds: the median of replays of a CUDA
graph with 12 layers, four with memory of their own in rotation. The floor is the bytes of the experts touched over the measured
copy bandwidth. The peer is PyTorch's grouped product on bfloat16 weights, its rows sorted outside the clock.
Nothing is timed that was not right first: float64 on the weights that the codes mean.
"""

from __future__ import annotations

import argparse
import itertools
import multiprocessing
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from benchmarks import results
from forefetch.kernels.gate import choose
from forefetch.kernels.grouped_mlp.formats import ExpertFormat, blob_bytes, pack, unpack
from forefetch.kernels.grouped_mlp.moe import moe, moe_from_logits
from forefetch.kernels.grouped_mlp.scratch import MoeScratch

HIDDEN, WIDTH, EXPERTS, TOP_K = 2048, 768, 128, 8
LAYERS, CALLS, REPLAYS = 4, 12, 9
FORMATS = {
    "int4": ExpertFormat("int4", 128, "fragment"),
    "int4-g64": ExpertFormat("int4", 64, "fragment"),
    "int4-portable": ExpertFormat("int4", 128),
    "int8": ExpertFormat("int8", 128, "fragment"),
    "int8-portable": ExpertFormat("int8", 128),
    "bfloat16": ExpertFormat("bfloat16"),
}
LARGEST_ERROR = {"fragment": 5e-4, "natural": 4e-3}  # relative L2: float16 arithmetic, bfloat16 arithmetic
DEVICE = "cuda"


@dataclass
class Layer:
    pool: Tensor
    slot_of: Tensor


@dataclass
class Call:
    x: Tensor
    logits: Tensor
    out: Tensor


def make_layers(form: ExpertFormat) -> list[Layer]:
    """Four layers in memory of their own: one drawn, the others its experts in other slots."""
    torch.manual_seed(1)
    pool = torch.empty(EXPERTS, blob_bytes(HIDDEN, WIDTH, form), dtype=torch.uint8, device=DEVICE)
    for slot in range(EXPERTS):
        w13 = torch.randn(2 * WIDTH, HIDDEN, device=DEVICE) * HIDDEN**-0.5
        pool[slot] = pack(w13, torch.randn(HIDDEN, WIDTH, device=DEVICE) * WIDTH**-0.5, form)
    layers = []
    for _ in range(LAYERS):
        slots = torch.randperm(EXPERTS, device=DEVICE)
        layers.append(Layer(torch.empty_like(pool).index_copy_(0, slots, pool), slots.int()))
    return layers


def make_call(tokens: int, seed: int, skew: float) -> Call:
    """skew: standard deviation of how much all tokens like an expert, in those of a single token's own liking."""
    torch.manual_seed(seed)
    logits = torch.randn(tokens, EXPERTS, device=DEVICE) + skew * torch.randn(EXPERTS, device=DEVICE)
    x = torch.randn(tokens, HIDDEN, device=DEVICE).bfloat16()
    return Call(x, logits.bfloat16(), torch.full((tokens, HIDDEN), torch.nan, dtype=torch.bfloat16, device=DEVICE))


def run(call: Call, layer: Layer, scratch: MoeScratch) -> None:
    moe_from_logits(call.x, call.logits, "softmax_topk", True, layer.pool, layer.slot_of, call.out, scratch)


def check(call: Call, layer: Layer, scratch: MoeScratch, form: ExpertFormat) -> float:
    """Relative error against float64. RuntimeError if it is too large, not finite, or a second run differs."""
    ids, weights = choose(call.logits, TOP_K, "softmax_topk", True)
    exact = torch.zeros(call.x.shape, dtype=torch.float64, device=DEVICE)
    for expert in ids.unique().tolist():
        token, place = (ids == expert).nonzero(as_tuple=True)
        w13, w2 = unpack(layer.pool[layer.slot_of[expert]], HIDDEN, WIDTH, form, torch.float64)
        gate, up = (call.x[token].double() @ w13.T).chunk(2, 1)
        exact.index_add_(0, token, weights[token, place, None] * ((functional.silu(gate) * up) @ w2.T))
    outs = []
    for _ in range(2):
        for buffer in (scratch.h, scratch.y, scratch.x_half, scratch.weights):
            buffer.fill_(torch.nan)
        outs.append(torch.full(call.x.shape, torch.nan, device=DEVICE))
        moe(call.x, ids, weights, layer.pool, layer.slot_of, outs[-1], scratch)
    fused = torch.full(call.x.shape, torch.nan, device=DEVICE)
    moe_from_logits(call.x, call.logits, "softmax_topk", True, layer.pool, layer.slot_of, fused, scratch)
    errors = [float((out.double() - exact).norm() / exact.norm()) for out in (outs[0], fused)]
    scratch.check()
    if not max(errors) < LARGEST_ERROR[form.order] or not torch.equal(*outs):
        raise RuntimeError(f"{form} at {len(call.x)} tokens: errors {errors}, repeats {torch.equal(*outs)}")
    return max(errors)


def microseconds(call: Callable[[int], object]) -> float:
    """Median time of call(i), i < CALLS, in a graph."""
    call(0)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for index in range(CALLS):
            call(index)
    times = []
    for replay in range(REPLAYS + 2):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        if replay >= 2:
            times.append(begin.elapsed_time(end) * 1000 / CALLS)
    return sorted(times)[REPLAYS // 2]


def bandwidth() -> float:
    """Bytes per microsecond of a large copy on the device, read and written."""
    source = torch.randn(2**29, device=DEVICE)
    target = torch.empty_like(source)
    # Not copy_: a graph hands that to a copy engine, which is slower than the SMs.
    return 2 * source.nbytes / microseconds(lambda _: torch.neg(source, out=target))


def measure(
    name: str, form: ExpertFormat, tokens: int, layers: list[Layer], rate: float, skew: float = 0.0
) -> list[results.Row]:
    calls = [make_call(tokens, seed, skew) for seed in range(LAYERS)]
    scratch = MoeScratch(tokens, TOP_K, EXPERTS, HIDDEN, WIDTH, form, device=DEVICE, dtype=torch.bfloat16)
    error = check(calls[0], layers[0], scratch, form)
    time = microseconds(lambda i: run(calls[i % LAYERS], layers[i % LAYERS], scratch))
    touched = sum(len(choose(c.logits, TOP_K, "softmax_topk", True)[0].unique()) for c in calls) / LAYERS
    floor = touched * blob_bytes(HIDDEN, WIDTH, form) / rate
    case = f"{name}, {tokens} tokens" + (f", skew {skew:g}" if skew else "")
    share = floor / time
    print(f"{case:32} {time:8.1f} us  floor {floor:7.1f}  {share:5.0%}  experts {touched:5.1f}  error {error:.1e}", flush=True)
    return [
        results.Row("expert_mlp", case, "layer", time, "us"),
        results.Row("expert_mlp", case, "share of the byte floor", floor / time, "1"),
        results.Row("expert_mlp", case, "relative error", error, "1"),
    ]


def compile_kernels(name: str, tokens: int) -> None:
    """Runs what `measure` will run once, on weights that mean nothing, so that the compiler's cache has it."""
    form = FORMATS[name]
    pool = torch.zeros(EXPERTS, blob_bytes(HIDDEN, WIDTH, form), dtype=torch.uint8, device=DEVICE)
    layer, call = Layer(pool, torch.arange(EXPERTS, dtype=torch.int32, device=DEVICE)), make_call(tokens, 0, 0.0)
    scratch = MoeScratch(tokens, TOP_K, EXPERTS, HIDDEN, WIDTH, form, device=DEVICE, dtype=torch.bfloat16)
    run(call, layer, scratch)
    ids, weights = choose(call.logits, TOP_K, "softmax_topk", True)
    for out in (call.out, call.out.float()):
        moe(call.x, ids, weights, layer.pool, layer.slot_of, out, scratch)
    torch.cuda.synchronize()


def measure_peer(tokens: int, skew: float = 0.0) -> list[results.Row]:
    """torch's grouped product with bfloat16 weights: both products and silu; no routing, gathering or sum."""
    w13 = torch.randn(EXPERTS, 2 * WIDTH, HIDDEN, device=DEVICE, dtype=torch.bfloat16).transpose(1, 2)
    w2 = torch.randn(EXPERTS, HIDDEN, WIDTH, device=DEVICE, dtype=torch.bfloat16).transpose(1, 2)
    ids, _ = choose(make_call(tokens, 0, skew).logits, TOP_K, "softmax_topk", True)
    ends = torch.bincount(ids.flatten(), minlength=EXPERTS).cumsum(0).int()
    rows = torch.randn(tokens * TOP_K, HIDDEN, device=DEVICE, dtype=torch.bfloat16)

    def products(_: int) -> None:
        gate, up = torch._grouped_mm(rows, w13, ends).chunk(2, 1)
        torch._grouped_mm(functional.silu(gate) * up, w2, ends)

    time = microseconds(products)
    print(f"{'torch grouped_mm bfloat16':24} {tokens:4} tokens {time:8.1f} us", flush=True)
    return [results.Row("expert_mlp", f"torch grouped_mm bfloat16, {tokens} tokens", "both products", time, "us")]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, nargs="+", default=[1, 4, 16, 64, 512, 2048])
    parser.add_argument("--formats", nargs="+", choices=list(FORMATS), default=list(FORMATS))
    parser.add_argument("--processes", type=int, default=1, help="compile the kernels in so many processes first")
    parser.add_argument("--dry", action="store_true", help="print only, leave results.csv alone")
    arguments = parser.parse_args()
    if arguments.processes > 1:
        with multiprocessing.get_context("spawn").Pool(arguments.processes) as pool:
            pool.starmap(compile_kernels, itertools.product(arguments.formats, arguments.tokens), chunksize=1)
    rate = bandwidth()
    print(f"copy bandwidth {rate / 1e6:.2f} TB/s")
    rows = [results.Row("expert_mlp", "copy on the device", "bandwidth", rate / 1e6, "TB/s")]
    for name in arguments.formats:
        layers = make_layers(FORMATS[name])
        for tokens in arguments.tokens:
            rows += measure(name, FORMATS[name], tokens, layers, rate)
        if name in {"int4", "bfloat16"}:
            rows += measure(name, FORMATS[name], 64, layers, rate, skew=1.0)
    for tokens in arguments.tokens:
        rows += measure_peer(tokens)
    if not arguments.dry:
        results.append(rows)


if __name__ == "__main__":
    main()
