"""Packed experts that come and go through a few places: equal to a fixed worker's, to the bit."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from expert_worker.evaluator import Placeable
from expert_worker.packed import PackedExperts, packed_format
from expert_worker.packed_placed import PlacedPackedExperts
from forefetch.errors import BadRequest, Moved
from forefetch.hints import ExpertHint
from forefetch.synthetic import open_model
from forefetch.wire import LayerCall

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
SMALL = "layers=2,hidden_size=64,moe_intermediate_size=32,experts=6,num_experts_per_tok=2,vocab_size=64"
PLACES = 4


def made() -> tuple[PackedExperts, PlacedPackedExperts]:
    spec, checkpoint = open_model(f"synthetic:qwen3-30b-a3b,{SMALL}", allow_synthetic=True)
    format = packed_format(spec, "int8", torch.float32, DEVICE)
    how = {"device": DEVICE, "dtype": torch.float32, "max_rows": 8}
    placed = PlacedPackedExperts(spec, checkpoint, PLACES, format, **how)  # type: ignore[arg-type]
    placed._pool.fill_(255)
    return PackedExperts(spec, checkpoint, range(6), format, **how), placed  # type: ignore[arg-type]


def call(layer: int, experts: list[int], seed: int) -> LayerCall:
    draw = torch.Generator().manual_seed(seed)
    row = torch.arange(5, dtype=torch.int32).repeat_interleave(len(experts))
    x, weight = torch.randn(5, 64, generator=draw), torch.rand(len(row), generator=draw)
    return LayerCall(seed, layer, x, row.numpy(), np.array(experts * 5, np.int32), weight.numpy())


def test_answers_equal_a_fixed_workers_while_experts_come_and_go() -> None:
    whole, placed = made()
    assert isinstance(placed, Placeable)
    draw, here = np.random.default_rng(2), list[tuple[int, int]]()
    for turn in range(8):
        while here and draw.random() < 0.6:
            placed.drop(*here.pop(0))
        for layer, expert in draw.permutation([(layer, expert) for layer in (0, 1) for expert in range(6)]).tolist():
            if placed.room and (layer, expert) not in here:
                placed.put(layer, expert)
                here.append((layer, expert))
        for layer in (0, 1):
            mine = sorted(expert for at, expert in here if at == layer)
            assert placed.resident(layer) == mine
            if mine:
                asked = call(layer, mine[:2], turn)
                out, expected = torch.full((5, 64), torch.nan), torch.full((5, 64), torch.nan)
                placed.forward(asked, out)
                whole.forward(asked, expected)
                assert torch.equal(out, expected)
    everything = dict.fromkeys((0, 1), tuple(range(6)))
    assert placed.pairs_of(everything) == whole.pairs_of(everything)


def test_what_is_not_here_is_told_apart() -> None:
    _, placed = made()
    placed.put(1, 3)
    out = torch.empty(5, 64)
    with pytest.raises(Moved, match="expert 2 of layer 1"):
        placed.forward(call(1, [2, 3], 0), out)
    for nonsense in (6, -1):
        with pytest.raises(BadRequest):
            placed.forward(call(1, [nonsense], 0), out)
    with pytest.raises(BadRequest):
        placed.forward(call(7, [0], 0), out)
    half = np.full(1, 0.5, dtype=np.float32)
    assert placed.hint(ExpertHint(0, 0, 1, 0, np.array([3], dtype=np.int32), half, 1), "r")
    assert not placed.hint(ExpertHint(0, 0, 1, 0, np.array([2], dtype=np.int32), half, 1), "r")
