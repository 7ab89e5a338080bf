"""What half the slots cost, with hints and without: decode time of real clusters, side by side in one run.

    python -m benchmarks.expert_slots [--quick] [--model models/reference] [--link local|shm|grpc] [--workers 1] [--record]

With the defaults it takes some 80 s on two quiet cores. All clusters are up at the same time and take turns round by round,
each with other documents, so that what disturbs the machine disturbs all alike. The
time of a token is that between two tokens of a stream, its median over all rounds. Slots and hints must not change a token of
an answer, or the run ends in an error. --record adds rows to results.csv.
"""

from __future__ import annotations

import argparse
import asyncio
import os
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from statistics import median
from time import perf_counter

from benchmarks.results import Row, append
from forefetch.client import Client, SyncClient
from forefetch.cluster import Cluster, ClusterConfig, Extra

TEXTS = ("conversation", "code", "prose")
PROMPT_CHARACTERS = 240


@dataclass(frozen=True)
class Case:
    """An arrangement. `hints`: what the router's --hints is set to."""

    name: str
    slots: str
    experts: str
    hints: str
    miss: str = "wait"


def cases(share: str, hints: str, formats: list[str]) -> list[Case]:
    found = []
    for experts in formats:
        found.append(Case(f"{experts}, resident", "100%", experts, "off"))
        found.append(Case(f"{experts}, {share}, no hints", share, experts, "off"))
        found.append(Case(f"{experts}, {share}, hints", share, experts, hints))
        if experts == "stored":
            found.append(Case(f"{experts}, {share}, in place", share, experts, "off", "in-place"))
    return found


@dataclass
class Measured:
    """Of one case and one number of streams."""

    gaps_ms: list[float] = field(default_factory=list)
    copy_wait_ms: float = 0.0  # of the last steps, their mean
    lookahead_ms: float = 0.0
    answers: list[list[int]] = field(default_factory=list)


def prompts(model: Path, streams: int, first: int) -> list[str]:
    """Beginnings of held-out documents from the `first` on, of all texts in turn."""
    texts = [(model / "heldout" / f"{name}.txt").read_text().split("<|endoftext|>\n") for name in TEXTS]
    found = []
    for i in range(first, first + streams):
        documents = [text for text in texts[i % len(texts)][1:] if text.strip()]
        found.append(documents[i // len(texts) % len(documents)][:PROMPT_CHARACTERS])
    return found


async def one_round(address: str, asked: list[str], tokens: int) -> tuple[list[float], list[list[int]]]:
    """(ms between tokens, ids) of one stream for each prompt."""

    async def stream(client: Client, prompt: str) -> tuple[list[float], list[int]]:
        times, ids = [], []
        async for event in client.generate(prompt, max_tokens=tokens, ignore_eos=True, temperature=0.0):
            if hasattr(event, "token_id"):
                times.append(perf_counter())
                ids.append(event.token_id)
        return [1e3 * (b - a) for a, b in pairwise(times)], ids

    async with Client(address) as client:
        results = await asyncio.gather(*(stream(client, prompt) for prompt in asked))
    return [gap for gaps, _ in results for gap in gaps], [ids for _, ids in results]


def start(stack: ExitStack, case: Case, args: argparse.Namespace) -> Cluster:
    settings = {
        "model": str(args.model),
        "workers": args.workers,
        "link": args.link,
        "slots": case.slots,
        "experts": case.experts,
        "miss": case.miss,
    }
    config = ClusterConfig(**settings, port=0, kv=False, device=args.device)
    return stack.enter_context(Cluster.start(config, extra=Extra(router=(f"--hints={case.hints}",))))


def measure(args: argparse.Namespace, arranged: list[Case], streams: tuple[int, ...]) -> dict[tuple[str, int], Measured]:
    found = {(case.name, count): Measured() for case in arranged for count in streams}
    with ExitStack() as stack:
        with ThreadPoolExecutor(2) as pool:
            clusters = list(zip(arranged, pool.map(lambda case: start(stack, case, args), arranged), strict=True))
        for count in streams:
            for number in range(-1, args.rounds):
                asked = prompts(args.model, count, count * (number + 1))
                for case, cluster in clusters:
                    gaps, answers = asyncio.run(one_round(cluster.address, asked, args.tokens if number >= 0 else 16))
                    if number >= 0:  # the first round warms up
                        cell = found[case.name, count]
                        cell.gaps_ms += gaps
                        cell.answers += answers
            for case, cluster in clusters:
                with SyncClient(cluster.address) as client:
                    mean = client.stats().mean_step
                cell = found[case.name, count]
                cell.copy_wait_ms, cell.lookahead_ms = mean.copy_wait_ns / 1e6, mean.lookahead_ns / 1e6
    return found


def check(arranged: list[Case], streams: tuple[int, ...], found: dict[tuple[str, int], Measured]) -> None:
    """Slots and hints must not change a token."""
    for count in streams:
        for case in arranged:
            reference = found[f"{case.experts}, resident", count].answers
            if found[case.name, count].answers != reference:
                raise SystemExit(f"{case.name}, {count} streams: not the resident answer")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, default=Path("models/reference"))
    parser.add_argument("--link", default="local", help="how router and worker are joined (%(default)s)")
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--share", default="50%", help="slots of the cases that are not resident (%(default)s)")
    parser.add_argument("--hints", default="plain", help="what hints are set to where there are any (%(default)s)")
    parser.add_argument("--experts", nargs="+", default=["stored", "int8"], help="formats (%(default)s)")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--tokens", type=int, default=96, help="of each stream and round (%(default)s)")
    parser.add_argument("--quick", action="store_true", help="one stream, two short rounds")
    parser.add_argument("--record", action="store_true", help="add rows to results.csv")
    args = parser.parse_args()
    streams: tuple[int, ...] = (1,) if args.quick else (1, 4)
    if args.quick:
        args.rounds, args.tokens = 2, 24
    arranged = cases(args.share, args.hints, args.experts)
    found = measure(args, arranged, streams)
    check(arranged, streams, found)
    rows = []
    print(f"\n{args.model}, link {args.link}, {len(os.sched_getaffinity(0))} cores, {streams} streams")
    print("median ms between tokens, x resident; of a mean step: ms of copy wait, ms of lookahead that nothing hid")
    for case in arranged:
        cells = []
        for count in streams:
            cell, base = found[case.name, count], median(found[f"{case.experts}, resident", count].gaps_ms)
            value = median(cell.gaps_ms)
            cells.append(f"{value:8.2f} {value / base:5.2f}x {cell.copy_wait_ms:6.2f} {cell.lookahead_ms:6.2f}")
            label = f"{args.model.name} {args.link}, {case.name}, {count} streams"
            rows.append(Row("expert_slots", label, "TPOT p50", value, "ms"))
            rows.append(Row("expert_slots", label, "copy wait", cell.copy_wait_ms, "ms"))
        print(f"{case.name:28}" + "".join(f"{cell:>34}" for cell in cells))
    if args.record:
        append(rows)


if __name__ == "__main__":
    main()
