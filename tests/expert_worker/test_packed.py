"""A packed shard against the plain one: calls over a wire, whole layers for a router in the process, and bad input."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from expert_worker.packed import PackedExperts, packed_format
from forefetch.errors import BadRequest
from forefetch.kernels.gate import choose
from forefetch.kernels.grouped_mlp import reference
from forefetch.kernels.grouped_mlp.formats import Kind, unpack
from forefetch.spec import ModelSpec
from forefetch.synthetic import open_model
from forefetch.wire import LayerCall

ON_GPU = pytest.param("cuda", marks=[pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")])
SMALL = "layers=2,hidden_size=64,moe_intermediate_size=32,experts=6,num_experts_per_tok=2,vocab_size=64"
ROWS = 5


def make(kind: Kind, device: str, held: tuple[int, ...] = tuple(range(6))) -> tuple[ModelSpec, PackedExperts]:
    spec, checkpoint = open_model(f"synthetic:qwen3-30b-a3b,{SMALL}", allow_synthetic=True)
    place = {"device": torch.device(device), "dtype": torch.float32, "max_rows": 8}
    return spec, PackedExperts(spec, checkpoint, held, packed_format(spec, kind, torch.float32, torch.device(device)), **place)  # type: ignore[arg-type]


def weights_of(spec: ModelSpec, experts: PackedExperts, layer: int) -> tuple[Tensor, Tensor]:
    """What the blobs of a layer say: w13 [E, 2I, H], w2 [E, H, I]."""
    blobs = experts._pool.cpu().view(len(spec.moe_layers), spec.num_experts, -1)[layer]
    pairs = [unpack(blob, spec.hidden_size, spec.expert_width, experts.format, torch.float32) for blob in blobs]
    return torch.stack([w13 for w13, _ in pairs]), torch.stack([w2 for _, w2 in pairs])


def close(found: Tensor, expected: Tensor) -> None:
    """float32 sums over at most 64 terms, twice: 2^-24 * 2 * 64, relative to the largest value, with room for silu."""
    assert (found - expected).abs().max() <= 2e-5 * expected.abs().max()


@pytest.mark.parametrize("device", ["cpu", ON_GPU])
@pytest.mark.parametrize("kind", ["float32", "int8", "int4"])
def test_whole_layers_choose_and_add_up(kind: Kind, device: str) -> None:
    spec, experts = make(kind, device)
    draw = torch.Generator().manual_seed(3)
    x, logits = torch.randn(ROWS, spec.hidden_size, generator=draw), torch.randn(ROWS, spec.num_experts, generator=draw)
    ids, weights = choose(logits, spec.top_k, spec.gate_rule, spec.renormalise)
    rows = torch.arange(ROWS).repeat_interleave(spec.top_k)
    for layer in spec.moe_layers:
        expected = reference(x, *weights_of(spec, experts, layer), rows, ids.flatten(), weights.flatten())
        close(experts.route(layer, x.to(device), logits.to(device)).cpu(), expected)
        close(experts.run(layer, x.to(device), ids.to(device), weights.to(device)).cpu(), expected)
    counted = torch.bincount(ids.flatten(), minlength=spec.num_experts)
    assert experts.load.tolist() == [counted.tolist()] * 2  # those of run; the step that route was part of is not settled yet
    idle = torch.tensor([[False]] * (ROWS - 1) + [[True]], device=device)
    experts.settle(idle)
    busy = torch.bincount(ids[:-1].flatten(), minlength=spec.num_experts)
    assert experts.load.tolist() == [(counted + busy).tolist()] * 2


@pytest.mark.parametrize("device", ["cpu", ON_GPU])
def test_calls_of_a_shard_with_rows_of_different_lengths(device: str) -> None:
    spec, experts = make("float32", device)
    w13, w2 = weights_of(spec, experts, 1)
    _, shard = make("float32", device, (1, 4))
    row, expert = torch.tensor([0, 0, 3], dtype=torch.int32), torch.tensor([4, 1, 4], dtype=torch.int32)
    weight = torch.rand(3)
    call = LayerCall(1, 1, torch.randn(ROWS, spec.hidden_size), row.numpy(), expert.numpy(), weight.numpy())
    out = torch.full_like(call.x, torch.nan)
    assert shard.forward(call, out)[1].resident == 2
    close(out, reference(call.x, w13, w2, row, expert, weight))
    assert shard.load.tolist() == [[0, 0], [1, 2]]
    assert shard.resident(1) == [1, 4]


def test_bad_calls_are_refused_by_name() -> None:
    spec, shard = make("float32", "cpu", (1, 4))
    one = np.ones(1, np.int32)
    good = torch.zeros(2, spec.hidden_size), one, one, np.ones(1, np.float32)

    def refused(says: str, *, layer: int = 0, **changes: Any) -> None:
        fields = dict(zip(("x", "pair_row", "pair_expert", "pair_weight"), good, strict=True)) | changes
        with pytest.raises(BadRequest, match=says):
            shard.forward(LayerCall(1, layer, **fields), torch.empty(2, spec.hidden_size))

    refused("layer 9", layer=9)
    refused("row index", pair_row=np.array([-1], np.int32))
    refused("not finite", pair_weight=np.array([np.nan], np.float32))
    refused("expert 2 ", pair_expert=np.array([2], np.int32))
    three = np.zeros(3, np.int32)
    refused("names 3 experts", pair_row=three, pair_expert=three + 1, pair_weight=np.ones(3, np.float32))
