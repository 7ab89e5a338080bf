"""What the KV service gives and costs a router: time to first token with a cached prefix, time per token while blocks are sent.

    python -m benchmarks.kv_prefix [--quick] [--model DIR]

Cold and warm are the same prompts, one after the other, on the same router: first computed, then, once the service holds their
blocks, sent again. A router keeps no prefix of its own; the run ends with an error unless the service's counters say that every
block was loaded. The cost of handing over is the same streams on routers with and without a KV service, in alternation.
"""

from __future__ import annotations

import argparse
import asyncio
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import median

from benchmarks.results import Row, append

PREFIX = 2_000
STREAMS = 8
REFERENCE = Path(__file__).parent.parent / "models" / "reference"


@contextmanager
def cluster(model: Path, kv: bool) -> Iterator[str]:
    """Router and workers in one process, so that nothing but the KV service is beside it."""
    from forefetch.cluster import Cluster, ClusterConfig

    with Cluster.start(ClusterConfig(model=str(model), link="local", kv=kv, port=0, device="cpu")) as running:
        yield running.address


def prompt(seed: int, length: int, vocab: int) -> list[int]:
    """Ids that no other seed shares a page of."""
    return [(7 + 131 * seed + 17 * i * (seed + 1)) % (vocab - 10) + 5 for i in range(length)]


def first_token(model: Path, length: int, rounds: int) -> list[Row]:
    """Cold and warm time to first token, milliseconds as the client sees them."""
    from forefetch.client import SyncClient

    cold, warm = [], []
    with cluster(model, kv=True) as address, SyncClient(address) as client:
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
        if client.stats().kv.blocks_loaded != (rounds + 1) * pages:
            raise SystemExit("not every block came from the KV service")
    ratio = median(a / b for a, b in zip(cold, warm, strict=True))
    print(f"first token of {length} tokens: cold {median(cold):.0f} ms, warm {median(warm):.0f} ms, {ratio:.1f}x")
    case = f"{model.name} prefix {length}"
    return [
        Row("kv_prefix", case, "cold ttft p50", median(cold), "ms"),
        Row("kv_prefix", case, "warm ttft p50", median(warm), "ms"),
        Row("kv_prefix", case, "cold / warm", ratio, "ratio"),
    ]


def per_token(model: Path, tokens: int, rounds: int) -> list[Row]:
    """Time per token of STREAMS streams: without a KV service, with one, and with sessions on top."""
    gaps: dict[str, list[float]] = {"without": [], "handed over": [], "with sessions": []}
    with cluster(model, kv=False) as without, cluster(model, kv=True) as with_kv:
        for turn in range(rounds + 1):
            for name, address in (("without", without), ("handed over", with_kv), ("with sessions", with_kv)):
                found = asyncio.run(_streams(address, turn, tokens, name == "with sessions"))
                gaps[name] += [found] if turn else []
    rows = []
    for name, values in gaps.items():
        change = median(a / b for a, b in zip(values, gaps["without"], strict=True)) - 1
        print(f"time per token at {STREAMS} streams, {name}: {median(values):.2f} ms ({change:+.1%})")
        rows.append(Row("kv_prefix", f"{model.name} {STREAMS} streams, {name}", "time per token", median(values), "ms"))
    return rows


async def _streams(address: str, turn: int, tokens: int, sessions: bool) -> float:
    """Mean gap between tokens over all streams, milliseconds."""
    from forefetch.client import Client

    async with Client(address) as client:
        vocab = (await client.describe()).vocab_size

        async def one(stream: int) -> float:
            ids = prompt(1_000 + turn * STREAMS + stream + 100_000 * sessions, 100, vocab)
            options = {"session": f"bench-{turn}-{stream}", "session_mode": "start"} if sessions else {}
            answer = await client.complete(ids, max_tokens=tokens, ignore_eos=True, temperature=0.0, **options)  # type: ignore[arg-type]
            return (answer.tokens[-1].at_ms - answer.tokens[0].at_ms) / (tokens - 1)

        found = await asyncio.gather(*(one(stream) for stream in range(STREAMS)))
        if sessions or (await client.stats()).kv.address:
            while (await client.stats()).kv.blocks_waiting:  # the next round must not pay for this one
                await asyncio.sleep(0.02)
        return sum(found) / len(found)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="fewer rounds; prints, but records nothing")
    parser.add_argument("--model", type=Path, default=REFERENCE, help="the checkpoint (default: models/reference)")
    args = parser.parse_args()
    rows = first_token(args.model, PREFIX, 2 if args.quick else 7)
    rows += per_token(args.model, 64 if args.quick else 256, 2 if args.quick else 7)
    if not args.quick:
        append(rows)


if __name__ == "__main__":
    main()
