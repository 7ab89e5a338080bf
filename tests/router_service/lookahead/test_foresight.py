from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch

from router_service.lookahead import corpus, foresight
from router_service.lookahead.corpus import Chunk
from router_service.lookahead.record import Recorder, Trace
from router_service.lookahead.runner import Runner

TOKENS = 48


def recorded(model: Runner) -> Trace:
    """40 documents of random tokens, some of them cut short by the trace's capacity."""
    draw = torch.Generator().manual_seed(7)
    parts = [Chunk(f"{i:064x}", torch.randint(4, 320, (TOKENS,), generator=draw).tolist()) for i in range(40)]
    recorder, aside = Recorder(model.trunk, 40 * TOKENS - 10, torch.device("cpu")), corpus.kept_aside(parts)
    for group in corpus.batches(parts, 4, 4 * TOKENS):
        recorder.begin(group, aside)
        model.prefill([chunk.ids for chunk in group], recorder)
    trace = recorder.trace
    assert trace.tokens[: 2 * TOKENS].tolist() == parts[0].ids + parts[1].ids
    return trace


def test_it_names_more_than_the_most_loaded_experts_do(runner: Callable[[str], Runner]) -> None:
    model = runner("qwen3")
    trace = recorded(model)
    found = foresight.fit(model.trunk, trace)
    assert found is not None
    spec = model.trunk.spec
    assert found.weight.shape == (2 * spec.hidden_size, len(spec.moe_layers) * spec.num_experts)
    named, hot = spec.top_k + foresight.EXTRA, 0.0
    for layer in spec.moe_layers:
        load = torch.bincount(trace.ids[layer][: trace.rows].flatten().long(), minlength=spec.num_experts)
        hot += float(load.topk(named).values.sum() / load.sum()) / len(spec.moe_layers)
    assert hot + 0.05 < found.recall <= 1.0


def test_it_learns_what_depends_on_the_token_and_on_the_position_before(runner: Callable[[str], Runner]) -> None:
    """Layers that choose by the sign of one number of either input: all of it can be known, and none of it from the other."""
    model = runner("qwen3")
    trace, spec = recorded(model), model.trunk.spec
    last = spec.moe_layers[-1]
    before = torch.cat((torch.zeros(1, spec.hidden_size), trace.after[last][: trace.rows - 1].float()))
    by = model.trunk.embedding[trace.tokens[: trace.rows]][:, 3] > 0, before[:, 5] > 0
    for layer in spec.moe_layers:
        sign = by[layer % 2].long()
        for place in range(spec.top_k):
            trace.ids[layer][: trace.rows, place] = (sign * spec.num_experts // 2 + place).to(torch.int16)
    found = foresight.fit(model.trunk, trace)
    assert found is not None
    assert found.recall > 0.95


def test_where_it_cannot_be_there_is_none(runner: Callable[[str], Runner], monkeypatch: object) -> None:
    model = runner("qwen3")
    trace = recorded(model)
    trace.held_in[:] = False
    assert foresight.fit(model.trunk, trace) is None
    spec = model.trunk.spec
    dense_last = replace(spec, moe_layers=spec.moe_layers[:-1])
    trunk = type("Stub", (), {"spec": dense_last})()
    assert not foresight.possible(trunk)
