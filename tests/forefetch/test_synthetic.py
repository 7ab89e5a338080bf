"""Synthetic checkpoints: right shapes, repeatable weights, refused without the flag, and served with it."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch

from forefetch.errors import ConfigError, UnsupportedModel
from forefetch.shapes import SHAPES
from forefetch.synthetic import open_model
from forefetch.weights import load_expert
from router_service.cache import KvCache
from router_service.trunk import Trunk

SMALL = ",layers=2,vocab_size=64,hidden_size=64,context=256"


@pytest.mark.parametrize("name", SHAPES)
def test_every_shape_is_a_model_that_the_trunk_can_load(name: str) -> None:
    spec, checkpoint = open_model(f"synthetic:{name}{SMALL}", allow_synthetic=True)
    cache = KvCache(spec, pages=2, page_size=8, dtype=torch.float32, device=torch.device("cpu"))
    trunk = Trunk(spec, checkpoint, cache, dtype=torch.float32, device=torch.device("cpu"))
    assert trunk.layers[1].qkv.shape == (64, (spec.heads + 2 * spec.kv_heads) * spec.head_dim)
    w13, w2 = load_expert(checkpoint, spec, 1, spec.num_experts - 1)
    assert w13.shape == (2 * spec.expert_width, 64)
    assert w2.dtype == torch.bfloat16


def test_the_published_sizes() -> None:
    spec, _ = open_model("synthetic:qwen3-30b-a3b", allow_synthetic=True)
    experts = spec.layers * spec.num_experts * 3 * spec.hidden_size * spec.expert_width
    assert 28.9e9 < experts < 29.1e9  # of the 30.5 billion weights
    assert (spec.top_k, spec.renormalise, spec.qk_norm) == (8, True, "head")


def test_weights_are_a_function_of_their_name() -> None:
    (spec, one), (_, two) = (open_model(f"synthetic:olmoe-1b-7b{SMALL}", allow_synthetic=True) for _ in range(2))
    assert torch.equal(load_expert(one, spec, 0, 1)[0], load_expert(two, spec, 0, 1)[0])
    assert not torch.equal(load_expert(one, spec, 0, 1)[0], load_expert(one, spec, 1, 1)[0])
    gate, up = load_expert(one, spec, 0, 1)[0].chunk(2)
    assert not torch.equal(gate, up)
    assert one.digest == two.digest != open_model("synthetic:olmoe-1b-7b", allow_synthetic=True)[1].digest


@pytest.mark.parametrize(
    ("model", "error", "says"),
    [
        ("synthetic:gpt-9", UnsupportedModel, "mixtral-8x7b"),
        ("synthetic:mixtral-8x7b,width=3", UnsupportedModel, "width=3"),
        ("synthetic:mixtral-8x7b,layers=x", UnsupportedModel, "layers=x"),
    ],
)
def test_unknown_names_are_refused_by_name(model: str, error: type[Exception], says: str) -> None:
    with pytest.raises(error, match=says):
        open_model(model, allow_synthetic=True)


def test_serving_one_takes_a_flag() -> None:
    with pytest.raises(ConfigError, match="allow-synthetic"):
        open_model("synthetic:mixtral-8x7b")
    command = [sys.executable, "-m", "expert_worker", "--model=synthetic:mixtral-8x7b"]
    refused = subprocess.run(command, capture_output=True, text=True, timeout=240, check=False)
    assert refused.returncode == 2
    assert "allow-synthetic" in refused.stderr
