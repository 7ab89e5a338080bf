"""What users of one GPU get: time per token through gRPC, alone and in company, and while a long prompt enters.

    python -m benchmarks.serve --model synthetic:qwen3-30b-a3b --experts int4 --streams 1,16,64 --prompt 1024 --tokens 128

Starts a real router (link local) and reads every stream over gRPC from this process. `--intrude 4096` sends, once all streams
run, one prompt of that length and tells the gaps between tokens of the others while it enters.
"""

from __future__ import annotations

import argparse
import asyncio
from dataclasses import dataclass
from time import perf_counter

import numpy as np

from benchmarks.results import Row, append
from forefetch.answers import Token
from forefetch.client import Client
from forefetch.cluster import Cluster, ClusterConfig, Extra


@dataclass
class Stream:
    """Arrival of each token, seconds, and what the router says of the steps that made them."""

    sent: float
    times: list[float]
    steps_ms: list[float]

    def gaps_ms(self, begin: float, end: float) -> list[float]:
        """Times between tokens that came within begin..end."""
        return [(b - a) * 1e3 for a, b in zip(self.times, self.times[1:], strict=False) if begin <= b <= end]


async def stream(client: Client, prompt: list[int], tokens: int, started: asyncio.Event | None = None) -> Stream:
    """Reads one answer to its end."""
    found = Stream(perf_counter(), [], [])
    async for event in client.generate(prompt, max_tokens=tokens, ignore_eos=True, temperature=0.0):
        if isinstance(event, Token):
            found.times.append(perf_counter())
            found.steps_ms.append(event.timings.total_ms)
            if started is not None:
                started.set()
    return found


async def drive(address: str, streams: int, prompt: int, tokens: int, intrude: int) -> tuple[list[Stream], Stream | None]:
    """`streams` answers side by side, and the intruder's."""
    async with Client(address) as client:
        vocabulary = (await client.describe()).vocab_size
        draw = np.random.default_rng(streams)

        def ids(length: int) -> list[int]:
            return [int(token) for token in draw.integers(0, vocabulary, length)]

        events = [asyncio.Event() for _ in range(streams)]
        running = [asyncio.create_task(stream(client, ids(prompt), tokens, event)) for event in events]
        extra = None
        if intrude:
            await asyncio.gather(*(event.wait() for event in events))
            extra = await stream(client, ids(intrude), 1)
        return await asyncio.gather(*running), extra


def figures(found: list[Stream], extra: Stream | None) -> dict[str, float]:
    """Milliseconds; gaps count from when the last stream has its first token, so that all are there."""
    begin, end = max(s.times[0] for s in found), min(s.times[-1] for s in found)
    quiet = [gap for s in found for gap in s.gaps_ms(begin if extra is None else extra.times[-1], end)] or [float("nan")]
    steps = [step for s in found for step in s.steps_ms[-32:]]
    result = {
        "ttft p50": float(np.median([(s.times[0] - s.sent) * 1e3 for s in found])),
        "tpot p50": float(np.percentile(quiet, 50)),
        "tpot p99": float(np.percentile(quiet, 99)),
        "step p50": float(np.median(steps)),
    }
    if extra is not None:
        during = [gap for s in found for gap in s.gaps_ms(extra.sent, extra.times[-1])]
        result |= {
            "tpot p99 while a prompt enters": float(np.percentile(during, 99)),
            "its ttft": (extra.times[0] - extra.sent) * 1e3,
        }
    return result


def main() -> None:
    """See the module."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="synthetic:qwen3-30b-a3b")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--experts", default="int4")
    parser.add_argument("--kv-format", default="auto")
    parser.add_argument("--streams", default="1,16,64")
    parser.add_argument("--prompt", type=int, default=1024)
    parser.add_argument("--tokens", type=int, default=256)
    parser.add_argument("--intrude", type=int, default=0, help="length of a prompt that comes while the streams run")
    parser.add_argument("--router", default="", help="more flags for the router, separated by spaces")
    parser.add_argument("--write", action="store_true", help="append to results.csv")
    arguments = parser.parse_args()
    config = ClusterConfig(
        model=arguments.model,
        allow_synthetic=arguments.model.startswith("synthetic:"),
        device=arguments.device,
        link="local",
        kv=False,
        kv_format=arguments.kv_format,
        port=0,
    )
    flags = [f"--experts={arguments.experts}"] if arguments.experts else []
    flags += arguments.router.split()
    rows = []
    with Cluster.start(config, extra=Extra(router=flags)) as cluster:
        asyncio.run(drive(cluster.address, 2, 64, 8, 0))
        for count in map(int, arguments.streams.split(",")):
            found = asyncio.run(drive(cluster.address, count, arguments.prompt, arguments.tokens, arguments.intrude))
            told = figures(*found)
            print(f"{count:3} streams: " + ", ".join(f"{name} {value:.2f} ms" for name, value in told.items()), flush=True)
            what = f"{arguments.model} {arguments.experts} experts, {arguments.kv_format} KV"
            case = f"{what}, {count} streams, prompt {arguments.prompt}"
            rows += [Row("serve", case, name, value, "ms") for name, value in told.items()]
    if arguments.write:
        append(rows)


if __name__ == "__main__":
    main()
