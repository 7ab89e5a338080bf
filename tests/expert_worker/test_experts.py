"""Experts of real checkpoints: what is read, what is computed, and that slots change nothing."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from expert_worker.config import ExpertConfig
from expert_worker.experts import Experts, Storage
from expert_worker.loading import load
from expert_worker.pool import plain
from expert_worker.residency import CopyFailed
from forefetch.errors import BadRequest
from forefetch.kernels.grouped_mlp import reference
from forefetch.kernels.grouped_mlp.formats import ExpertFormat, blob_bytes
from forefetch.placement import shard_of
from forefetch.spec import ModelSpec
from forefetch.weights import Checkpoint, load_expert
from forefetch.wire import LayerCall

Folder = Callable[[str], Path]
CPU = torch.device("cpu")
GPU = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]


def experts_of(
    folder: Path,
    held: tuple[int, ...],
    slots: int = 10**6,
    dtype: torch.dtype = torch.float32,
    device: torch.device = CPU,
    **storage: Any,
) -> Experts:
    spec = ModelSpec.load(folder)
    everywhere = dict.fromkeys(spec.moe_layers, held)
    return Experts(spec, Checkpoint(folder), everywhere, Storage(slots, **storage), device=device, dtype=dtype)


def a_call(
    spec: ModelSpec, held: tuple[int, ...], layer: int, rows: int, seed: int, dtype: torch.dtype = torch.float32
) -> LayerCall:
    draw = torch.Generator().manual_seed(seed)
    k = min(spec.top_k, len(held))
    expert = torch.stack([torch.tensor(held)[torch.randperm(len(held), generator=draw)[:k]] for _ in range(rows)]).flatten()
    row = torch.arange(rows, dtype=torch.int32).repeat_interleave(k)
    x = torch.randn(rows, spec.hidden_size, generator=draw).to(dtype)
    return LayerCall(seed, layer, x, row.numpy(), expert.int().numpy(), torch.rand(rows * k, generator=draw).numpy())


def forward(experts: Experts, call: LayerCall) -> Tensor:
    out = torch.full_like(call.x, torch.nan)
    experts.forward(call, out)
    return out


@pytest.mark.parametrize("name", ["qwen3", "granite"])
@pytest.mark.parametrize("shards", [1, 3])
def test_shards_add_up_to_the_model_and_read_only_their_own(name: str, shards: int, checkpoint: Folder) -> None:
    folder = checkpoint(name)
    spec, whole = ModelSpec.load(folder), Checkpoint(folder)
    everyone = tuple(range(spec.num_experts))
    layer = spec.moe_layers[-1]
    call = a_call(spec, everyone, layer, 9, seed=1)
    w13, w2 = (torch.stack(part) for part in zip(*(load_expert(whole, spec, layer, e) for e in everyone), strict=True))
    total = torch.zeros_like(call.x)
    for held in shard_of(spec.num_experts, shards):
        files = Checkpoint(folder)
        everywhere = dict.fromkeys(spec.moe_layers, held)
        experts = Experts(spec, files, everywhere, Storage(10**6), device=CPU, dtype=torch.float32)
        keep = np.isin(call.pair_expert, held)
        part = LayerCall(1, layer, call.x, call.pair_row[keep], call.pair_expert[keep], call.pair_weight[keep])
        total += forward(experts, part)
        expert_bytes = 3 * spec.hidden_size * spec.expert_width * 4
        assert sum(files.read_log.values()) == len(held) * len(spec.moe_layers) * expert_bytes
        assert experts.load.sum() == keep.sum()
    expected = reference(call.x, w13, w2, *map(torch.from_numpy, (call.pair_row, call.pair_expert, call.pair_weight)))
    torch.testing.assert_close(total, expected, rtol=1e-5, atol=1e-5 * float(expected.abs().max()))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("slots", [1, 3, 8, 13])
@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=GPU)])
def test_answers_do_not_depend_on_slots_to_the_bit(device: str, slots: int, dtype: torch.dtype, checkpoint: Folder) -> None:
    folder = checkpoint("qwen3")
    spec = ModelSpec.load(folder)
    held = tuple(range(1, spec.num_experts))
    where = torch.device(device)
    resident, few = (experts_of(folder, held, count, dtype, where) for count in (10**6, slots))
    few.pool.memory.fill_(255)  # NaN in every type: what a slot held before must not matter
    for seed in range(12):
        layer = spec.moe_layers[seed * 7 % len(spec.moe_layers)]
        call = a_call(spec, held, layer, rows=(1, 5, 40)[seed % 3], seed=seed, dtype=dtype)
        expected = forward(resident, call)
        assert not expected.isnan().any()
        assert torch.equal(forward(few, call), expected)
        assert torch.equal(forward(few, call), expected)
    assert few.residency is not None
    assert few.residency.copied.bytes > 0
    assert (few.load == 2 * resident.load).all()


def test_a_failed_copy_fails_its_call_and_the_next_one_tries_again(checkpoint: Folder) -> None:
    folder = checkpoint("qwen3")
    spec = ModelSpec.load(folder)
    held = tuple(range(spec.num_experts))
    call = a_call(spec, held, spec.moe_layers[0], 6, seed=3)
    few = experts_of(folder, held, 4)
    few.pool.memory.fill_(255)
    assert few.residency is not None
    right, few.residency.start_copy = few.residency.start_copy, broken
    with pytest.raises(CopyFailed, match="could not be copied"):
        forward(few, call)
    assert few.resident(call.layer) == []
    few.residency.start_copy = right
    assert torch.equal(forward(few, call), forward(experts_of(folder, held), call))


def broken(slot: int, number: int) -> Callable[[], None]:
    raise OSError("copy failed")


def test_a_call_at_once_has_the_bits_and_counts_of_one_in_parts(checkpoint: Folder) -> None:
    folder = checkpoint("qwen3")
    spec, held = ModelSpec.load(folder), (1, 2, 5)
    at_once, in_parts = experts_of(folder, held), experts_of(folder, held)
    assert at_once._whole is not None
    in_parts._whole = None
    for seed, layer in enumerate(spec.moe_layers * 3):
        call = a_call(spec, held, layer, 7, seed)
        order = np.random.default_rng(seed).permutation(call.pair_row.size)[: 7 * seed]  # none at first, later in disorder
        some = (call.pair_row[order] // 2 * 2, call.pair_expert[order], call.pair_weight[order])  # no pairs for odd rows
        call = LayerCall(seed, layer, call.x, *some)
        outs = forward(at_once, call), forward(in_parts, call)
        assert torch.equal(*outs)
        assert not outs[0][1::2].any()
        needed = at_once.forward(call, torch.empty_like(call.x))[1].resident
        assert needed == len(np.unique(call.pair_expert)) == in_parts.forward(call, torch.empty_like(call.x))[1].resident
        assert at_once.load.tolist() == in_parts.load.tolist()


def test_what_makes_no_sense_is_refused_by_name(checkpoint: Folder) -> None:
    folder = checkpoint("qwen3")
    spec = ModelSpec.load(folder)
    experts = experts_of(folder, (2, 3))
    good = a_call(spec, (2, 3), spec.moe_layers[0], 2, seed=1)
    with pytest.raises(BadRequest, match="layer 99"):
        forward(experts, LayerCall(1, 99, good.x, good.pair_row, good.pair_expert, good.pair_weight))
    for wrong in (0, spec.num_experts, -1, 2**31 - 1, -(2**31)):
        expert = good.pair_expert.copy()
        expert[1] = wrong
        with pytest.raises(BadRequest, match=f"pair_expert: expert {wrong} "):
            forward(experts, LayerCall(1, good.layer, good.x, good.pair_row, expert, good.pair_weight))
    for row in (2, -1, 2**31 - 1, -(2**31)):
        pair_row = good.pair_row.copy()
        pair_row[1] = row
        with pytest.raises(BadRequest, match="pair_row"):
            forward(experts, LayerCall(1, good.layer, good.x, pair_row, good.pair_expert, good.pair_weight))
    for weight in (torch.nan, torch.inf, -torch.inf):
        pair_weight = good.pair_weight.copy()
        pair_weight[1] = weight
        with pytest.raises(BadRequest, match="pair_weight"):
            forward(experts, LayerCall(1, good.layer, good.x, good.pair_row, good.pair_expert, pair_weight))
    assert experts.load.sum() == 0


def test_settings_make_a_core(checkpoint: Folder) -> None:
    folder = checkpoint("qwen3")
    seen: list[tuple[int, int]] = []
    core = load(ExpertConfig(model=str(folder), shard=1, shards=3, slots="50%"), lambda done, total: seen.append((done, total)))
    spec = ModelSpec.load(folder)
    held = shard_of(spec.num_experts, 3)[1]
    assert core.info.layers == dict.fromkeys(spec.moe_layers, held)
    assert core.info.dtype == torch.float32
    total = len(held) * len(spec.moe_layers)
    assert seen == [(i + 1, total) for i in range(total)]
    one = blob_bytes(spec.hidden_size, spec.expert_width, plain(torch.float32))
    assert core.experts.weight_bytes == (total + total // 2) * one


def test_in_place_a_cpu_makes_no_slots_for_what_is_stored(checkpoint: Folder) -> None:
    folder, held = checkpoint("qwen3"), tuple(range(8))
    few = experts_of(folder, held, slots=3, miss="in-place")
    assert few.residency is None
    assert few.host is None
    call = a_call(ModelSpec.load(folder), held, few.members[0][0], 5, seed=1)
    assert torch.equal(forward(few, call), forward(experts_of(folder, held), call))
    assert experts_of(folder, held, slots=3, miss="in-place", format=ExpertFormat("int8")).residency is not None


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore:Synchronization debug mode")
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_a_gpu_is_not_waited_for_when_all_is_resident(checkpoint: Folder) -> None:
    folder = checkpoint("qwen3")
    spec = ModelSpec.load(folder)
    held = tuple(range(spec.num_experts))
    experts = experts_of(folder, held, device=torch.device("cuda"))
    call = a_call(spec, held, spec.moe_layers[0], 7, seed=1)
    expected = forward(experts_of(folder, held), call)
    call.x = call.x.cuda()
    forward(experts, call)  # loads libraries, which may wait
    try:
        torch.cuda.set_sync_debug_mode("error")
        out = forward(experts, call)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    torch.testing.assert_close(out.cpu(), expected, rtol=1e-4, atol=1e-4)
