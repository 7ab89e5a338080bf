"""Measure a shipped folder on its held-out excerpts: `python -m models.recipe.evaluate --folder models/reference`.

Writes `eval.json` beside the weights: perplexity and bits per byte of each excerpt file, tokens per expert and layer,
and what the training run said about itself (`--training training.json`). fp32 arithmetic on the bf16 weights.
"""

from __future__ import annotations

import argparse
import json
import math
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from tokenizers import Tokenizer

from models.recipe import export, pack, report
from models.recipe.conversation import END_OF_TEXT
from models.recipe.corpus import DOMAINS
from models.recipe.model import Model, ModelConfig

SNIPPET = 1024


def read_model(folder: Path) -> Model:
    """The shipped weights in the training forward, fp32."""
    raw = json.loads((folder / "config.json").read_text())
    config = ModelConfig(
        vocabulary=raw["vocab_size"],
        hidden=raw["hidden_size"],
        layers=raw["num_hidden_layers"],
        heads=raw["num_attention_heads"],
        kv_heads=raw["num_key_value_heads"],
        head_dim=raw["head_dim"],
        experts=raw["num_experts"],
        top_k=raw["num_experts_per_tok"],
        expert_width=raw["moe_intermediate_size"],
        context=raw["max_position_embeddings"],
        rope_theta=raw["rope_theta"],
        norm_eps=raw["rms_norm_eps"],
    )
    model = Model(config)
    export.load_hugging_face(model, load_file(folder / "model.safetensors"))
    return model.eval()


def read_excerpt(folder: Path, domain: str) -> list[str]:
    """The held-out documents of one domain that ship with the model."""
    text = (folder / "heldout" / f"{domain}.txt").read_text()
    return [d for d in text.split(END_OF_TEXT + "\n") if d]


@torch.no_grad()
def snippet_nats(model: Model, stream: pack.Stream) -> float:
    """Mean nats over the first SNIPPET predictions of a stream: the number a quick test can repeat."""
    ids = torch.from_numpy(stream.tokens[: SNIPPET + 1].astype("int64"))[None]
    return float(model(ids)[0])


def evaluate(folder: Path) -> dict[str, Any]:
    """Numbers of one folder."""
    model = read_model(folder)
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    result: dict[str, Any] = {"window": report.WINDOW, "snippet": SNIPPET, "excerpts": {}, "load": {}}
    for domain in DOMAINS:
        stream = pack.encode(tokenizer, read_excerpt(folder, domain))
        nats, loads = report.stream_loss(model, stream, per_batch=4)
        result["excerpts"][domain] = {
            "tokens": len(stream.tokens),
            "bytes": stream.text_bytes,
            "nats": round(nats, 4),
            "perplexity": round(math.exp(nats), 3),
            "bits_per_byte": round(nats * len(stream.tokens) / stream.text_bytes / math.log(2), 4),
            "snippet_nats": round(snippet_nats(model, stream), 4),
        }
        result["load"][domain] = loads.int().tolist()  # [L][E]
    return result


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--training", type=Path, default=None, help="training.json of the run that made the weights")
    arguments = parser.parse_args()
    result = evaluate(arguments.folder)
    if arguments.training:
        run = json.loads(arguments.training.read_text())
        result["training"] = {k: run[k] for k in ("device", "steps", "tokens", "seconds", "heldout", "samples")}
    (arguments.folder / "eval.json").write_text(json.dumps(result) + "\n")
    print(json.dumps(result["excerpts"], indent=1))


if __name__ == "__main__":
    main()
