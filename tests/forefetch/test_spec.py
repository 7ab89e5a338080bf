"""What is read from a configuration, and what is refused by name."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from reference_model import CASES

from forefetch.errors import UnsupportedModel
from forefetch.families import FAMILIES, read_spec
from forefetch.spec import ModelSpec

QWEN3: dict[str, Any] = {
    "model_type": "qwen3_moe",
    "hidden_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 24,
    "vocab_size": 100,
    "max_position_embeddings": 512,
    "intermediate_size": 96,
    "moe_intermediate_size": 32,
    "num_experts": 8,
    "num_experts_per_tok": 2,
}


def spec(**changes: Any) -> ModelSpec:
    return read_spec({**QWEN3, **changes}, {}, "m")


def test_every_family_of_the_oracle_is_in_the_table() -> None:
    assert {case.family for case in CASES.values()} == set(FAMILIES)


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"model_type": "deepseek_v3"}, "deepseek_v3.*supported: granitemoe"),
    ({"model_type": None}, r"\(none\)"),
    ({"use_sliding_window": True}, "use_sliding_window"),
    ({"hidden_act": "gelu"}, "hidden_act = 'gelu'"),
    ({"quantization_config": {"quant_method": "gptq"}}, "quantization_config"),
    ({"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
    ({"rope_scaling": {"type": "dynamic", "factor": 2.0}}, "'dynamic'"),
    ({"rope_scaling": {"rope_type": "longrope", "short_factor": [1.0]}}, "'longrope'"),
    ({"rope_scaling": {"rope_type": "yarn"}}, "yarn.*factor is missing"),
    ({"rope_scaling": {"rope_type": "linear", "factor": 2.0, "extra": 1}}, "linear.*extra"),
    ({"rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.25}}, "partial_rotary_factor"),
    ({"torch_dtype": "float8_e4m3fn"}, "float8_e4m3fn"),
    ({"num_experts": None}, "num_experts must be a positive integer"),
    ({"num_experts": -1}, "num_experts must be"),
    ({"hidden_size": "64"}, "hidden_size must be"),
    ({"num_experts_per_tok": 9}, "9 exceeds the 8 experts"),
    ({"num_key_value_heads": 3}, "not a multiple"),
    ({"head_dim": 25}, "odd"),
    ({"mlp_only_layers": [0, 1, 2, 3]}, "dense model"),
    ({"rms_norm_eps": "small"}, "rms_norm_eps must be a number"),
]


@pytest.mark.parametrize(("changes", "message"), REFUSED)
def test_what_is_not_supported_is_refused_by_name(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(UnsupportedModel, match=message):
        spec(**changes)


def test_a_sliding_window_of_mixtral_is_refused() -> None:
    config = {**QWEN3, "model_type": "mixtral", "num_local_experts": 8, "sliding_window": 4096}
    with pytest.raises(UnsupportedModel, match="mixtral: sliding_window = 4096"):
        read_spec(config, {}, "m")


def test_both_spellings_of_rope_are_read() -> None:
    old = spec(rope_theta=500.0, rope_scaling={"type": "linear", "factor": 4.0})
    new = spec(rope_parameters={"rope_type": "linear", "rope_theta": 500.0, "factor": 4.0})
    assert old.rope == new.rope
    assert (old.rope.theta, old.rope.kind, dict(old.rope.params)) == (500.0, "linear", {"factor": 4.0})


def test_dense_layers_follow_both_rules() -> None:
    assert spec(decoder_sparse_step=2).moe_layers == (1, 3)
    assert spec(mlp_only_layers=[3], decoder_sparse_step=2).moe_layers == (1,)
    assert spec().moe_layers == (0, 1, 2, 3)


def test_defaults_are_those_of_the_family() -> None:
    assert spec(head_dim=None).head_dim == 128
    assert spec().attention_scale == 24**-0.5
    assert not spec().renormalise
    qwen2 = read_spec({**QWEN3, "model_type": "qwen2_moe", "head_dim": None, "shared_expert_intermediate_size": 8}, {}, "m")
    assert qwen2.qkv_bias
    assert qwen2.head_dim == 16


def test_end_of_sequence_comes_from_the_generation_config_first() -> None:
    assert read_spec({**QWEN3, "eos_token_id": 5}, {"eos_token_id": [7, 9]}, "m").eos_token_ids == (7, 9)
    assert read_spec({**QWEN3, "eos_token_id": 5}, {}, "m").eos_token_ids == (5,)
    assert read_spec({**QWEN3, "eos_token_id": 5000}, {}, "m").eos_token_ids == ()  # outside the vocabulary


def test_a_folder_without_or_with_a_damaged_config_is_refused_without_its_path(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedModel, match=r"config\.json: not found") as missing:
        ModelSpec.load(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(UnsupportedModel, match=r"config\.json: cannot be read") as damaged:
        ModelSpec.load(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps([]))
    with pytest.raises(UnsupportedModel, match="not a JSON object"):
        ModelSpec.load(tmp_path)
    assert str(tmp_path) not in str(missing.value) + str(damaged.value)


@pytest.mark.parametrize("case", CASES)
def test_every_expert_of_every_case_is_where_the_spec_says(case: str, checkpoint: Callable[[str], Path]) -> None:
    from forefetch.weights import Checkpoint, load_expert

    folder = checkpoint(case)
    spec, opened = ModelSpec.load(folder), Checkpoint(folder)
    for layer in spec.moe_layers:
        for expert in (0, spec.num_experts - 1):
            w13, w2 = load_expert(opened, spec, layer, expert)
            assert w13.shape == (2 * spec.expert_width, spec.hidden_size)
            assert w2.shape == (spec.hidden_size, spec.expert_width)
