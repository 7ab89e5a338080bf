"""Router and worker on two GPUs against both on one: step time by batch, and the bare hop between the GPUs.

    python -m benchmarks.p2p --hop
    python -m benchmarks.p2p --model synthetic:qwen3-30b-a3b --experts int4 --batch 1,16,64 --context 4096

Steps are the router's own, through its engine, running ahead, and told are milliseconds between two tokens of a stream, as in
`benchmarks.decode`: on cuda:0 with all experts beside it, then over a p2p lane to a worker process whose experts are on cuda:1,
in one part and in two; with --spread over a lane to a worker that has half of the experts, the other half beside the trunk, in
one part. Logits of a first step are compared, bit for bit.
`--hop` times a recorded step of 48 calls whose worker copies its rows: what a layer pays beyond gate and experts.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import numpy as np
import torch

from benchmarks.decode_rig import PAGE, Measured, Rig
from benchmarks.results import Row, append
from expert_worker.client import ExpertConfig, beside, connect, local, open_lane
from forefetch import settings
from forefetch.kernels.hop import triton as hop
from forefetch.p2p.device import DeviceLanes, DevicePort
from forefetch.p2p.lane import LaneShape
from forefetch.p2p.memory import Mapped, Meeting, visit
from forefetch.process import Process
from router_service.admission import Admitted, SamplingParams
from router_service.captured import CapturedTrunk, CudaRecorder
from router_service.layouts import LayoutBuffers
from router_service.p2p import LaneTrunk, Opener
from router_service.p2p_decoder import LaneExperts, step_shape
from router_service.pages import PagePool
from router_service.scheduler import Chunk, Plan, Request
from router_service.sealed import SealedCache
from router_service.workers import Workers

CALLS, REPLAYS, PATIENCE_S, WARM = 48, 200, 5.0, 8
BENCHMARK = "p2p"


def main() -> None:
    """See the module."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hop", action="store_true", help="the bare hop only")
    parser.add_argument("--model", default="synthetic:qwen3-30b-a3b")
    parser.add_argument("--experts", default="int4", help="bfloat16, int8, int4")
    parser.add_argument("--kv", default="e2m0", help="bfloat16, or a sealed format")
    parser.add_argument("--batch", default="64,16,1")
    parser.add_argument("--context", type=int, default=4096)
    parser.add_argument("--steps", type=int, default=128)
    parser.add_argument("--spread", action="store_true", help="two GPUs: half of the experts on each, in one part")
    parser.add_argument("--slots", default="100%", help="of the worker, whose GPU brings experts in place; no hints")
    parser.add_argument("--write", action="store_true", help="append to results.csv")
    arguments = parser.parse_args()
    for row in hops() if arguments.hop else decodes(arguments):
        print(f"{row.case}: {row.metric} {row.value:.3f} {row.unit}", flush=True)
        if arguments.write:
            append([row])


# ---- the bare hop ----


def hops() -> Iterator[Row]:
    """Recorded calls between two processes, for 1 and 64 rows of 2,048 in bfloat16."""
    for count in (1, 64):
        shape = LaneShape(count, 2048, 8, CALLS, 2)
        outbox, meeting = Mapped(shape.outbox_bytes, torch.device("cuda:0")), Meeting(60.0)
        child = torch.multiprocessing.get_context("spawn").Process(target=_echo, args=(meeting.name, shape))
        child.start()
        inbox = Mapped(shape.inbox_bytes, torch.device("cuda:0"), meeting.host(outbox.export()))
        times = sorted(_router(DevicePort(inbox, outbox, shape, torch.bfloat16), shape))
        child.join(60)
        case = f"hop in a recorded step, {count} rows x 2048 bfloat16"
        for share, metric in ((0.5, "p50"), (0.99, "p99")):
            yield Row(BENCHMARK, case, metric, times[int(share * (len(times) - 1))] / CALLS * 1e6, "us")


def _router(port: DevicePort, shape: LaneShape) -> Iterator[float]:
    """Seconds of replays of CALLS calls."""
    device = torch.device("cuda:0")
    lanes = DeviceLanes(1, shape, 128, True, PATIENCE_S, device)
    x = torch.randn(shape.rows, shape.hidden, device=device, dtype=torch.bfloat16)
    logits = torch.randn(shape.rows, 128, device=device).bfloat16()
    idle = torch.zeros(shape.rows, 1, dtype=torch.bool, device=device)
    out = torch.empty_like(x)

    def step() -> None:
        for place in range(CALLS):
            lanes.put(place, 0, x, logits, idle)
            lanes.take(0, out, 0)
        lanes.mirror()

    replay = CudaRecorder(device)(step)
    lanes.attach([port], torch.zeros(1, CALLS, 128, dtype=torch.int32))
    for number in range(REPLAYS):
        began = time.perf_counter()
        replay()
        torch.cuda.synchronize()
        if number >= 20:
            yield time.perf_counter() - began
        if int(lanes.verdict):
            raise RuntimeError(lanes.reason(0))
    print("rows came back:", torch.equal(out, x), flush=True)


def _echo(name: str, shape: LaneShape) -> None:
    """The worker's side: results are copies of the rows."""
    device = torch.device("cuda:1")
    torch.cuda.set_device(device)
    inbox = Mapped(shape.inbox_bytes, device)
    outbox = Mapped(shape.outbox_bytes, device, visit(name, inbox.export(), 60.0))
    port = DevicePort(inbox, outbox, shape, torch.bfloat16)
    state, lock = torch.zeros(3, dtype=torch.int32, device=device), torch.zeros(1, dtype=torch.int32, device=device)

    def turn(answer: bool, wait: bool, patience_s: float = PATIENCE_S) -> None:
        hop.turn(port.asked, port.answered, state, lock, int(patience_s * 1e9), answer=answer, wait=wait)

    for flags in ((False, True), (True, True), (True, False)):
        turn(*flags, patience_s=0.0)
    state.zero_()
    lock.zero_()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        turn(False, True)
        for call in range(CALLS):
            port.results.copy_(port.x)
            turn(True, call < CALLS - 1)
    for _ in range(REPLAYS):
        graph.replay()
    torch.cuda.synchronize()


# ---- the whole step ----


@contextmanager
def worker_on(device: str, model: str, experts: str, spread: bool = False, more: Sequence[str] = ()) -> Iterator[Process]:
    """A worker process with all experts, or the second half. more: flags."""
    flags = [f"--model={model}", "--allow-synthetic", f"--device={device}", f"--experts={experts}", "--max-rows=512"]
    flags += [*(["--shard=1", "--shards=2"] if spread else []), *more]
    environment = settings.child_environment()
    process = Process("worker", "expert_worker", flags, environment, on_line=lambda _, line: print("worker:", line))
    process.spawn()
    try:
        yield process
    finally:
        process.end(10.0)


def prepared(model: str, experts: str, kv: str, batch: int, context: int, steps: int = 0) -> Rig:
    """A trunk with all experts on cuda:0, and a cache for `batch` requests of `context` tokens and `steps` more."""
    rig = Rig(model)
    rig.put_experts(experts)
    rig.put_cache(kv, 1 + batch * width_of(context + steps), batch + 1)
    return rig


def width_of(tokens: int) -> int:
    """Pages of one request."""
    return -(-(tokens + PAGE) // PAGE)


def decodes(arguments: argparse.Namespace) -> Iterator[Row]:
    """One GPU, then two, by batch."""
    batches, context, steps = [int(part) for part in arguments.batch.split(",")], arguments.context, arguments.steps
    experts = "stored" if arguments.experts == "bfloat16" else arguments.experts
    slots = [] if arguments.slots == "100%" else [f"--slots={arguments.slots}", "--miss=in-place"]
    with worker_on("cuda:1", arguments.model, experts, arguments.spread, slots) as process:
        rig = prepared(arguments.model, arguments.experts, arguments.kv, max(batches), context, steps + WARM + 4)
        process.wait_ready(300.0)
        workers = table_of(rig, process, experts, arguments.spread)
        what = f"{arguments.model} {arguments.experts} experts, {arguments.kv} KV, context {context}"
        kept = [part.clone() for part in memory_of(rig)]
        for batch in batches:
            alone = Watched(rig, kept, batch, context, rig.recorded)
            yield from told(f"{what}, batch {batch}, one GPU", alone.measured(steps))
            for parts in (1, 2) if batch > 1 and not arguments.spread else (1,):
                pair = Watched(rig, kept, batch, context, partial(laned, rig, workers, batch, parts))
                found = pair.measured(steps)
                pair.model.close()  # type: ignore[attr-defined]
                same, apart = torch.equal(pair.first, alone.first), (pair.first - alone.first).abs().max()
                share = float(apart / alone.first.abs().max())
                print(f"batch {batch} in {parts}: bit for bit {same}; furthest {share:.2e} of the largest logit", flush=True)
                print(f"  {workers.lanes}", flush=True)
                how = "experts on both" if arguments.spread else f"rows in {parts}"
                how += f", {arguments.slots} in slots" if slots else ""
                yield from told(f"{what}, batch {batch}, two GPUs, {how}", found)
        workers.close()


def told(case: str, found: Measured) -> Iterator[Row]:
    """What results.csv is told of a case; times between two tokens of a stream, as in `benchmarks.decode`."""
    for share, metric in ((50, "p50"), (99, "p99")):
        yield Row(BENCHMARK, f"{case}, running ahead", metric, float(np.percentile(found.gaps, share)), "ms")


def memory_of(rig: Rig) -> list[torch.Tensor]:
    """What steps and commits change of the cache."""
    cache = rig.cache
    return [cache.pages, cache.tails, cache.sinks] if isinstance(cache, SealedCache) else [*cache.k, *cache.v]


class Watched:
    """Steps of `batch` rows by the model that `make` records, over a cache that begins as `kept` was. `first`: logits of a
    step of its own."""

    def __init__(
        self, rig: Rig, kept: list[torch.Tensor], batch: int, context: int, make: Callable[[LayoutBuffers], CapturedTrunk]
    ) -> None:
        self._rig, self._kept, self._batch, self._context, self._make = rig, kept, batch, context, make
        self.first = torch.empty(0)
        self.model: CapturedTrunk

    def measured(self, steps: int) -> Measured:
        """Through the engine, running ahead."""
        self._rig.model_of = self._made
        return self._rig.measure(self._batch, self._context, steps, warm=WARM)

    def _made(self, buffers: LayoutBuffers) -> CapturedTrunk:
        for part, as_it_was in zip(memory_of(self._rig), self._kept, strict=True):
            part.copy_(as_it_was)
        self.model = self._make(buffers)
        self.first = logits_of(self._rig, self.model, buffers, self._batch, self._context).float()
        return self.model


def table_of(rig: Rig, process: Process, experts: str, spread: bool = False) -> Workers:
    """A router's table with that one worker, connected, and before it, if they share, one in this process."""
    agreed: dict[str, Any] = {"digest": rig.checkpoint.digest, "hidden": rig.spec.hidden_size, "dtype": torch.bfloat16}
    link = connect(process.address, link="auto", max_rows=256, tls=None, timeout_s=10.0, experts=experts, **agreed)
    here = {"model": rig.model, "allow_synthetic": True, "device": "cuda:0", "experts": experts, "max_rows": 512}
    own = local(ExpertConfig(**here, dtype="bfloat16", shard=0, shards=2)) if spread else link  # type: ignore[arg-type]
    names = ["local", process.address] if spread else [process.address]
    workers = Workers(rig.spec, names, lambda name: own if name == "local" else link)
    workers.wait_complete(10.0)
    return workers


def buffers_of(batch: int, context: int) -> LayoutBuffers:
    """For steps of `batch` decoding rows."""
    sizes = {"max_tokens": batch, "max_batch": batch, "max_pages": width_of(context), "page_size": PAGE}
    return LayoutBuffers(**sizes, device=torch.device("cuda:0"), buckets=(batch,), chunk_rows=())


def laned(
    rig: Rig, workers: Workers, batch: int, parts: int, buffers: LayoutBuffers, patience_s: float = PATIENCE_S
) -> LaneTrunk:
    """The rig's trunk over a lane, recorded for `batch` rows in so many parts."""
    device, spec = torch.device("cuda:0"), rig.spec
    step = step_shape((batch, 0), batch if parts == 2 else 0)
    shape = LaneShape(batch, spec.hidden_size, spec.top_k, len(spec.moe_layers), 2)
    normed = spec.gate_rule == "topk_softmax" or spec.renormalise
    links = [worker.link for worker in workers.rows if worker.link is not None]
    own = beside(links[0], shape, device)
    lanes: Any = DeviceLanes(len(links), shape, spec.num_experts, normed, patience_s, device, -1 if own is None else 0)
    how: Any = {"device": device, "patience_s": patience_s, "timeout_s": 60.0}
    lanes.tells = any(link.info.moves for link in links)
    opener = Opener(lambda link: own if own and link is own.link else open_lane(link, shape, [step], **how))
    experts = LaneExperts(spec, lanes, batch, torch.bfloat16, device, own)
    model = LaneTrunk(rig.trunk, experts, buffers, lanes, workers, opener, lambda layout: step)
    model.warm_up()
    model.start(60.0)
    return model


def requests_of(rig: Rig, batch: int, context: int) -> list[Request]:
    """`batch` requests with `context` committed tokens each, always the same."""
    pool, draw, made = PagePool(rig.pages), np.random.default_rng(0), []
    for key in range(batch):
        tokens = tuple(draw.integers(0, rig.spec.vocab_size, context + 1).tolist())
        admitted = Admitted(tokens, 1 << 20, True, SamplingParams(), (), frozenset(), "bench")
        request = Request(key, str(key), tokens, admitted, 0.0, computed=context)
        request.lane, request.pages = key, pool.allocate(width_of(context)) or ()
        made.append(request)
    return made


def logits_of(
    rig: Rig, model: CapturedTrunk, buffers: LayoutBuffers, batch: int, context: int, number: int = 0
) -> torch.Tensor:
    """What a step of those requests gives. LinkDown when its lanes break."""
    requests = requests_of(rig, batch, context)
    filled = buffers.fill(number, Plan(tuple(Chunk(request, context, 1) for request in requests), ()))
    logits = model.forward(filled, None, None).clone()  # type: ignore[arg-type]
    torch.cuda.synchronize()
    model.confirm(number)
    return logits


if __name__ == "__main__":
    main()
