from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from forefetch.errors import ConfigError
from router_service.lookahead import corpus
from router_service.lookahead.corpus import Chunk
from router_service.lookahead.estimate import Estimator
from router_service.lookahead.record import Recorder
from router_service.lookahead.runner import Runner
from router_service.lookahead.train import Options, Task, Tasks, calibrate, distil, lead, loss, train_head


def task(noise: float, rows: int = 4000, experts: int = 16, top_k: int = 4) -> Task:
    """True logits are tier 0's plus a smooth function of the features plus noise."""
    draw = torch.Generator().manual_seed(2)
    features = torch.randn(rows, 12, generator=draw)
    base = torch.randn(rows, experts, generator=draw)
    truth = base + torch.tanh(features @ torch.randn(12, experts, generator=draw) / 2)
    truth += noise * torch.randn(rows, experts, generator=draw)
    member = torch.zeros(rows, experts, dtype=torch.bool).scatter_(1, truth.topk(top_k).indices, True)
    held_in = torch.arange(rows) % 10 == 0
    return Task(features.half(), base.half(), truth.half(), member, held_in, top_k)


def test_a_head_is_kept_when_there_is_something_to_learn() -> None:
    work = task(noise=0.0)
    head, recall = train_head(work, Options(rank=32, epochs=30, batch=256, rate=1e-2))
    assert head.correction is not None
    assert recall > work.recall(work.base[work.held_in].float()) + 0.05


def test_tier_0_stays_when_there_is_nothing_to_learn() -> None:
    work = task(noise=0.0)
    work = Task(torch.randn_like(work.features), work.truth, work.truth, work.member, work.held_in, work.top_k)
    head, recall = train_head(work, Options(rank=4, epochs=1))
    assert head.correction is None
    assert recall == 1.0


def test_calibrated_probabilities_are_frequencies() -> None:
    work = task(noise=0.5)
    logits = work.base.float()
    best, ids = logits.topk(work.top_k + 2)
    scale, shift = calibrate(lead(best, work.top_k), work.member.gather(1, ids))
    chance = torch.sigmoid(scale * lead(best, work.top_k) + shift)
    hit = work.member.gather(1, ids).float()
    for low, high in ((0.0, 0.5), (0.5, 0.7), (0.7, 0.9)):
        inside = (chance >= low) & (chance < high)
        if inside.sum() > 500:  # standard error of a frequency there: under 0.023
            assert abs(float(hit[inside].mean() - chance[inside].mean())) < 0.07


def test_the_true_logits_have_the_least_loss() -> None:
    work = task(noise=0.0)
    truth = work.truth.float()
    best = loss(truth, truth, work.member, work.top_k)
    assert best < loss(work.base.float(), truth, work.member, work.top_k)


def test_choosing_all_experts_is_no_special_case() -> None:
    logits = torch.randn(32, 8)
    everything = torch.ones(32, 8, dtype=torch.bool)
    assert torch.isfinite(loss(logits, logits, everything, 8))
    scale, shift = calibrate(lead(logits, 8), everything)
    assert torch.sigmoid(scale * lead(logits, 8) + shift).min() > 0.5


def test_a_distilled_network_explains_more_than_the_means(runner: Callable[[str], Runner]) -> None:
    model, draw = runner("qwen3"), torch.Generator().manual_seed(7)
    parts = [Chunk(f"{i:064x}", torch.randint(4, 320, (48,), generator=draw).tolist()) for i in range(40)]
    recorder, aside = Recorder(model.trunk, 40 * 48, torch.device("cpu")), corpus.kept_aside(parts)
    for group in corpus.batches(parts, 4, 192):
        recorder.begin(group, aside)
        model.prefill([chunk.ids for chunk in group], recorder)
    trace, means = recorder.trace, recorder.mean_outputs()
    tasks = Tasks(model.trunk, trace, Estimator(model.trunk, means))
    network = distil(tasks, 0, model.experts.weights(0), Options(distilled=64, epochs=30, batch=128))
    held = ~trace.held_in[: trace.rows]  # a random model's experts cannot be learned from so few rows: only fitted
    x, ids, weights = trace.x[0][held].float(), trace.ids[0][held].long(), trace.weights[0][held].float()
    errors = [
        float((look.behind(0, x, ids, weights) - trace.after[0][held].float()).square().sum())
        for look in (Estimator(model.trunk, {}), Estimator(model.trunk, means), Estimator(model.trunk, means, {0: network}))
    ]
    assert errors[2] < 0.95 * errors[1]
    assert errors[1] < errors[0]


def test_documents_are_whole_and_on_one_side(tmp_path: Path) -> None:
    file = tmp_path / "text.txt"
    file.write_text("one\ntwo<|endoftext|>\n\n<|endoftext|>\nthree")
    assert corpus.read_documents(file, "<|endoftext|>") == ["one\ntwo", "three"]
    assert corpus.read_documents(file, "") == [file.read_text()]
    file.write_text("  \n")
    with pytest.raises(ConfigError, match=r"text\.txt: has no text"):
        corpus.read_documents(file, "")
    parts = [Chunk(f"{i % 25:064x}", [1] * 8) for i in range(100)]
    aside = corpus.kept_aside(parts)
    assert len(aside) == 3


def test_batches_hold_every_chunk_once_within_bounds() -> None:
    parts = [Chunk(str(i), [1] * (1 + 37 * i % 90)) for i in range(50)]
    groups = list(corpus.batches(parts, sequences=4, rows=128))
    assert [chunk for group in groups for chunk in group] == parts
    assert all(len(group) <= 4 and (len(group) == 1 or sum(len(c.ids) for c in group) <= 128) for group in groups)
