"""Decode steps of a large model on one GPU, by batch, context, KV format and form of the experts, beside the byte limit.

    python -m benchmarks.decode --experts int4 --trunk stored,int8 --kv e2m0 --batch 1,16,64 --context 4096
    python -m benchmarks.decode --all --peer --write        (what results.csv and the README have; about 150 s on an H200)

Runs the router's engine (scheduler, buffers, captured decoder, sampling, publishing) without its API, on a cache filled with
random keys and values. Told are the time between two tokens of a stream, which is what users see, and the time from planning a
step to its tokens, which is longer where steps run ahead. The byte limit is what a step must read (weights of the experts
touched, trunk, KV) over the copy bandwidth measured in the same run. `--peer` times transformers' own model of the same sizes
in bfloat16, eager, on the same cache lengths.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product

import numpy as np
import torch

from benchmarks.decode_rig import PAGE, Measured, Rig, bandwidth, collect, peer, profile
from benchmarks.results import Row, append
from forefetch.telemetry.ring import Timings

INTRUSION = 4096  # tokens of a prompt that enters while others decode, and their context
INTRUDED = (1, 16)


@dataclass(frozen=True)
class Case:
    """One cell of the sweep."""

    experts: str
    kv: str
    batch: int
    context: int
    trunk: str = "stored"

    def __str__(self) -> str:
        trunk = "" if self.trunk == "stored" else f"{self.trunk} trunk, "
        return f"{self.experts} experts, {trunk}{self.kv} KV, batch {self.batch}, context {self.context}"

    def like(self, other: Case) -> bool:
        """Whether both can use one cache."""
        return (self.experts, self.trunk, self.kv) == (other.experts, other.trunk, other.kv)


def percentiles(values: list[float]) -> tuple[float, float]:
    """p50 and p99."""
    return float(np.percentile(values, 50)), float(np.percentile(values, 99))


def parts(timings: list[Timings]) -> str:
    """A step's parts, as the engine's own telemetry has them, milliseconds."""
    fields = ("attention_ns", "gate_ns", "link_ns", "combine_ns", "sampling_ns")
    shares = (float(np.median([getattr(each, name) for each in timings])) / 1e6 for name in fields)
    names = ("attention", "gate", "experts", "combine", "rest")
    return ", ".join(f"{name} {value:.2f}" for name, value in zip(names, shares, strict=True))


def rows_of(what: str, found: Measured, limit: float) -> list[Row]:
    """What results.csv is told of a cell."""
    (p50, p99), (latency, _) = percentiles(found.gaps), percentiles(found.latency)
    figures = {"p50": p50, "p99": p99, "plan to token p50": latency, "byte limit": limit}
    return [Row("decode", what, name, value, "ms") for name, value in figures.items()]


def cases(arguments: argparse.Namespace) -> Iterator[Case]:
    """The cells asked for, so that experts change least often, then trunks, then caches."""
    sizes = [map(int, each.split(",")) for each in (arguments.context, arguments.batch)]
    kinds = [each.split(",") for each in (arguments.experts, arguments.trunk, arguments.kv)]
    for experts, trunk, kv, context, batch in product(*kinds, *sizes):
        yield Case(experts, kv, batch, context, trunk)


def pages_of(case: Case, steps: int) -> int:
    """Pages that its requests reserve, and an intruder's."""
    return 1 + case.batch * -(-(case.context + max(steps, 128) + 16) // PAGE) + -(-INTRUSION // PAGE)


def fits(rig: Rig, case: Case, steps: int) -> bool:
    """Whether its cache leaves room for the rest; 64 streams of 32k tokens in 16 bits are 206 GB."""
    if case.kv != "bfloat16":
        return True
    needed = pages_of(case, steps) * rig.spec.kv_bytes_per_token(2) * PAGE
    experts = rig.experts.weight_bytes if rig.experts is not None else 0
    return bool(needed + experts < torch.cuda.mem_get_info()[1] - (12 << 30))


def sweep(rig: Rig, wanted: list[Case], arguments: argparse.Namespace, speed: float) -> Iterator[list[Row]]:
    """Measures all cells, printing as it goes; the rows of each."""
    held = ("", "", "")  # experts, trunk, cache
    for case in wanted:
        if case.experts != held[0]:
            rig.put_experts(case.experts)
            held = (case.experts, "", "")
            print(f"{case.experts} experts: {rig.experts.weight_bytes / 1e9:.1f} GB", flush=True)
        if case.trunk != held[1]:
            rig.put_trunk(case.trunk)
            held = (case.experts, case.trunk, "")
        alike = [c for c in wanted if c.like(case) and fits(rig, c, arguments.steps)]
        if case not in alike:
            print(f"{case}: its cache does not fit", flush=True)
            continue
        if case.kv != held[2]:
            most = max(pages_of(c, arguments.steps) for c in alike)
            rig.put_cache(case.kv, most, max(c.batch for c in alike) + 1)
            held = (case.experts, case.trunk, case.kv)
        found = rig.measure(case.batch, case.context, arguments.steps, ahead=not arguments.in_turn)
        limit = rig.step_bytes(case.batch, case.context) / speed * 1e3
        (p50, p99), (latency, _) = percentiles(found.gaps), percentiles(found.latency)
        print(f"{case}: p50 {p50:.2f} ms, p99 {p99:.2f} ms, plan to token {latency:.2f} ms, bytes allow {limit:.2f} ms")
        print(f"  {parts(found.timings)}", flush=True)
        if arguments.profile:
            profile(rig, case.batch, case.context)
        yield rows_of(f"{arguments.model} {case}", found, limit)
        if arguments.prompt_rows and case.context == INTRUSION and case.batch in INTRUDED and case.experts == "int4":
            yield list(intrusions(rig, case, arguments))


def intrusions(rig: Rig, case: Case, arguments: argparse.Namespace) -> Iterator[Row]:
    """What running streams notice of a prompt that enters, by how many rows of it a step takes."""
    for rows in map(int, arguments.prompt_rows.split(",")):
        gaps, first = rig.intrusion(case.batch, case.context, INTRUSION, rows)
        p50, p99 = percentiles(gaps)
        what = f"while a prompt of {INTRUSION} enters by {rows}"
        print(f"  {what}: p50 {p50:.2f} ms, p99 {p99:.2f} ms, its first token after {first:.0f} ms", flush=True)
        figures = {"p50": p50, "p99": p99, "its first token": first}
        yield from (Row("decode", f"{arguments.model} {case}, {what}", name, value, "ms") for name, value in figures.items())


def main() -> None:
    """See the module."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="synthetic:qwen3-30b-a3b")
    parser.add_argument("--experts", default="int4", help="how experts are stored: bfloat16, int8, int4")
    parser.add_argument("--trunk", default="stored", help="how the trunk's matrices are kept: stored, int8")
    parser.add_argument("--kv", default="bfloat16", help="bfloat16, or a sealed format: e2m0, asym2, asym3, mixed, fp4")
    parser.add_argument("--batch", default="1,4,16,64")
    parser.add_argument("--context", default="4096")
    parser.add_argument("--steps", type=int, default=128, help="decode steps of a cell; a page is sealed every 128 tokens")
    parser.add_argument("--all", action="store_true", help="int4 and bfloat16 experts, e2m0 and bfloat16 KV, 1k, 4k and 32k")
    parser.add_argument("--prompt-rows", default="", help="also time tokens while a prompt enters by so many rows: 64,512")
    parser.add_argument("--in-turn", action="store_true", help="read each step before the next is launched")
    parser.add_argument("--peer", action="store_true", help="time transformers too, at the first context")
    parser.add_argument("--profile", action="store_true", help="print each step's kernels")
    parser.add_argument("--write", action="store_true", help="append to results.csv")
    arguments = parser.parse_args()
    if arguments.all:
        arguments.experts, arguments.kv, arguments.context = "int4,bfloat16", "e2m0,bfloat16", "4096,1024,32768"
        arguments.prompt_rows = "64,128,512"
    speed, wanted = bandwidth(), list(cases(arguments))
    print(f"copy bandwidth {speed / 1e12:.2f} TB/s")
    keep = append if arguments.write else list
    rig = Rig(arguments.model)
    for rows in sweep(rig, wanted, arguments, speed):
        keep(rows)
    spec = rig.spec
    del rig
    collect()
    if arguments.peer:
        contexts = arguments.context.split(",")
        for batch, times in peer(spec, arguments.model, list(map(int, arguments.batch.split(","))), int(contexts[0])):
            p50 = float(np.median(times))
            print(f"transformers, bfloat16, batch {batch}: p50 {p50:.1f} ms", flush=True)
            keep([Row("decode", f"transformers bfloat16, batch {batch}, context {contexts[0]}", "p50", p50, "ms")])


if __name__ == "__main__":
    main()
