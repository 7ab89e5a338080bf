"""The checkpoint families: one entry each, mapping a config.json to a ModelSpec.

To add a family, add a `Family` to FAMILIES: where its experts and gate are stored, and a function from the
configuration to the rules that differ from the plain pre-norm decoder that all of them share. A flag that the family's
reference code honours and Forefetch does not goes to `refuse`, so that it is rejected by name instead of ignored.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from forefetch.errors import UnsupportedModel
from forefetch.spec import DTYPES, ExpertNames, ModelSpec, RopeSpec

# rope_type -> the parameters it needs, and those it may have.
ROPE_KINDS: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "default": ((), ()),
    "linear": (("factor",), ()),
    "llama3": (("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"), ()),
    "yarn": (
        ("factor",),
        (
            "original_max_position_embeddings",
            "attention_factor",
            "beta_fast",
            "beta_slow",
            "mscale",
            "mscale_all_dim",
            "truncate",
        ),
    ),
}


class Config:
    """config.json with errors that name the key."""

    def __init__(self, raw: Mapping[str, Any]) -> None:
        self.raw = raw

    def get(self, key: str, default: Any = None) -> Any:
        """The value, or `default` when the key is missing or null."""
        value = self.raw.get(key)
        return default if value is None else value

    def size(self, *keys: str, default: int | None = None) -> int:
        """The first of `keys` that is set: a positive integer."""
        value = next((self.raw[key] for key in keys if self.raw.get(key) is not None), default)
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise UnsupportedModel(f"config.json: {keys[0]} must be a positive integer, not {value!r}")
        return value

    def number(self, key: str, default: float) -> float:
        """A number."""
        value = self.get(key, default)
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise UnsupportedModel(f"config.json: {key} must be a number, not {value!r}")
        return float(value)


Rules = Callable[[Config], dict[str, Any]]


@dataclass(frozen=True)
class Family:
    """One checkpoint family. `rules` returns ModelSpec fields; `refuse` maps a flag to the test that rejects its value."""

    experts: ExpertNames
    gate: str
    rules: Rules
    refuse: Mapping[str, Callable[[Any], bool]] = field(default_factory=dict)


def _set(value: Any) -> bool:
    return bool(value)


SEPARATE = ExpertNames(
    gate="mlp.experts.{e}.gate_proj.weight", up="mlp.experts.{e}.up_proj.weight", down="mlp.experts.{e}.down_proj.weight"
)
# Sliding windows exist in these families' code but not in their published MoE checkpoints.
NO_WINDOW = {"use_sliding_window": _set}


def _sparse_layers(config: Config) -> tuple[int, ...]:
    """Layers with routed experts: every decoder_sparse_step-th, except mlp_only_layers."""
    step, dense = config.size("decoder_sparse_step", default=1), set(config.get("mlp_only_layers", []))
    return tuple(i for i in range(config.size("num_hidden_layers")) if i not in dense and (i + 1) % step == 0)


def _qwen3(config: Config) -> dict[str, Any]:
    bias = bool(config.get("attention_bias", False))
    return {
        "head_dim": config.size("head_dim", default=128),
        "expert_width": config.size("moe_intermediate_size"),
        "moe_layers": _sparse_layers(config),
        "renormalise": bool(config.get("norm_topk_prob", False)),
        "qk_norm": "head",
        "qkv_bias": bias,
        "o_bias": bias,
    }


def _qwen2(config: Config) -> dict[str, Any]:
    return {
        "expert_width": config.size("moe_intermediate_size"),
        "moe_layers": _sparse_layers(config),
        "renormalise": bool(config.get("norm_topk_prob", False)),
        "shared_width": config.size("shared_expert_intermediate_size"),
        "qkv_bias": bool(config.get("qkv_bias", True)),
    }


def _mixtral(config: Config) -> dict[str, Any]:
    return {"expert_width": config.size("intermediate_size"), "renormalise": True}


def _olmoe(config: Config) -> dict[str, Any]:
    bias = bool(config.get("attention_bias", False))
    return {
        "expert_width": config.size("intermediate_size"),
        "renormalise": bool(config.get("norm_topk_prob", False)),
        "qk_norm": "full",
        "qkv_bias": bias,
        "o_bias": bias,
        "clip_qkv": config.number("clip_qkv", 0.0) or None,
    }


def _granite(config: Config) -> dict[str, Any]:
    bias = bool(config.get("attention_bias", False))
    return {
        "expert_width": config.size("intermediate_size"),
        "gate_rule": "topk_softmax",
        "qkv_bias": bias,
        "o_bias": bias,
        "attention_scale": config.number("attention_multiplier", 1.0),
        "embedding_multiplier": config.number("embedding_multiplier", 1.0),
        "residual_multiplier": config.number("residual_multiplier", 1.0),
        "logits_divisor": config.number("logits_scaling", 1.0),
    }


FAMILIES: dict[str, Family] = {
    "qwen3_moe": Family(SEPARATE, "mlp.gate.weight", _qwen3, NO_WINDOW),
    "qwen2_moe": Family(SEPARATE, "mlp.gate.weight", _qwen2, NO_WINDOW),
    "olmoe": Family(SEPARATE, "mlp.gate.weight", _olmoe),
    "mixtral": Family(
        ExpertNames(
            gate="block_sparse_moe.experts.{e}.w1.weight",
            up="block_sparse_moe.experts.{e}.w3.weight",
            down="block_sparse_moe.experts.{e}.w2.weight",
        ),
        "block_sparse_moe.gate.weight",
        _mixtral,
        {"sliding_window": _set},
    ),
    "granitemoe": Family(
        ExpertNames(gate_up="block_sparse_moe.input_linear.weight", down="block_sparse_moe.output_linear.weight"),
        "block_sparse_moe.router.layer.weight",
        _granite,
    ),
}

# Refused in every family. A quantised checkpoint would otherwise be read as if its codes were weights.
REFUSE_ALWAYS: dict[str, Callable[[Any], bool]] = {
    "quantization_config": _set,
    "hidden_act": lambda act: act not in (None, "silu"),
    "partial_rotary_factor": lambda share: share not in (None, 1, 1.0),
}


def read_spec(raw: Mapping[str, Any], generation: Mapping[str, Any], name: str) -> ModelSpec:
    """ModelSpec of a config.json (`raw`) and generation_config.json; raises UnsupportedModel by name."""
    config = Config(raw)
    family_name = str(config.get("model_type", "(none)"))
    family = FAMILIES.get(family_name)
    if family is None:
        raise UnsupportedModel(f"model_type {family_name!r} is not supported; supported: {', '.join(sorted(FAMILIES))}")
    for flag, refused in {**REFUSE_ALWAYS, **family.refuse}.items():
        if refused(raw.get(flag)):
            raise UnsupportedModel(f"{family_name}: {flag} = {raw[flag]!r} is not supported")
    spec = ModelSpec(
        **{**_common(config), **family.rules(config)},
        family=family_name,
        name=name,
        gate_name=family.gate,
        expert_names=family.experts,
        eos_token_ids=_eos(config, generation),
    )
    return _checked(spec)


def _common(config: Config) -> dict[str, Any]:
    """What all families share, before a family's own rules override it."""
    hidden, heads, layers = config.size("hidden_size"), config.size("num_attention_heads"), config.size("num_hidden_layers")
    head_dim = config.size("head_dim", default=max(1, hidden // heads))
    return {
        "dtype": _dtype(config),
        "vocab_size": config.size("vocab_size"),
        "hidden_size": hidden,
        "layers": layers,
        "heads": heads,
        "kv_heads": config.size("num_key_value_heads", default=heads),
        "head_dim": head_dim,
        "context_length": config.size("max_position_embeddings"),
        "rms_eps": config.number("rms_norm_eps", 1e-6),
        "rope": _rope(config),
        "num_experts": config.size("num_experts", "num_local_experts"),
        "top_k": config.size("num_experts_per_tok"),
        "moe_layers": tuple(range(layers)),
        "dense_width": config.size("intermediate_size"),
        "tied_embeddings": bool(config.get("tie_word_embeddings", False)),
    }


def _dtype(config: Config) -> str:
    dtype = str(config.get("dtype", config.get("torch_dtype", "float32")))
    if dtype not in DTYPES:
        raise UnsupportedModel(f"config.json: dtype {dtype!r} is not supported; supported: {', '.join(DTYPES)}")
    return dtype


def _rope(config: Config) -> RopeSpec:
    """Newer files have rope_parameters; older ones rope_theta beside an optional rope_scaling."""
    scaling = {**config.get("rope_scaling", {}), **config.get("rope_parameters", {})}
    kind = str(scaling.pop("rope_type", scaling.pop("type", None)) or "default")
    scaling.pop("type", None)
    theta = float(scaling.pop("rope_theta", config.get("rope_theta", 10000.0)))
    if kind not in ROPE_KINDS:
        raise UnsupportedModel(f"rope_scaling type {kind!r} is not supported; supported: {', '.join(ROPE_KINDS)}")
    if scaling.pop("partial_rotary_factor", None) not in (None, 1, 1.0):
        raise UnsupportedModel("rope_parameters: partial_rotary_factor other than 1 is not supported")
    needed, optional = ROPE_KINDS[kind]
    params = {key: float(scaling[key]) for key in (*needed, *optional) if scaling.get(key) is not None}
    if missing := [key for key in needed if key not in params]:
        raise UnsupportedModel(f"rope_scaling type {kind!r}: {missing[0]} is missing")
    if unknown := sorted(set(scaling) - {*needed, *optional} - ({"factor"} if kind == "default" else set())):
        raise UnsupportedModel(f"rope_scaling type {kind!r}: {unknown[0]} is not supported")
    if kind == "yarn":
        params.setdefault("original_max_position_embeddings", float(config.size("max_position_embeddings")))
    return RopeSpec(theta, kind, params)  # type: ignore[arg-type]


def _eos(config: Config, generation: Mapping[str, Any]) -> tuple[int, ...]:
    """generation_config.json wins, as in transformers; either may hold one id or a list."""
    value = generation.get("eos_token_id")
    value = config.get("eos_token_id", []) if value is None else value
    ids = value if isinstance(value, list) else [value]
    return tuple(i for i in ids if isinstance(i, int) and 0 <= i < config.size("vocab_size"))


def _checked(spec: ModelSpec) -> ModelSpec:
    """Fills the attention scale and refuses sizes that contradict each other."""
    if spec.heads % spec.kv_heads:
        raise UnsupportedModel(f"num_attention_heads {spec.heads} is not a multiple of num_key_value_heads {spec.kv_heads}")
    if spec.top_k > spec.num_experts:
        raise UnsupportedModel(f"num_experts_per_tok {spec.top_k} exceeds the {spec.num_experts} experts")
    if spec.head_dim % 2:
        raise UnsupportedModel(f"head_dim {spec.head_dim} is odd; rotary embedding needs pairs")
    if not spec.moe_layers:
        raise UnsupportedModel("no layer has routed experts; this is a dense model")
    if spec.attention_scale:
        return spec
    return replace(spec, attention_scale=spec.head_dim**-0.5)
