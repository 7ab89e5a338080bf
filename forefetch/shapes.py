"""Shapes of known models, by name: what `synthetic:NAME` and `forefetch plan NAME` mean. No torch."""

from __future__ import annotations

from typing import Any

from forefetch.errors import UnsupportedModel

PREFIX = "synthetic:"

# Sizes as the models' published config.json files give them. gpt-oss-120b is run as a plain Qwen3-MoE of its sizes: its biases,
# attention sinks, sliding window and clamped activation are left out, and its context is cut to what needs no rope scaling.
SHAPES: dict[str, dict[str, Any]] = {
    "qwen3-30b-a3b": {
        "model_type": "qwen3_moe",
        "vocab_size": 151936,
        "hidden_size": 2048,
        "num_hidden_layers": 48,
        "num_attention_heads": 32,
        "num_key_value_heads": 4,
        "head_dim": 128,
        "intermediate_size": 6144,
        "moe_intermediate_size": 768,
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "norm_topk_prob": True,
        "max_position_embeddings": 40960,
        "rope_theta": 1e6,
    },
    "mixtral-8x7b": {
        "model_type": "mixtral",
        "vocab_size": 32000,
        "hidden_size": 4096,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "intermediate_size": 14336,
        "num_local_experts": 8,
        "num_experts_per_tok": 2,
        "max_position_embeddings": 32768,
        "rms_norm_eps": 1e-5,
        "rope_theta": 1e6,
    },
    "olmoe-1b-7b": {
        "model_type": "olmoe",
        "vocab_size": 50304,
        "hidden_size": 2048,
        "num_hidden_layers": 16,
        "num_attention_heads": 16,
        "num_key_value_heads": 16,
        "intermediate_size": 1024,
        "num_experts": 64,
        "num_experts_per_tok": 8,
        "max_position_embeddings": 4096,
        "rms_norm_eps": 1e-5,
    },
    "gpt-oss-120b": {
        "model_type": "qwen3_moe",
        "vocab_size": 201088,
        "hidden_size": 2880,
        "num_hidden_layers": 36,
        "num_attention_heads": 64,
        "num_key_value_heads": 8,
        "head_dim": 64,
        "intermediate_size": 2880,
        "moe_intermediate_size": 2880,
        "num_experts": 128,
        "num_experts_per_tok": 4,
        "norm_topk_prob": True,
        "max_position_embeddings": 4096,
        "rope_theta": 150000.0,
    },
}


def synthetic_config(model: str) -> dict[str, Any]:
    """`synthetic:NAME[,key=number...]` -> a config.json. Short keys: layers, experts, context."""
    name, *overrides = model.removeprefix(PREFIX).split(",")
    if name not in SHAPES:
        raise UnsupportedModel(f"no synthetic model is called {name!r}; there are {', '.join(SHAPES)}")
    config = {"dtype": "bfloat16", **SHAPES[name]}
    experts = "num_local_experts" if "num_local_experts" in config else "num_experts"
    short = {"layers": "num_hidden_layers", "experts": experts, "context": "max_position_embeddings"}
    for override in overrides:
        key, _, value = override.partition("=")
        key = short.get(key, key)
        if key not in config or not isinstance(config[key], int) or not value.isdecimal():
            raise UnsupportedModel(f"synthetic model: {override!r} is not a number of its configuration")
        config[key] = int(value)
    return config
