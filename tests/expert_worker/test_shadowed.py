"""`--miss shadow`: what is absent is evaluated in fewer bits, what is there exactly, and each one is counted."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch
from torch import Tensor

from expert_worker.config import ExpertConfig
from expert_worker.experts import Experts, Storage
from expert_worker.loading import load
from expert_worker.packed import PackedExperts
from expert_worker.shadowed import ShadowedExperts
from expert_worker.shadowed_in_place import ShadowedInPlace
from forefetch.errors import ConfigError
from forefetch.kernels.grouped_mlp.formats import ExpertFormat
from forefetch.synthetic import open_model
from forefetch.wire import LayerCall, Verified
from router_service.config import RouterConfig

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
CPU = torch.device("cpu")
MODEL = "synthetic:qwen3-30b-a3b,layers=3,hidden_size=64,moe_intermediate_size=32,experts=8,num_experts_per_tok=2,vocab_size=64"
SPEC, CHECKPOINT = open_model(MODEL, allow_synthetic=True)
ALL = tuple(range(8))
HELD = dict.fromkeys(SPEC.moe_layers, ALL)


def on_cpu(kind: type[Experts], slots: int, format: ExpertFormat | None = None) -> Experts:
    return kind(SPEC, CHECKPOINT, HELD, Storage(slots, format), device=CPU, dtype=torch.float32)


def on_device(kind: type[PackedExperts], format: str, **slots: Any) -> PackedExperts:
    place: dict[str, Any] = {"device": DEVICE, "dtype": torch.float32, "max_rows": 16, **slots}
    return kind(SPEC, CHECKPOINT, ALL, ExpertFormat(format), **place)  # type: ignore[arg-type]


def a_call(step: int, layer: int, ids: Tensor, x: Tensor, weights: Tensor) -> LayerCall:
    row = torch.arange(len(x), dtype=torch.int32).repeat_interleave(2)
    return LayerCall(step, layer, x, row.numpy(), ids.flatten().int().numpy(), weights.flatten().numpy())


def drawn(rows: int, seed: int) -> tuple[Tensor, Tensor, Tensor]:
    """x, ids [rows, 2], weights."""
    draw = torch.Generator().manual_seed(seed)
    ids = torch.stack([torch.randperm(8, generator=draw)[:2] for _ in range(rows)])
    return torch.randn(rows, 64, generator=draw), ids, torch.rand(rows, 2, generator=draw)


def forward(experts: Any, call: LayerCall) -> tuple[Tensor, Verified]:
    out = torch.full_like(call.x, torch.nan)
    return out, experts.forward(call, out, "")[1]


def quiet(experts: Experts) -> None:
    """Until everything that a call left to be brought is there, or was not worth it."""
    residency = experts.residency
    assert residency is not None
    while residency.later or residency.flying:
        time.sleep(0.001)


def test_absent_experts_count_and_are_those_in_fewer_bits() -> None:
    """On a CPU; the sum is of exact experts that were in slots, and of int4 ones."""
    int8, int4 = ExpertFormat("int8"), ExpertFormat("int4")
    few, exact, coarse = on_cpu(ShadowedExperts, 6, int8), on_cpu(Experts, 24, int8), on_cpu(Experts, 24, int4)
    shadowed = 0
    for step in range(12):
        x, ids, weights = drawn(1 + step % 3, step)
        quiet(few)
        there = torch.tensor(few.resident(step % 3), dtype=torch.long)
        out, found = forward(few, a_call(step, step % 3, ids, x, weights))
        here = torch.isin(ids, there)
        parts = (exact, here), (coarse, ~here)
        sums = [forward(one, a_call(step, step % 3, ids, x, weights * part))[0] for one, part in parts]
        torch.testing.assert_close(out, sums[0] + sums[1], rtol=1e-5, atol=1e-5)
        assert found.shadowed == found.late + found.misses == len(ids[~here].unique())
        shadowed += found.shadowed
    assert shadowed > 0
    assert few.copied.bytes > 0, "what was missed comes in behind"
    assert few.weight_bytes > on_cpu(Experts, 7, int8).weight_bytes


def test_the_same_by_kernels_that_move_experts_themselves() -> None:
    """On a GPU or in the interpreter; what is there altogether is there to the bit."""
    few, exact = on_device(ShadowedInPlace, "int8", slots=9), on_device(PackedExperts, "int8")
    coarse = on_device(PackedExperts, "int4")
    whole = 0
    for step in range(6):
        rows, layer = (1, 6)[step % 2], step % 3
        x = drawn(rows, step)[0].to(DEVICE)
        logits = torch.randn(rows, 8, generator=torch.Generator().manual_seed(step)).to(DEVICE)
        there = torch.tensor(few.resident(layer), device=DEVICE)
        if step >= 4:
            logits[:, there[:2]] += 100.0  # only what is in slots
        few.begin(torch.zeros(rows, 1, dtype=torch.bool, device=DEVICE))
        out = few.route(layer, x, logits).clone()
        ids, weights = few._chosen[layer, :rows].clone(), few._weights[layer, :rows]
        here = torch.isin(ids, there)
        sums = [one.run(layer, x, ids.masked_fill(~part, -1), weights) for one, part in ((exact, here), (coarse, ~here))]
        torch.testing.assert_close(out, sums[0] + sums[1], rtol=1e-5, atol=1e-5)
        few.settle(torch.zeros(rows, 1, dtype=torch.bool, device=DEVICE))
        found = few.verified(few.counters.cpu())
        assert found.shadowed == len(ids[~here].unique()) <= found.late + found.misses
        if not found.shadowed:
            whole += 1
            assert torch.equal(out, sums[0])
    assert 0 < whole < 6
    assert few.verified(few.counters.cpu()).shadowed == 0, "each is told once"


def test_with_a_slot_for_each_nothing_is_approximate() -> None:
    settings: dict[str, Any] = {"model": MODEL, "allow_synthetic": True, "device": "cpu", "dtype": "float32"}
    whole, few = (load(ExpertConfig(**settings, miss="shadow", slots=slots)) for slots in ("100%", "50%"))
    assert (type(whole.experts), type(few.experts)) == (Experts, ShadowedExperts)
    assert few.info.expert_format == "stored shadowed by int4"
    x, ids, weights = drawn(4, 1)
    call = a_call(0, 1, ids, x, weights)
    out, found = forward(whole.experts, call)
    assert torch.equal(out, forward(on_cpu(Experts, 24), call)[0])
    assert found.shadowed == 0


@pytest.mark.parametrize("wrong", [{"experts": "int4"}, {"placed": True}])
def test_what_has_no_shadows_is_refused_by_name(wrong: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="--miss shadow and --"):
        ExpertConfig(model="somewhere", miss="shadow", **wrong).validate()


@pytest.mark.parametrize("wrong", [{"experts": "int4"}, {"link": "p2p", "workers": "here:1"}])
def test_routers_refuse_them_too(wrong: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="--miss shadow and --"):
        RouterConfig(model="somewhere", miss="shadow", **wrong).validate()
