"""Decode tokens per second on this machine's CPU, against transformers' generate: same checkpoint, same threads, one run.

    python -m benchmarks.decode_throughput [--quick] [--model DIR] [--halves]

Both sides decode greedily from the same prompts, end-of-sequence ignored. transformers' figure is the difference of two
calls (N and 1 new tokens), so that its prefill does not count; ours counts from the moment that every stream has its
first token. The share of equal tokens is printed beside: a fast wrong answer would show.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import tempfile
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter

from benchmarks.results import Row, append

PROMPT_TOKENS = 32
BATCHES = (1, 8, 32)
SYNTHETIC = {
    "hidden_size": 512,
    "num_hidden_layers": 8,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "num_experts": 64,
    "num_experts_per_tok": 8,
    "moe_intermediate_size": 128,
    "intermediate_size": 1024,
    "vocab_size": 8192,
    "max_position_embeddings": 4096,
    "norm_topk_prob": True,
}


@dataclass(frozen=True)
class Result:
    """Decode speed of one arrangement at one batch size."""

    tokens_per_s: float
    answers: list[list[int]]


def prompts(batch: int, vocab: int) -> list[list[int]]:
    """`batch` different prompts of PROMPT_TOKENS ids."""
    return [[(7 + 131 * row + 17 * i * (row + 1)) % (vocab - 10) + 5 for i in range(PROMPT_TOKENS)] for row in range(batch)]


def synthetic(folder: Path) -> Path:
    """A random Qwen3-MoE of 120 M parameters, written by transformers."""
    import torch
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    torch.manual_seed(0)
    config = Qwen3MoeConfig(**SYNTHETIC, initializer_range=0.1)
    Qwen3MoeForCausalLM(config).to(torch.float32).save_pretrained(folder)
    return folder


def transformers_results(model: Path, batches: tuple[int, ...], new_tokens: int, threads: int) -> dict[int, Result]:
    """transformers generate in float32, as it comes."""
    import torch
    from transformers import AutoModelForCausalLM, GenerationConfig

    # No end-of-sequence token: min_new_tokens would otherwise forbid it, and our side does not.
    greedy = {"do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    torch.set_num_threads(threads)
    oracle = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval()
    oracle.generation_config = GenerationConfig(**greedy)

    def run(ids: torch.Tensor, count: int) -> tuple[float, torch.Tensor]:
        started = perf_counter()
        with torch.inference_mode():
            mask, lengths = torch.ones_like(ids), {"min_new_tokens": count, "max_new_tokens": count}
            out = oracle.generate(ids, attention_mask=mask, generation_config=GenerationConfig(**greedy, **lengths))
        return perf_counter() - started, out

    results = {}
    for batch in batches:
        ids = torch.tensor(prompts(batch, oracle.config.vocab_size))
        run(ids, 4)
        rounds = [(run(ids, 1)[0], run(ids, new_tokens)) for _ in range(3)]
        spent = sorted(whole - first for first, (whole, _) in rounds)[1]
        answers = rounds[0][1][1][:, PROMPT_TOKENS:].tolist()
        results[batch] = Result(batch * (new_tokens - 1) / spent, answers)
    return results


def cluster_results(
    model: Path, batches: tuple[int, ...], new_tokens: int, *, link: str, workers: int, halves_from: int = 0
) -> dict[int, Result]:
    """A real cluster: processes, gRPC, one stream per prompt."""
    from forefetch.cluster import Cluster, ClusterConfig, Extra
    from forefetch.spec import ModelSpec

    vocab = ModelSpec.load(model).vocab_size
    config = ClusterConfig(model=str(model), workers=workers, link=link, port=0, kv=False, device="cpu")
    with Cluster.start(config, extra=Extra((f"--halves-from={halves_from}",))) as cluster:
        return asyncio.run(_drive(cluster.address, batches, new_tokens, vocab))


async def _drive(address: str, batches: tuple[int, ...], new_tokens: int, vocab: int) -> dict[int, Result]:
    from forefetch.client import Client

    async with Client(address) as client:
        results = {}
        for batch in batches:
            await _round(client, batch, 4, vocab)
            rounds = [await _round(client, batch, new_tokens, vocab) for _ in range(3)]
            results[batch] = sorted(rounds, key=lambda r: r.tokens_per_s)[1]
        return results


async def _round(client: object, batch: int, new_tokens: int, vocab: int) -> Result:
    async def one(prompt: list[int]) -> tuple[list[int], list[float]]:
        ids, times = [], []
        async for event in client.generate(prompt, max_tokens=new_tokens, ignore_eos=True, temperature=0.0):  # type: ignore[attr-defined]
            if hasattr(event, "token_id"):
                ids.append(event.token_id)
                times.append(perf_counter())
        return ids, times

    streams = await asyncio.gather(*(one(prompt) for prompt in prompts(batch, vocab)))
    begun, ended = max(times[0] for _, times in streams), max(times[-1] for _, times in streams)
    counted = sum(sum(time > begun for time in times) for _, times in streams)
    return Result(counted / (ended - begun), [ids for ids, _ in streams])


def equal_share(a: Result, b: Result) -> float:
    """Share of positions at which both answers have the same token."""
    pairs = [(x, y) for one, two in zip(a.answers, b.answers, strict=True) for x, y in zip(one, two, strict=True)]
    return sum(x == y for x, y in pairs) / len(pairs)


ARRANGEMENTS = (("local", "local", 1, 0), ("2 workers, shm", "shm", 2, 0), ("2 workers, grpc", "grpc", 2, 0))
"""Name, link, workers, rows from which steps cross in halves."""
HALVED = (("2 workers, shm, halves", "shm", 2, 8), ("2 workers, grpc, halves", "grpc", 2, 8))


def measure(
    model: Path,
    label: str,
    batches: tuple[int, ...],
    new_tokens: int,
    arrangements: tuple[tuple[str, str, int, int], ...] = ARRANGEMENTS,
) -> list[Row]:
    """All arrangements on one checkpoint; prints as it goes."""
    threads = len(os.sched_getaffinity(0))
    baseline = transformers_results(model, batches, new_tokens, threads)
    rows = [_row(f"{label} transformers", batch, result) for batch, result in baseline.items()]
    print(f"\n{label}, {threads} threads, {new_tokens} tokens per stream", flush=True)
    print(f"{'arrangement':24}" + "".join(f"{'batch ' + str(b):>14}" for b in batches))
    print(f"{'transformers':24}" + "".join(f"{baseline[b].tokens_per_s:>10.0f} t/s" for b in batches), flush=True)
    for name, link, workers, halves_from in arrangements:
        ours = cluster_results(model, batches, new_tokens, link=link, workers=workers, halves_from=halves_from)
        cells = [f"{ours[b].tokens_per_s:>7.0f} {ours[b].tokens_per_s / baseline[b].tokens_per_s:>4.2f}x" for b in batches]
        shares = " ".join(f"{equal_share(ours[b], baseline[b]):.4f}" for b in batches)
        print(f"{name:24}" + "".join(f"{cell:>14}" for cell in cells) + f"   equal tokens {shares}", flush=True)
        rows += [_row(f"{label} {name}", batch, result) for batch, result in ours.items()]
    return rows


def _row(case: str, batch: int, result: Result) -> Row:
    return Row("decode_throughput", case, f"batch {batch}", result.tokens_per_s, "tokens/s")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="fewer tokens; prints, but records nothing")
    parser.add_argument("--model", type=Path, help="a checkpoint of your own instead of the two that are measured by default")
    parser.add_argument("--halves", action="store_true", help="steps that cross links in two halves too")
    args = parser.parse_args()
    new_tokens = 16 if args.quick else 64
    rows = []
    with tempfile.TemporaryDirectory() as scratch:
        reference = Path(__file__).parent.parent / "models" / "reference"
        models = {args.model.name: args.model} if args.model else {"random-120m": synthetic(Path(scratch) / "random-120m")}
        if not args.model and (reference / "model.safetensors").exists():
            models = {"reference": reference, **models}
        for label, model in models.items():
            rows += measure(model, label, BATCHES, new_tokens, ARRANGEMENTS + (HALVED if args.halves else ()))
    if not args.quick:
        append(rows)


if __name__ == "__main__":
    main()
