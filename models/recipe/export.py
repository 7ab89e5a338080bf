"""From training weights to a Hugging Face folder: names, bf16, config files."""

from __future__ import annotations

import argparse
import json
import shutil
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from models.recipe.model import Model, ModelConfig

PART_BYTES = 13 * 2**20
LAYER_NAMES = {
    "norm1": "input_layernorm.weight",
    "norm2": "post_attention_layernorm.weight",
    "q": "self_attn.q_proj.weight",
    "k": "self_attn.k_proj.weight",
    "v": "self_attn.v_proj.weight",
    "o": "self_attn.o_proj.weight",
    "q_norm": "self_attn.q_norm.weight",
    "k_norm": "self_attn.k_norm.weight",
    "router": "mlp.gate.weight",
}


def hugging_face_tensors(model: Model) -> dict[str, Tensor]:
    """Weights under the names of a Qwen3-MoE checkpoint, one tensor an expert and projection, in bf16."""
    tensors: dict[str, Tensor] = {"model.embed_tokens.weight": model.embedding, "model.norm.weight": model.norm}
    for index, layer in enumerate(model.blocks()):
        prefix = f"model.layers.{index}."
        tensors |= {prefix + theirs: getattr(layer, ours) for ours, theirs in LAYER_NAMES.items()}
        for expert in range(model.config.experts):
            gate, up = layer.gate_up[expert].chunk(2)
            place = f"{prefix}mlp.experts.{expert}."
            tensors |= {place + "gate_proj.weight": gate, place + "up_proj.weight": up}
            tensors[place + "down_proj.weight"] = layer.down[expert]
    return {name: t.detach().to(torch.bfloat16).cpu().contiguous().clone() for name, t in tensors.items()}


def load_hugging_face(model: Model, tensors: dict[str, Tensor]) -> None:
    """Fill a training model from a checkpoint's tensors (the inverse of `hugging_face_tensors`)."""

    def fill(parameter: nn.Parameter | Tensor, value: Tensor) -> None:
        parameter.data.copy_(value)

    fill(model.embedding, tensors["model.embed_tokens.weight"])
    fill(model.norm, tensors["model.norm.weight"])
    for index, layer in enumerate(model.blocks()):
        prefix = f"model.layers.{index}."
        for ours, theirs in LAYER_NAMES.items():
            fill(getattr(layer, ours), tensors[prefix + theirs])
        for expert in range(model.config.experts):
            place = f"{prefix}mlp.experts.{expert}."
            fused = torch.cat([tensors[place + "gate_proj.weight"], tensors[place + "up_proj.weight"]])
            fill(layer.gate_up[expert], fused)
            fill(layer.down[expert], tensors[place + "down_proj.weight"])


def save_parts(model: Model, folder: Path) -> list[Path]:
    """Write the checkpoint in files of at most about PART_BYTES, for links that carry only small files."""
    parts: list[dict[str, Tensor]] = [{}]
    size = 0
    for name, tensor in hugging_face_tensors(model).items():
        if size + tensor.nbytes > PART_BYTES:
            parts.append({})
            size = 0
        parts[-1][name] = tensor
        size += tensor.nbytes
    paths = [folder / f"weights-{index}.safetensors" for index in range(len(parts))]
    for path, part in zip(paths, parts, strict=True):
        save_file(part, path)
    return paths


def hugging_face_config(config: ModelConfig) -> dict[str, Any]:
    """config.json of the model."""
    return {
        "architectures": ["Qwen3MoeForCausalLM"],
        "model_type": "qwen3_moe",
        "vocab_size": config.vocabulary,
        "hidden_size": config.hidden,
        "intermediate_size": 4 * config.hidden,  # of dense layers, of which there are none
        "moe_intermediate_size": config.expert_width,
        "num_hidden_layers": config.layers,
        "num_attention_heads": config.heads,
        "num_key_value_heads": config.kv_heads,
        "head_dim": config.head_dim,
        "num_experts": config.experts,
        "num_experts_per_tok": config.top_k,
        "norm_topk_prob": True,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
        "hidden_act": "silu",
        "max_position_embeddings": config.context,
        "rope_theta": config.rope_theta,
        "rope_scaling": None,
        "rms_norm_eps": config.norm_eps,
        "attention_bias": False,
        "attention_dropout": 0.0,
        "use_sliding_window": False,
        "sliding_window": None,
        "initializer_range": 0.02,
        "output_router_logits": False,
        "router_aux_loss_coef": 0.01,
        "tie_word_embeddings": True,
        "use_cache": True,
        "torch_dtype": "bfloat16",
        "bos_token_id": None,
        "eos_token_id": 2,
        "pad_token_id": 0,
    }


GENERATION = {
    "do_sample": True,
    "temperature": 0.7,
    "top_p": 0.9,
    "repetition_penalty": 1.05,
    "max_new_tokens": 256,
    "eos_token_id": [2, 0],
    "pad_token_id": 0,
}


def assemble(parts: Path, data: Path, folder: Path) -> None:
    """Join trained parts with config and tokenizer files into one Hugging Face folder."""
    folder.mkdir(parents=True, exist_ok=True)
    tensors: dict[str, Tensor] = {}
    for path in sorted(parts.glob("weights-*.safetensors")):
        tensors |= load_file(path)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(hugging_face_config(ModelConfig()), indent=2) + "\n")
    (folder / "generation_config.json").write_text(json.dumps(GENERATION, indent=2) + "\n")
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        shutil.copyfile(data / name, folder / name)
    (folder / "heldout").mkdir(exist_ok=True)
    for name in ("conversation.txt", "code.txt", "prose.txt"):
        shutil.copyfile(data / name, folder / "heldout" / name)


def main() -> None:
    """Command line: `python -m models.recipe.export --parts DIR --data DIR --folder models/reference`."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--parts", type=Path, required=True)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--folder", type=Path, required=True)
    arguments = parser.parse_args()
    assemble(arguments.parts, arguments.data, arguments.folder)


if __name__ == "__main__":
    main()
