"""Settings of the router that do not go together are refused, with the arithmetic."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from forefetch.errors import ConfigError
from forefetch.settings import build as parse
from forefetch.spec import ModelSpec
from router_service import build
from router_service.config import RouterConfig


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ({}, "--model: is required"),
        ({"model": "m", "max_batch": "64", "max_step_tokens": "64"}, "--max-step-tokens 64 and --max-batch 64"),
        ({"model": "m", "page_size": "0"}, "--page-size"),
        ({"model": "m", "workers": ","}, "--workers"),
        ({"model": "m", "workers": "a:1,a:1"}, "twice"),
        ({"model": "m", "batch_buckets": "4,2"}, "--batch-buckets"),
        ({"model": "m", "batch_buckets": "many"}, "--batch-buckets"),
        ({"model": "m", "kv_format": "int2"}, "--kv-format: must be one of"),
        ({"model": "m", "step_timeout_s": "0"}, "--step-timeout-s"),
    ],
)
def test_refused(flags: dict[str, str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        parse(RouterConfig, flags, {})


def sizes(checkpoint: Callable[[str], Path], **flags: str) -> build.Sizes:
    folder = checkpoint("qwen3")
    config, spec = parse(RouterConfig, {"model": str(folder), "device": "cpu", **flags}, {}), ModelSpec.load(folder)
    return build.Sizes.of(config, spec, build.Placement.of(config, spec))


def test_memory_bounds_the_context(checkpoint: Callable[[str], Path]) -> None:
    # A block is 3 layers x (K + V) x 2 heads x 16 dims x 16 tokens x 4 bytes = 12288 bytes.
    assert sizes(checkpoint, page_size="16", kv_memory_mb="1") == build.Sizes(context=256, pages=86, max_pages=16)
    with pytest.raises(ConfigError, match="--kv-memory-mb 1: one block of 4096 tokens takes 3145728 bytes"):
        sizes(checkpoint, page_size="4096", kv_memory_mb="1")


def test_a_context_beyond_the_model_is_refused(checkpoint: Callable[[str], Path]) -> None:
    with pytest.raises(ConfigError, match="--max-context 999: the model was made for 256"):
        sizes(checkpoint, max_context="999")


def test_a_kv_format_that_may_round_is_named(checkpoint: Callable[[str], Path]) -> None:
    folder = checkpoint("qwen3")
    for kv_format, name in (("auto", ""), ("float32", ""), ("float16", "float16"), ("bfloat16", "bfloat16")):
        config = parse(RouterConfig, {"model": str(folder), "device": "cpu", "kv_format": kv_format}, {})
        assert build.Placement.of(config, ModelSpec.load(folder)).approximate_kv == name


@pytest.mark.skipif(torch.cuda.is_available(), reason="this host has the device")
def test_a_device_that_is_not_there_is_refused(checkpoint: Callable[[str], Path]) -> None:
    folder = checkpoint("qwen3")
    config = parse(RouterConfig, {"model": str(folder), "device": "cuda"}, {})
    with pytest.raises(ConfigError, match="--device cuda"):
        build.Placement.of(config, ModelSpec.load(folder))
