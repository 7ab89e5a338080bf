"""What a finished run says about itself: held-out perplexity, expert load, samples."""

from __future__ import annotations

import copy
import math
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer
from torch import Tensor

from models.recipe import batches
from models.recipe.model import Model
from models.recipe.pack import Stream

WINDOW = 1024
PROMPTS = {
    "conversation": "<|im_start|>user\nHi! What did you do this weekend?<|im_end|>\n<|im_start|>assistant\n",
    "code": "class Stack:\n    def __init__(self):\n        self.items = []\n\n    def push(self, item):\n",
    "prose": "The configuration file is read when the server starts.",
}


@torch.no_grad()
def stream_loss(model: Model, stream: Stream, per_batch: int = 32) -> tuple[float, Tensor]:
    """Mean nats a token over windows of WINDOW tokens covering a held-out stream, and tokens per expert [L, E]."""
    windows = batches.even_windows(stream, WINDOW, len(stream.tokens), model.embedding.device)
    total, loads = 0.0, torch.zeros(model.config.layers, model.config.experts, device=windows.device)
    for ids in torch.split(windows, per_batch):
        loss, routing = model(ids)
        total += float(loss) * len(ids)
        loads += torch.stack([r.counts for r in routing])
    return total / len(windows), loads


@torch.no_grad()
def sample(model: Model, prompt: list[int], count: int, temperature: float = 0.7, top_p: float = 0.9) -> list[int]:
    """Continue a prompt without a cache; stops at the ends of text and message (ids 0 and 2)."""
    ids = torch.tensor([prompt], device=model.embedding.device)
    for _ in range(count):
        scores = model.logits(ids)[0, -1].float() / temperature
        probabilities, order = scores.softmax(-1).sort(descending=True)
        probabilities[probabilities.cumsum(-1) - probabilities > top_p] = 0.0
        chosen = order[torch.multinomial(probabilities, 1)]
        if int(chosen) in (0, 2):
            break
        ids = torch.cat([ids, chosen[None]], dim=1)
    return [int(i) for i in ids[0, len(prompt) :]]


def rounded_to_bf16(model: Model) -> Model:
    """An uncompiled copy with the weights that are shipped."""
    twin = Model(model.config, model.dtype).to(model.embedding.device)
    state = {name: value.to(torch.bfloat16).float() for name, value in copy.deepcopy(model.state_dict()).items()}
    twin.load_state_dict(state)
    return twin


def final(model: Model, heldout: dict[str, Stream], data: Path) -> dict[str, Any]:
    """Perplexity, bits per byte and expert load by domain, and one sample of each; printed and returned."""
    twin = rounded_to_bf16(model)
    result: dict[str, Any] = {"heldout": {}, "load": {}, "samples": {}}
    for domain, stream in heldout.items():
        nats, loads = stream_loss(twin, stream)
        bits = nats * len(stream.tokens) / stream.text_bytes / math.log(2)
        result["heldout"][domain] = {
            "nats": round(nats, 4),
            "perplexity": round(math.exp(nats), 3),
            "bits_per_byte": round(bits, 4),
            "tokens": len(stream.tokens),
        }
        result["load"][domain] = (loads / loads.sum(1, keepdim=True)).tolist()
        print(domain, result["heldout"][domain], flush=True)
    print_loads(result["load"])
    tokenizer = Tokenizer.from_file(str(data / "tokenizer.json"))
    for domain, prompt in PROMPTS.items():
        ids = sample(twin, tokenizer.encode(prompt).ids, 120)
        result["samples"][domain] = prompt + tokenizer.decode(ids, skip_special_tokens=False)
        print(f"--- {domain}\n{result['samples'][domain]}", flush=True)
    return result


def print_loads(load: dict[str, list[list[float]]]) -> None:
    """Per layer, over all domains: the least and most loaded expert against an even share, and how many are unused."""
    mean = torch.tensor(list(load.values())).mean(0)  # [L, E]
    even = 1 / mean.shape[1]
    for index, row in enumerate(mean):
        print(f"layer {index}: min {row.min() / even:.2f} max {row.max() / even:.2f} dead {int((row == 0).sum())}")
