"""Packed experts in too few slots against all of them packed: Triton's interpreter stands in for the GPU."""

from __future__ import annotations

import random
import time
from typing import Any

import numpy as np
import pytest
import torch

from expert_worker.experts import Storage
from expert_worker.packed import PackedExperts
from expert_worker.packed_slots import SlottedExperts
from expert_worker.residency import CopyFailed, Wait
from forefetch.hints import ExpertHint
from forefetch.kernels.grouped_mlp.formats import ExpertFormat
from forefetch.synthetic import open_model
from forefetch.wire import LayerCall

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
SMALL = "layers=2,hidden_size=64,moe_intermediate_size=32,experts=8,num_experts_per_tok=2,vocab_size=64"
PLACE: dict[str, Any] = {"device": DEVICE, "dtype": torch.float32}


def make(kind: Any, slots: int, miss: str = "wait") -> tuple[PackedExperts, SlottedExperts]:
    spec, checkpoint = open_model(f"synthetic:qwen3-30b-a3b,{SMALL}", allow_synthetic=True)
    held = tuple(range(spec.num_experts))
    format = ExpertFormat(kind)
    whole = PackedExperts(spec, checkpoint, held, format, max_rows=16, **PLACE)
    storage = Storage(slots, format, max_rows=16, miss=miss, check_copies=True)
    few = SlottedExperts(spec, checkpoint, dict.fromkeys(spec.moe_layers, held), storage, **PLACE)
    few.pool.memory.fill_(255)
    return whole, few


def a_call(step: int, layer: int, rows: int) -> LayerCall:
    draw = torch.Generator().manual_seed(100 * step + layer)
    expert = torch.stack([torch.randperm(8, generator=draw)[:2] for _ in range(rows)]).flatten().int()
    row = torch.arange(rows, dtype=torch.int32).repeat_interleave(2)
    x = torch.randn(rows, 64, generator=draw)
    return LayerCall(step, layer, x, row.numpy(), expert.numpy(), torch.rand(2 * rows, generator=draw).numpy())


@pytest.mark.parametrize("kind", ["float32", "int4"])
@pytest.mark.parametrize("slots", [2, 9])
def test_slots_hints_and_delays_change_no_bit(kind: str, slots: int) -> None:
    whole, few = make(kind, slots)
    draw = random.Random(slots)
    assert few.residency is not None
    real = few.residency.start_copy

    def slow(slot: int, number: int) -> Wait:
        time.sleep(draw.random() * 0.002)
        return real(slot, number)

    few.residency.start_copy = slow
    copied = 0
    for step in range(3):
        for layer in range(2):
            call = a_call(step, layer, draw.choice((1, 1, 5)))
            named = np.array(draw.sample(range(8), 2), dtype=np.int32)
            few.hint(ExpertHint(step, 0, draw.choice((0, 1)), 0, named, np.full(2, 0.9, np.float32), 10**9))
            expected, out = torch.empty_like(call.x), torch.full_like(call.x, torch.nan)
            whole.forward(call, expected)
            _, verified = few.forward(call, out)
            # A group of rows is a smaller launch, whose products may be summed in another order.
            assert torch.equal(out, expected) if len(call.x) == 1 else torch.allclose(out, expected, rtol=1e-5, atol=1e-6)
            copied += verified.copied_bytes
    assert copied > 0
    few.residency.close()


def test_a_failing_copy_fails_the_call_and_the_next_one_tries_again() -> None:
    whole, few = make("int8", 4)
    assert few.residency is not None
    right, few.residency.start_copy = few.residency.start_copy, broken
    call = a_call(1, 0, 1)
    out, expected = torch.full_like(call.x, torch.nan), torch.empty_like(call.x)
    with pytest.raises(CopyFailed):
        few.forward(call, out)
    few.residency.start_copy = right
    few.forward(call, out)
    whole.forward(call, expected)
    assert torch.equal(out, expected)
    few.residency.close()


def broken(slot: int, number: int) -> Wait:
    raise OSError("copy failed")


@pytest.mark.parametrize("miss", ["cpu", "sooner"])
def test_missing_experts_on_the_host_are_the_same_experts(miss: str) -> None:
    """Scaled once, like those in slots; other summation order."""
    whole, few = make("int8", 3, miss=miss)
    assert few.residency is not None
    if miss == "cpu":
        few.residency.start_copy = broken  # no copy is needed
    for step in range(2):
        for layer in range(2):
            call = a_call(step, layer, 3)
            expected, out = torch.empty_like(call.x), torch.full_like(call.x, torch.nan)
            whole.forward(call, expected)
            few.forward(call, out)
            assert torch.allclose(out, expected, rtol=1e-4, atol=1e-5)
    assert few.miss_times.host_expert_ns + few.miss_times.host_pair_ns > 0
    few.residency.close()
