"""The oracle's own cases: decisive, varied, and covering every rule the issue names."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from reference_model import CASES, Oracle, write_tokenizer

# float32 logits of these models differ by about 1e-5 between two orders of summation; a lead 1,000 times larger cannot flip.
DECISIVE = 1e-2


@pytest.mark.parametrize("name", CASES)
def test_case_is_decisive_and_does_not_repeat_one_token(name: str, oracle: Callable[[str], Oracle]) -> None:
    prompt = CASES[name].prompt
    assert oracle(name).margins(prompt, 64) > DECISIVE
    assert len(set(oracle(name).greedy(prompt, 64))) > 20


def test_cases_cover_the_flags(checkpoint: Callable[[str], Path]) -> None:
    configs = {name: json.loads((checkpoint(name) / "config.json").read_text()) for name in CASES}

    def values(key: str) -> set[object]:
        return {config.get(key) for config in configs.values()}

    assert values("model_type") == {"qwen3_moe", "qwen2_moe", "mixtral", "olmoe", "granitemoe"}
    assert {True, False} <= values("norm_topk_prob")
    assert {True, False} <= values("tie_word_embeddings")
    assert {1, 2, 8} <= values("num_experts_per_tok")
    assert {True} <= values("attention_bias")
    assert {True, False} <= values("qkv_bias")
    assert any(config.get("mlp_only_layers") for config in configs.values())
    assert any(config.get("decoder_sparse_step", 1) > 1 for config in configs.values())
    ratios = {config["num_attention_heads"] // config["num_key_value_heads"] for config in configs.values()}
    assert ratios == {1, 4, 7}
    assert {c["rope_parameters"]["rope_type"] for c in configs.values()} == {"default", "linear", "llama3", "yarn"}
    assert {c["dtype"] for c in configs.values()} == {"float32", "bfloat16"}
    odd = [c for c in configs.values() if c.get("head_dim") not in (None, c["hidden_size"] // c["num_attention_heads"])]
    assert odd
    indexed = {(checkpoint(name) / "model.safetensors.index.json").exists() for name in CASES}
    assert indexed == {True, False}


def test_tokenizer_round_trips_and_has_a_template(tmp_path: Path) -> None:
    from tokenizers import Tokenizer

    write_tokenizer(tmp_path)
    tokenizer = Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    text = "def f(x): return 'Bär 漢字 🙂'"
    assert tokenizer.decode(tokenizer.encode(text).ids) == text
    assert json.loads((tmp_path / "tokenizer_config.json").read_text())["chat_template"]
