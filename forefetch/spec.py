"""ModelSpec: every size and rule of a Mixture-of-Experts checkpoint, read from its config.json.

Nothing else in Forefetch looks at config.json. What differs between checkpoint families is one entry in `families.py`;
code that runs the model branches on the rules below, never on a family's name.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from forefetch.errors import UnsupportedModel

DTYPES = ("float32", "bfloat16", "float16")


@dataclass(frozen=True)
class RopeSpec:
    """Rotary embedding over the whole head dim. `params` holds the numbers that `kind` needs, by their Hugging Face names."""

    theta: float
    kind: Literal["default", "linear", "llama3", "yarn"] = "default"
    params: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class Slice:
    """A matrix inside a checkpoint: tensor `name`, entry `index` of its first dim if it stacks experts, then `rows`."""

    name: str
    index: int | None = None
    rows: tuple[int, int] | None = None


@dataclass(frozen=True)
class ExpertTensors:
    """Where the three matrices of one expert are: gate and up [I, H], down [H, I]."""

    gate: Slice
    up: Slice
    down: Slice


@dataclass(frozen=True)
class ExpertNames:
    """How a family stores routed experts, relative to its layer.

    Either a tensor per expert (`{e}` in the names), or `gate_up` [E, 2I, H] with gate rows first, and `down` [E, H, I].
    """

    gate: str = ""
    up: str = ""
    down: str = ""
    gate_up: str = ""

    def locate(self, layer_prefix: str, expert: int, width: int) -> ExpertTensors:
        """The tensors of `expert`, whose width (I) is `width` rows."""
        if self.gate_up:
            stacked = layer_prefix + self.gate_up
            gate, up = Slice(stacked, expert, (0, width)), Slice(stacked, expert, (width, 2 * width))
            return ExpertTensors(gate, up, Slice(layer_prefix + self.down, expert))
        gate, up, down = (Slice(layer_prefix + name.format(e=expert)) for name in (self.gate, self.up, self.down))
        return ExpertTensors(gate, up, down)


@dataclass(frozen=True)
class ModelSpec:
    """Sizes and rules. Letters: H hidden, Hq/Hkv query and KV heads, D head dim, E experts, K top-k, I expert width."""

    family: str
    name: str
    dtype: str  # as stored: one of DTYPES
    vocab_size: int
    hidden_size: int  # H
    layers: int
    heads: int  # Hq
    kv_heads: int  # Hkv
    head_dim: int  # D; need not be H / Hq
    context_length: int
    rms_eps: float
    rope: RopeSpec
    num_experts: int  # E
    top_k: int  # K
    expert_width: int  # I
    moe_layers: tuple[int, ...]  # the others are dense
    dense_width: int
    expert_names: ExpertNames
    gate_name: str
    # "softmax_topk": softmax over all E, then top-k. "topk_softmax": top-k of the logits, softmax over those K.
    gate_rule: Literal["softmax_topk", "topk_softmax"] = "softmax_topk"
    renormalise: bool = False  # softmax_topk only: divide the K weights by their sum
    shared_width: int = 0  # width of a shared expert with a sigmoid gate; 0: none
    qkv_bias: bool = False
    o_bias: bool = False
    # "head": RMSNorm over each head's D. "full": over the whole projection (Hq*D, Hkv*D).
    qk_norm: Literal["none", "head", "full"] = "none"
    clip_qkv: float | None = None  # Q, K, V clamped to +-this before RoPE
    attention_scale: float = 0.0
    embedding_multiplier: float = 1.0
    residual_multiplier: float = 1.0
    logits_divisor: float = 1.0
    tied_embeddings: bool = False
    eos_token_ids: tuple[int, ...] = ()

    @staticmethod
    def load(folder: Path) -> ModelSpec:
        """Reads `folder`/config.json. Raises UnsupportedModel naming the family, flag or value that is not supported."""
        from forefetch.families import read_spec

        config, generation = read_json(folder / "config.json"), read_json(folder / "generation_config.json", {})
        return read_spec(config, generation, folder.resolve().name)

    def is_moe(self, layer: int) -> bool:
        """Whether `layer` has routed experts."""
        return layer in self.moe_layers

    def layer_prefix(self, layer: int) -> str:
        """Common prefix of a layer's tensor names."""
        return f"model.layers.{layer}."

    def expert_tensors(self, layer: int, expert: int) -> ExpertTensors:
        """Where one routed expert is stored."""
        return self.expert_names.locate(self.layer_prefix(layer), expert, self.expert_width)

    def kv_bytes_per_token(self, element_bytes: int) -> int:
        """Bytes of K and V that one token adds over all layers."""
        return 2 * self.layers * self.kv_heads * self.head_dim * element_bytes


def read_json(path: Path, default: dict[str, Any] | None = None) -> dict[str, Any]:
    """A JSON object from a checkpoint folder; `default` when the file is missing, else UnsupportedModel."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        if default is None:
            raise UnsupportedModel(f"{path.name}: not found in the model's folder") from None
        return default
    except (ValueError, OSError) as error:
        raise UnsupportedModel(f"{path.name}: cannot be read ({type(error).__name__})") from error
    if not isinstance(value, dict):
        raise UnsupportedModel(f"{path.name}: is not a JSON object")
    return value
