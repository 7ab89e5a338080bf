"""Decode steps of a large model on one GPU: step time by batch and context, split by stage, beside the byte limit.

    python -m benchmarks.decode --model synthetic:qwen3-30b-a3b --experts int4 --batch 1,16,64 --context 4096

Runs the router's own step (buffers, captured decoder, sampling, one synchronisation) without its API, on a cache filled with
random keys and values. `--peer` also times transformers' own model of the same sizes in bfloat16, eager, its experts as it
chooses, on the same cache lengths. The byte limit is what a step must read (weights of the experts touched, trunk, KV) over the
copy bandwidth measured in the same run.
"""

from __future__ import annotations

import argparse
import gc
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from benchmarks.results import Row, append
from expert_worker.client import resident
from forefetch.kernels.kv_codec import KvFormat, seal
from forefetch.shapes import synthetic_config
from forefetch.spec import ModelSpec
from forefetch.synthetic import open_model
from router_service.admission import Admitted, SamplingParams
from router_service.cache import KvCache
from router_service.captured import CapturedTrunk
from router_service.layouts import LayoutBuffers
from router_service.pages import PagePool
from router_service.sampling import sample
from router_service.scheduler import Chunk, Plan, Request
from router_service.sealed import SealedCache
from router_service.trunk import Cache, Trunk

PAGE = 128


@dataclass
class Rig:
    """A trunk, its experts and a cache for `tokens` tokens in all."""

    model: str
    experts: str
    kv: str
    max_batch: int
    context: int
    tokens: int
    host: list[tuple[float, ...]] = field(default_factory=list)  # seconds of each step: filling, launching, waiting

    def __post_init__(self) -> None:
        device = torch.device("cuda")
        self.spec, checkpoint = open_model(self.model, allow_synthetic=True)
        self.pages = 1 + self.tokens // PAGE + self.max_batch
        cache = self._cache(device)
        began = time.perf_counter()
        self.trunk = Trunk(self.spec, checkpoint, cache, dtype=torch.bfloat16, device=device)
        self.resident = resident(self.spec, checkpoint, self.experts, device=device, dtype=torch.bfloat16, max_rows=512)
        size = self.resident.weight_bytes / 1e9
        print(f"{self.model}: weights made in {time.perf_counter() - began:.1f} s, experts {size:.1f} GB")

    def _cache(self, device: torch.device) -> Cache:
        """Random keys and values, sealed if the format says so: 32 different pages over and over."""
        if self.kv == "bfloat16":
            cache = KvCache(self.spec, pages=self.pages, page_size=PAGE, dtype=torch.bfloat16, device=device)
            for pool in (*cache.k, *cache.v):
                pool.normal_()
            return cache
        format = KvFormat(self.kv, head_dim=self.spec.head_dim, thirds=16 if self.kv == "mixed" else 0)
        sealed = SealedCache(self.spec, format, pages=self.pages, lanes=self.max_batch, max_rows=512, device=device)
        drawn = torch.randn(2, 32, PAGE, self.spec.head_dim, device=device)
        blobs = seal(drawn[0], drawn[1], format)
        for page in range(self.pages):
            sealed.pages[:, :, page] = blobs[page % 32]
        sealed.tails.normal_()
        sealed.sinks.normal_()
        return sealed

    def requests(self, batch: int, context: int) -> list[Request]:
        """`batch` requests with `context` committed tokens each."""
        pool, draw, made = PagePool(self.pages), np.random.default_rng(0), []
        for key in range(batch):
            tokens = draw.integers(0, self.spec.vocab_size, context + 1).tolist()
            admitted = Admitted(tuple(tokens), 1 << 20, True, SamplingParams(), (), frozenset(), "bench")
            request = Request(key, str(key), tuple(tokens), admitted, 0.0, computed=context)
            request.lane, request.pages = key, pool.allocate(-(-(context + PAGE) // PAGE)) or ()
            made.append(request)
        return made

    def captured(self, batch: int) -> CapturedTrunk:
        """Recorded for `batch` rows."""
        pages = -(-(self.context + PAGE) // PAGE)
        buffers = LayoutBuffers(
            max_tokens=batch,
            max_batch=batch,
            max_pages=pages,
            page_size=PAGE,
            device=torch.device("cuda"),
            buckets=(batch,),
            chunk_rows=(),
        )
        trunk = CapturedTrunk(self.trunk, self.resident, buffers)
        trunk.warm_up()
        self.buffers = buffers
        return trunk


def steps(rig: Rig, batch: int, context: int, count: int) -> Iterator[float]:
    """Seconds of each of `count` steps, from the plan to the tokens on the host."""
    requests, trunk, greedy = rig.requests(batch, context), rig.captured(batch), [SamplingParams()] * batch
    for step in range(count):
        began = time.perf_counter()
        plan = Plan(tuple(Chunk(request, request.computed, 1) for request in requests), ())
        filled = rig.buffers.fill(step, plan)
        placed = time.perf_counter()
        logits = trunk.forward(filled, None, None)  # type: ignore[arg-type]
        launched = time.perf_counter()
        sampled = sample(logits, greedy, [len(request.tokens) for request in requests])
        rig.trunk.cache.commit(filled)
        yield (ended := time.perf_counter()) - began
        rig.host.append((placed - began, launched - placed, ended - launched))
        for request, token in zip(requests, sampled.ids, strict=True):
            if request.computed + 1 < context + PAGE:
                request.tokens.append(token)
                request.computed += 1


def profile(rig: Rig, batch: int, context: int, top: int = 16) -> None:
    """Prints the kernels of a replayed step by their time, microseconds per step."""
    times = steps(rig, batch, context, 24)
    for _ in range(8):
        next(times)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as seen:
        for _ in range(8):
            next(times)
    kernels = sorted(seen.key_averages(), key=lambda kernel: -kernel.device_time_total)
    total, launches = (sum(values) / 8 for values in zip(*((k.device_time_total, k.count) for k in kernels), strict=True))
    print(f"  {total:9.0f} us in kernels, {launches:.0f} launches")
    for kernel in kernels[:top]:
        print(f"  {kernel.device_time_total / 8:9.0f} us {kernel.count / 8:6.0f} x {kernel.key[:90]}")


def bandwidth() -> float:
    """Bytes per second of a large copy, read and write counted."""
    a = torch.empty(1 << 30, dtype=torch.uint8, device="cuda")
    b = torch.empty_like(a)
    best = 0.0
    for _ in range(5):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        b.copy_(a)
        end.record()
        end.synchronize()
        best = max(best, 2 * a.numel() / (start.elapsed_time(end) / 1e3))
    return best


def step_bytes(rig: Rig, batch: int, context: int) -> float:
    """What one step has to read: trunk, the experts that `batch` rows with independent choices touch, K and V."""
    spec = rig.spec
    parts = [part for layer in rig.trunk.layers for part in vars(layer).values() if isinstance(part, torch.Tensor)]
    trunk = sum(part.numel() * part.element_size() for part in [*parts, rig.trunk.head])
    touched = spec.num_experts * (1 - (1 - spec.top_k / spec.num_experts) ** batch)
    experts = len(spec.moe_layers) * touched * rig.resident.expert_bytes
    return trunk + experts + batch * context / PAGE * rig.trunk.cache.block_bytes


def peer(spec: ModelSpec, config: dict[str, Any], batches: list[int], context: int) -> Iterator[tuple[int, list[float]]]:
    """(batch, seconds of steps) of transformers on the same sizes, weights left as allocated."""
    import transformers
    from transformers.initialization import no_init_weights

    values = {key: value for key, value in config.items() if key != "model_type"}
    built = transformers.AutoConfig.for_model(config["model_type"], **values)
    with torch.device("cuda"), no_init_weights():
        model = transformers.AutoModelForCausalLM.from_config(built, dtype=torch.bfloat16).eval()
    for parameter in model.parameters():
        parameter.data.normal_(std=0.02)
    for batch in batches:
        cache = transformers.DynamicCache(config=built)
        shape = (batch, spec.kv_heads, context, spec.head_dim)
        for layer in range(spec.layers):
            cache.update(*(torch.randn(shape, dtype=torch.bfloat16, device="cuda") for _ in range(2)), layer)
        ids, times = torch.zeros(batch, 1, dtype=torch.long, device="cuda"), []
        with torch.inference_mode():
            for _ in range(12):
                began = time.perf_counter()
                ids = model(ids, past_key_values=cache, use_cache=True).logits[:, -1:].argmax(-1)
                ids.tolist()
                times.append(time.perf_counter() - began)
        yield batch, times[4:]
        del cache
        gc.collect()
        torch.cuda.empty_cache()


def main() -> None:
    """See the module."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="synthetic:qwen3-30b-a3b")
    parser.add_argument("--experts", default="int4", help="how experts are stored: bfloat16, int8, int4")
    parser.add_argument("--kv", default="bfloat16", help="bfloat16, or a sealed format: e2m0, asym2, asym3, mixed, fp4")
    parser.add_argument("--batch", default="1,4,16,64")
    parser.add_argument("--context", type=int, default=4096)
    parser.add_argument("--steps", type=int, default=64)
    parser.add_argument("--peer", action="store_true", help="time transformers too")
    parser.add_argument("--profile", action="store_true", help="print each step's kernels")
    parser.add_argument("--write", action="store_true", help="append to results.csv")
    arguments = parser.parse_args()
    batches = [int(part) for part in arguments.batch.split(",")]
    speed, rows = bandwidth(), list[Row]()
    print(f"copy bandwidth {speed / 1e12:.2f} TB/s")
    rig = Rig(
        arguments.model, arguments.experts, arguments.kv, max(batches), arguments.context, max(batches) * arguments.context
    )
    for batch in batches:
        times = sorted(list(steps(rig, batch, arguments.context, arguments.steps))[8:])
        p50, p99 = (times[int(share * (len(times) - 1))] * 1e3 for share in (0.5, 0.99))
        limit = step_bytes(rig, batch, arguments.context) / speed * 1e3
        print(f"batch {batch:3} context {arguments.context}: p50 {p50:.2f} ms, p99 {p99:.2f} ms, bytes allow {limit:.2f} ms")
        fill, launch, wait = (float(np.median(part)) * 1e3 for part in zip(*rig.host[-arguments.steps // 2 :], strict=True))
        print(f"  on the host: filling {fill:.2f} ms, launching {launch:.2f} ms, waiting and sampling {wait:.2f} ms")
        if arguments.profile:
            profile(rig, batch, arguments.context)
        case = f"{arguments.model} {arguments.experts} experts, {arguments.kv} KV, batch {batch}, context {arguments.context}"
        rows += [Row("decode", case, name, value, "ms") for name, value in (("p50", p50), ("p99", p99), ("byte limit", limit))]
    spec = rig.spec
    del rig
    gc.collect()
    torch.cuda.empty_cache()
    if arguments.peer:
        for batch, seconds in peer(spec, synthetic_config(arguments.model), batches, arguments.context):
            p50 = float(np.median(seconds)) * 1e3
            print(f"transformers, bfloat16, batch {batch}: p50 {p50:.1f} ms")
            rows.append(Row("decode", f"transformers bfloat16, batch {batch}, context {arguments.context}", "p50", p50, "ms"))
    if arguments.write:
        append(rows)


if __name__ == "__main__":
    main()
