"""What hints are worth to a cluster whose workers have fewer slots than experts: one model, every mode, in one run.

    python -m benchmarks.hints [--model DIR] [--slots 50%] [--streams 1 8] [--tokens 64] [--save]

Each mode gets a cluster of its own (a router and two workers over shared memory) and the same prompts, beginnings of the
model's held-out documents. Answers must be the same in every mode. Recall in service is the share of the distinct experts of a
step that any hint had named; hits, late and misses are what the workers report about the experts that their calls needed.
"""

from __future__ import annotations

import argparse
import asyncio
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter

from benchmarks.results import Row, append
from forefetch.client import Client, Completion
from forefetch.cluster import Cluster, ClusterConfig
from forefetch.v1 import router_pb2

MODES = ("off", "plain", "attention", "auto")
PROMPT_CHARACTERS = 200


@dataclass(frozen=True)
class Outcome:
    """One mode at one number of streams."""

    answers: list[list[int]]
    tokens_per_s: float
    stats: router_pb2.GetStatsResponse

    def total(self, field: str) -> int:
        """Of all layers."""
        return sum(int(getattr(layer, field)) for layer in self.stats.hints.layers)

    def recall(self, kind: str) -> float:
        """Share of the chosen that hints of a kind named; over layers for which something was named."""
        chosen = sum(layer.chosen for layer in self.stats.hints.layers if getattr(layer, kind).named)
        return sum(getattr(layer, kind).found for layer in self.stats.hints.layers) / chosen if chosen else 0.0

    def figures(self) -> dict[str, tuple[float, str]]:
        """Name -> value, unit."""
        needed = sum(self.total(name) for name in ("hits", "late", "misses", "resident")) or 1
        shares = {name: (self.total(name) / needed, "share") for name in ("hits", "late", "misses")}
        step, steps = self.stats.mean_step, max(self.stats.steps, 1)
        return {
            "tokens": (self.tokens_per_s, "tokens/s"),
            "recall": (self.recall("all"), "share"),
            "recall next": (self.recall("next"), "share"),
            **shares,
            "copied": (self.total("copied_bytes") / 1e6 / steps, "MB/step"),
            "wasted": (self.total("wasted_bytes") / 1e6 / steps, "MB/step"),
            "copy wait": (step.copy_wait_ns / 1e6, "ms/step"),
            "heads": (step.lookahead_ns / 1e6, "ms/step"),
            "heads hidden": (step.lookahead_hidden_ns / 1e6, "ms/step"),
            "step": (step.total_ns / 1e6, "ms"),
        }


def prompts(model: Path, count: int) -> list[str]:
    """Beginnings of held-out documents, domains in turn."""
    files = sorted((model / "heldout").glob("*.txt"))
    documents = [file.read_text(encoding="utf-8").split("<|endoftext|>\n") for file in files]
    turns = [text[:PROMPT_CHARACTERS] for group in zip(*documents, strict=False) for text in group]
    return turns[:count]


async def ask(address: str, texts: list[str], tokens: int) -> tuple[list[Completion], float, router_pb2.GetStatsResponse]:
    """All prompts at once."""
    async with Client(address) as client:
        started = perf_counter()
        asked = [client.complete(text, max_tokens=tokens, temperature=0.0, ignore_eos=True) for text in texts]
        return await asyncio.gather(*asked), perf_counter() - started, await client.stats()


def run(model: Path, mode: str, slots: str, streams: int, tokens: int) -> Outcome:
    """A cluster, its answers, and what it counted."""
    # Without heads nothing is counted but misses: what workers say is there in every mode.
    config = ClusterConfig(model=str(model), workers=2, link="shm", kv=False, port=0, slots=slots, hints=mode, device="cpu")
    with Cluster.start(config) as cluster:
        answers, seconds, stats = asyncio.run(ask(cluster.address, prompts(model, streams), tokens))
    return Outcome([answer.token_ids for answer in answers], streams * tokens / seconds, stats)


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, default=Path("models/reference"))
    parser.add_argument("--slots", default="50%")
    parser.add_argument("--streams", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--save", action="store_true", help="append to results.csv")
    arguments = parser.parse_args()
    rows: list[Row] = []
    for streams in arguments.streams:
        outcomes = {mode: run(arguments.model, mode, arguments.slots, streams, arguments.tokens) for mode in MODES}
        same = all(outcome.answers == outcomes["off"].answers for outcome in outcomes.values())
        print(f"\n{streams} streams, {arguments.slots} slots; answers {'equal' if same else 'DIFFER'}")
        for mode, outcome in outcomes.items():
            found = outcome.figures()
            print(
                f"  {mode:10} (at the end {outcome.stats.hints.mode})  "
                + "  ".join(f"{name} {value:.3g}" for name, (value, _) in found.items())
            )
            case = f"{arguments.model.name}, {streams} streams, {arguments.slots} slots, hints {mode}"
            rows += [Row("hints", case, name, value, unit) for name, (value, unit) in found.items()]
    if arguments.save:
        append(rows)


if __name__ == "__main__":
    main()
