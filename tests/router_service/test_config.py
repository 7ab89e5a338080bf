"""Settings of the router that do not go together are refused, with the arithmetic."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from forefetch.errors import ConfigError
from forefetch.settings import build as parse
from forefetch.spec import ModelSpec
from router_service import sizing
from router_service.config import RouterConfig


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ({}, "--model: is required"),
        ({"model": "m", "max_batch": "64", "max_step_tokens": "64"}, "--max-step-tokens 64 and --max-batch 64"),
        ({"model": "m", "page_size": "0"}, "--page-size"),
        ({"model": "m", "workers": ","}, "--workers"),
        ({"model": "m", "workers": "a:1,a:1"}, "twice"),
        ({"model": "m", "workers": "local,local"}, "twice"),
        ({"model": "m", "workers": "local,elsewhere"}, "--workers"),
        ({"model": "m", "workers": "local,a:1", "plan": "true"}, "--plan"),
        ({"model": "m", "batch_buckets": "4,2"}, "--batch-buckets"),
        ({"model": "m", "batch_buckets": "many"}, "--batch-buckets"),
        ({"model": "m", "kv_format": "int2"}, "--kv-format: must be one of"),
        ({"model": "m", "kv_recent": "-2"}, "--kv-recent"),
        ({"model": "m", "kv_format": "e2m0", "kv_exempt_layers": "first"}, "--kv-exempt-layers: must be numbers"),
        ({"model": "m", "kv_exempt_layers": "0"}, "--kv-exempt-layers: --kv-format auto seals none"),
        ({"model": "m", "step_timeout_s": "0"}, "--step-timeout-s"),
    ],
)
def test_refused(flags: dict[str, str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        parse(RouterConfig, flags, {})


def test_a_worker_in_the_process_can_be_one_of_several() -> None:
    config = parse(RouterConfig, {"model": "m", "workers": "a:1, local,b:2", "link": "p2p"}, {})
    assert config.addresses() == ("a:1", "local", "b:2")


def sizes(checkpoint: Callable[[str], Path], **flags: str) -> sizing.Sizes:
    folder = checkpoint("qwen3")
    config, spec = parse(RouterConfig, {"model": str(folder), "device": "cpu", **flags}, {}), ModelSpec.load(folder)
    return sizing.Sizes.of(config, spec, sizing.Placement.of(config, spec))


def test_memory_bounds_the_context(checkpoint: Callable[[str], Path]) -> None:
    # A block is 3 layers x (K + V) x 2 heads x 16 dims x 16 tokens x 4 bytes = 12288 bytes.
    assert sizes(checkpoint, page_size="16", kv_memory_mb="1") == sizing.Sizes(context=256, pages=86, max_pages=16)
    with pytest.raises(ConfigError, match="--kv-memory-mb 1: one block of 4096 tokens takes 3145728 bytes"):
        sizes(checkpoint, page_size="4096", kv_memory_mb="1")


def test_a_context_beyond_the_model_is_refused(checkpoint: Callable[[str], Path]) -> None:
    with pytest.raises(ConfigError, match="--max-context 999: the model was made for 256"):
        sizes(checkpoint, max_context="999")


def test_a_kv_format_that_may_round_is_named(checkpoint: Callable[[str], Path]) -> None:
    folder = checkpoint("qwen3")
    for kv_format, name in (("auto", ""), ("float32", ""), ("float16", "float16"), ("bfloat16", "bfloat16")):
        config = parse(RouterConfig, {"model": str(folder), "device": "cpu", "kv_format": kv_format}, {})
        assert sizing.Placement.of(config, ModelSpec.load(folder)).approximate_kv == name


def placed(folder: Path, **flags: str) -> sizing.Placement:
    config = parse(RouterConfig, {"model": str(folder), "device": "cpu", **flags}, {})
    return sizing.Placement.of(config, ModelSpec.load(folder))


def test_a_sealed_format_has_its_defaults_and_is_named(checkpoint: Callable[[str], Path]) -> None:
    folder = checkpoint("qwen3")
    found = placed(folder, kv_format="e2m0")
    assert (found.approximate_kv, found.kv_name) == ("e2m0", "e2m0")
    assert found.kv_parameters == "codec=2 outliers=1 thirds=0 sinks=4 recent=112 exempt=none"
    assert placed(folder, kv_format="fp4", kv_exempt_layers="2,0").kv_parameters.endswith("recent=32 exempt=0,2")
    assert placed(folder, kv_format="asym3", kv_recent="7", kv_sinks="0").kv_parameters.startswith(
        "codec=2 outliers=1 thirds=0 sinks=0 recent=7"
    )


@pytest.mark.parametrize(
    ("case", "flags", "message"),
    [
        ("qwen3", {"page_size": "16"}, "a page of 16 tokens is not a multiple of 32"),
        ("qwen3", {"kv_outliers": "7"}, "7 outlier channels"),
        ("qwen3", {"kv_exempt_layers": "3"}, "the model has 3 layers, no layer 3"),
        ("qwen3", {"kv_format": "mixed", "kv_thirds": "32"}, "32 third-bit channels"),
        ("mixtral", {}, "head dim 20 is not a multiple of 16"),
    ],
)
def test_what_a_format_does_not_support_is_refused(
    case: str, flags: dict[str, str], message: str, checkpoint: Callable[[str], Path]
) -> None:
    with pytest.raises(ConfigError, match=message):
        placed(checkpoint(case), **{"kv_format": "e2m0", **flags})


def test_tails_and_sinks_are_counted(checkpoint: Callable[[str], Path]) -> None:
    # A tail has 112 + 32 tokens, sinks 4 thrice (two copies for the KV service): 156 tokens x 3 layers x 2 heads x K and V x 16
    # dims x 2 bytes = 59,904 bytes a request, and one lane is for padding; a step's rows take whole tails with
    # sinks, 148 tokens x 384 bytes.
    flags = {"kv_format": "e2m0", "page_size": "32", "max_step_tokens": "128"}
    assert sizes(checkpoint, **flags, max_batch="14", kv_memory_mb="1").pages > 1
    with pytest.raises(ConfigError, match="tails and sinks of --max-batch 18 requests and a step's rows 1195008"):
        sizes(checkpoint, **flags, max_batch="18", kv_memory_mb="1")


@pytest.mark.skipif(torch.cuda.is_available(), reason="this host has the device")
def test_a_device_that_is_not_there_is_refused(checkpoint: Callable[[str], Path]) -> None:
    folder = checkpoint("qwen3")
    config = parse(RouterConfig, {"model": str(folder), "device": "cuda"}, {})
    with pytest.raises(ConfigError, match="--device cuda"):
        sizing.Placement.of(config, ModelSpec.load(folder))
