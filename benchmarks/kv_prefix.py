"""What the KV service gives and costs a router: time to first token with a cached prefix, time per token while blocks are sent.

    python -m benchmarks.kv_prefix [--quick] [--model DIR]

Cold and warm are the same prompts, one after the other, on the same router: first computed, then, once the service holds their
blocks, sent again. A router keeps no prefix of its own; the run ends with an error unless the service's counters say that every
block was loaded. The cost of handing over is the same streams on routers with and without a KV service, in short turns.
It takes about two minutes on a quiet machine and never much more than three.
"""

from __future__ import annotations

import argparse
import asyncio
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median, quantiles

from benchmarks.kv_store import cpu_s
from benchmarks.results import Row, append
from forefetch.cluster import Cluster, ClusterConfig, Extra

PREFIX = 2_000
STREAMS = 8
LEAST_ROUNDS = 4
REFERENCE = Path(__file__).parent.parent / "models" / "reference"


@contextmanager
def cluster(model: Path, kv: bool, kv_format: str = "auto", kv_flags: Sequence[str] = ()) -> Iterator[Cluster]:
    """Router and workers in one process, so that nothing but the KV service is beside it."""
    config = ClusterConfig(model=str(model), link="local", kv=kv, kv_format=kv_format, port=0, device="cpu")
    with Cluster.start(config, extra=Extra(kv=kv_flags)) as running:
        yield running


def prompt(seed: int, length: int, vocab: int) -> list[int]:
    """Ids that no other seed shares a page of."""
    return [(7 + 131 * seed + 17 * i * (seed + 1)) % (vocab - 10) + 5 for i in range(length)]


def first_token(model: Path, length: int, rounds: int, kv_format: str = "auto") -> list[Row]:
    """Cold and warm time to first token, milliseconds as the client sees them."""
    from forefetch.client import SyncClient

    cold, warm = [], []
    with cluster(model, kv=True, kv_format=kv_format) as running, SyncClient(running.address) as client:
        described = client.describe()
        pages = length // described.page_size
        for seed in range(rounds + 1):
            ids = prompt(seed, length, described.vocab_size)
            first = client.complete(ids, max_tokens=2, ignore_eos=True, temperature=0.0)
            while client.stats().kv.blocks_waiting:
                time.sleep(0.02)
            second = client.complete(ids, max_tokens=2, ignore_eos=True, temperature=0.0)
            if (first.usage.cached_tokens, second.usage.cached_tokens) != (0, pages * described.page_size):
                raise SystemExit(f"cached {first.usage.cached_tokens}, then {second.usage.cached_tokens} tokens: no fair pair")
            if first.token_ids != second.token_ids:
                raise SystemExit("the warm answer is another one")
            if seed:  # the first pair warms caches of all kinds
                cold.append(first.ttft_ms)
                warm.append(second.ttft_ms)
        kv = client.stats().kv
        if kv.blocks_loaded + kv.rows_loaded != (rounds + 1) * pages:  # rows stand for the last block
            raise SystemExit("not every block came from the KV service")
    ratio = median(a / b for a, b in zip(cold, warm, strict=True))
    told = f"cold {median(cold):.0f} ms, warm {median(warm):.0f} ms, {ratio:.1f}x"
    print(f"first token of {length} tokens, K and V {kv_format}: {told}")
    case = f"{model.name} prefix {length}" + ("" if kv_format == "auto" else f" {kv_format}")
    return [
        Row("kv_prefix", case, "cold ttft p50", median(cold), "ms"),
        Row("kv_prefix", case, "warm ttft p50", median(warm), "ms"),
        Row("kv_prefix", case, "cold / warm", ratio, "ratio"),
    ]


@dataclass
class Arm:
    """A way to run the streams: a router, whether with sessions, and what each round took."""

    name: str
    address: str
    pid: int
    sessions: bool = False
    wall_ms: list[float] = field(default_factory=list)  # between two tokens of a stream, mean of a round
    cpu_ms: list[float] = field(default_factory=list)  # of the router, per token of the round


def per_token(model: Path, tokens: int, seconds: float) -> list[Row]:
    """Time per token of STREAMS streams: without a KV service, with one, and with sessions on top.

    Rounds are short and the arms take turns, in changing order, until `seconds` have passed: what disturbs the machine meets
    all. What is reported of a change is the median of the differences within a round and its standard error."""
    with cluster(model, kv=False) as without, cluster(model, kv=True) as with_kv:
        pids = [router.processes["router"].pid for router in (without, with_kv)]
        arms = [
            Arm("without", without.address, pids[0]),
            Arm("handed over", with_kv.address, pids[1]),
            Arm("with sessions", with_kv.address, pids[1], sessions=True),
        ]
        blocks, until, turn = 0, time.monotonic() + seconds, 0
        while time.monotonic() < until or turn < LEAST_ROUNDS:
            for arm in arms if turn % 2 else arms[::-1]:
                began = cpu_s(arm.pid)
                gap, sent = asyncio.run(_streams(arm.address, turn, tokens, arm.sessions))
                if turn:  # the first round is for warming up
                    arm.wall_ms.append(gap)
                    arm.cpu_ms.append(1e3 * (cpu_s(arm.pid) - began) / (tokens * STREAMS))
                    blocks += sent
            turn += 1
    if not blocks:
        raise SystemExit("no block was handed over")
    print(f"{turn - 1} rounds, {blocks} blocks handed over")
    return [row for arm in arms for row in _rows(model.name, arm, arms[0])]


def _rows(model: str, arm: Arm, base: Arm) -> Iterator[Row]:
    case = f"{model} {STREAMS} streams, {arm.name}"
    for metric, mine, theirs in (("time per token", arm.wall_ms, base.wall_ms), ("CPU per token", arm.cpu_ms, base.cpu_ms)):
        yield Row("kv_prefix", case, metric, median(mine), "ms")
        changes = [100 * (a / b - 1) for a, b in zip(mine, theirs, strict=True)]
        low, change, high = quantiles(changes, n=4)
        error = 0.93 * (high - low) / len(changes) ** 0.5  # of the median, if the differences are normal
        print(f"{metric} at {STREAMS} streams, {arm.name}: {median(mine):.2f} ms, {change:+.1f} % +- {error:.1f}")
        if arm is not base:
            yield Row("kv_prefix", case, f"{metric}, change", change, "%")
            yield Row("kv_prefix", case, f"{metric}, standard error of the change", error, "%")


async def _streams(address: str, turn: int, tokens: int, sessions: bool) -> tuple[float, int]:
    """(mean milliseconds between tokens over all streams, blocks handed over). Each stream fills a page, and no two at once."""
    from forefetch.client import Client

    async with Client(address) as client:
        described = await client.describe()
        sent = (await client.stats()).kv.blocks_sent

        async def one(stream: int) -> float:
            length = described.page_size - 1 - stream * (tokens // STREAMS)
            ids = prompt(1_000 + turn * STREAMS + stream + 100_000 * sessions, length, described.vocab_size)
            options = {"session": f"bench-{turn}-{stream}", "session_mode": "start"} if sessions else {}
            answer = await client.complete(ids, max_tokens=tokens, ignore_eos=True, temperature=0.0, **options)  # type: ignore[arg-type]
            return (answer.tokens[-1].at_ms - answer.tokens[0].at_ms) / (tokens - 1)

        found = await asyncio.gather(*(one(stream) for stream in range(STREAMS)))
        while (kv := (await client.stats()).kv).blocks_waiting:  # the next round must not pay for this one
            await asyncio.sleep(0.02)
        return sum(found) / len(found), kv.blocks_sent - sent


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="fewer rounds; prints, but records nothing")
    parser.add_argument("--model", type=Path, default=REFERENCE, help="the checkpoint (default: models/reference)")
    args = parser.parse_args()
    rows = first_token(args.model, PREFIX, 2 if args.quick else 7)
    rows += first_token(args.model, PREFIX, 2 if args.quick else 5, "e2m0")
    rows += per_token(args.model, 128, 10 if args.quick else 110)
    if not args.quick:
        append(rows)


if __name__ == "__main__":
    main()
