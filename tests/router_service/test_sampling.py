from __future__ import annotations

import itertools
import math
import random
import warnings

import pytest
import torch
from torch import Tensor
from transformers import (
    LogitsProcessorList,
    MinPLogitsWarper,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from router_service import sampling
from router_service.admission import SamplingParams
from router_service.sampling import WIDTHS, Sampled, sample, uniform

GREEDY = SamplingParams()


def transformers_scores(row: Tensor, params: SamplingParams) -> Tensor:
    """The row after transformers' own warpers, in the documented order; dropped tokens are -inf."""
    warpers = LogitsProcessorList()
    if params.temperature != 1:
        warpers.append(TemperatureLogitsWarper(params.temperature))
    if params.top_k:
        warpers.append(TopKLogitsWarper(params.top_k))
    if params.top_p < 1:
        warpers.append(TopPLogitsWarper(params.top_p))
    if params.min_p > 0:
        warpers.append(MinPLogitsWarper(params.min_p))
    return warpers(torch.LongTensor([[0]]), torch.FloatTensor(row[None].clone()))[0]


def drawn(row: Tensor, params: SamplingParams, chances: Tensor) -> Tensor:
    """The ids for each of `chances`, through the same two passes as `sample`."""
    knobs = torch.tensor([params.temperature, params.top_k, params.top_p, params.min_p], dtype=torch.float64)
    knobs = torch.cat([knobs.expand(len(chances), 4), chances[:, None].double()], dim=1)
    rows = row.expand(len(chances), -1)
    ids, settled = sampling._draw(rows, knobs, WIDTHS[0], needs_whole=not params.top_k)
    wide, all_settled = sampling._draw(rows, knobs, row.numel(), needs_whole=not params.top_k)
    assert bool(all_settled.all())
    assert torch.equal(ids[settled], wide[settled])
    return wide


def rows_of(kind: str, vocab: int, generator: torch.Generator) -> Tensor:
    row = torch.randn(vocab, generator=generator) * 3
    if kind == "ties":
        return row.round()
    if kind == "extreme":
        return row * 1e4
    if kind == "masked":
        return row.masked_fill(torch.rand(vocab, generator=generator) < 0.7, -math.inf).index_fill(0, torch.tensor([3]), 0.0)
    return row


FILTERS = [
    SamplingParams(temperature=t, top_k=k, top_p=p, min_p=m)
    for t, k, p, m in itertools.product([1.0, 0.5, 1.7], [0, 1, 7], [1.0, 0.9, 0.3, 1e-6], [0.0, 0.05, 1.0])
]


@pytest.mark.parametrize("kind", ["plain", "ties", "extreme", "masked"])
@pytest.mark.parametrize("vocab", [5, 50, 700])
def test_each_kept_token_gets_transformers_share_of_the_unit_interval(kind: str, vocab: int) -> None:
    """The middle of the r-th likeliest token's interval must give a token of the r-th likeliest score, and 1 - eps the last.

    Tokens lighter than 1e-9 are left out: their interval is narrower than transformers' float32.
    """
    generator = torch.Generator().manual_seed(vocab)
    row = rows_of(kind, vocab, generator)
    for params in FILTERS:
        kept = transformers_scores(row, params)
        order = kept.isfinite().nonzero()[:, 0]
        order = order[kept[order].argsort(descending=True, stable=True)]
        shares = (row[order].double() / params.temperature).softmax(0)
        visible = shares > 1e-9
        middles = (shares.cumsum(0) - shares / 2)[visible]
        got = drawn(row, params, middles)
        assert torch.equal(row[got], row[order[visible]]), (params, row[got], row[order])
        if bool(visible.all()):
            last = drawn(row, params, torch.tensor([1 - 2**-53], dtype=torch.float64))
            assert row[last] == row[order[-1]], params


@pytest.mark.parametrize("params", FILTERS)
def test_the_kept_set_has_transformers_size(params: SamplingParams) -> None:
    """With equal weights every kept token is an interval of the same width, so the last one can be reached."""
    row = torch.zeros(64)
    row[40:] = -math.inf
    size = int(transformers_scores(row, params).isfinite().sum())
    chances = (torch.arange(size, dtype=torch.float64) + 0.5) / size
    assert drawn(row, params, chances).tolist() == list(range(size))


def test_draws_follow_the_distribution() -> None:
    params = SamplingParams(temperature=0.8, top_k=9, top_p=0.95, min_p=0.01, seed=5)
    row = torch.randn(16, generator=torch.Generator().manual_seed(3)) * 2
    count = 20_000
    got = sample(row.expand(count, -1), [params] * count, range(count))
    share = torch.bincount(torch.tensor(got.ids), minlength=16).double() / count
    expected = transformers_scores(row, params).double().softmax(0)
    # Five standard deviations of a binomial share; the seed is fixed, so this cannot flicker.
    assert bool(((share - expected).abs() <= 5 * (expected * (1 - expected) / count).sqrt()).all())


def test_greedy_takes_the_lowest_id_of_equal_maxima() -> None:
    logits = torch.tensor([[0.0, 3.0, 3.0, 1.0], [-1.0, -1.0, -1.0, -1.0], [-math.inf, -math.inf, -5.0, -math.inf]])
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        assert sample(logits.to(dtype), [GREEDY] * 3, [0, 0, 0]) == Sampled([1, 0, 2], [None] * 3, [[], [], []])


def test_a_tiny_temperature_is_greedy_and_a_huge_one_is_flat() -> None:
    row = torch.tensor([[1e30, 2e30, -3e38, 0.0]])
    cold = SamplingParams(temperature=1e-45)
    assert {sample(row, [cold], [p]).ids[0] for p in range(20)} == {1}
    hot = SamplingParams(temperature=3e38)
    assert {sample(row, [hot], [p]).ids[0] for p in range(60)} == {0, 1, 2, 3}


def mixed_params(generator: random.Random, count: int) -> list[SamplingParams]:
    return [
        SamplingParams(
            temperature=generator.choice([0.0, 0.0, 0.3, 1.0, 30.0]),
            top_k=generator.choice([0, 3, 300]),
            top_p=generator.choice([1.0, 0.8]),
            min_p=generator.choice([0.0, 0.1]),
            seed=generator.getrandbits(64),
            top_logprobs=generator.choice([None, 0, 5, 20]),
        )
        for _ in range(count)
    ]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_row_does_not_depend_on_its_batch(dtype: torch.dtype) -> None:
    params = mixed_params(random.Random(1), 48)
    logits = (torch.randn(48, 1500, generator=torch.Generator().manual_seed(2)) * 4).to(dtype)
    positions = [7 * row for row in range(48)]
    batch = sample(logits, params, positions)
    for row in range(48):
        alone = sample(logits[row : row + 1], params[row : row + 1], positions[row : row + 1])
        assert (alone.ids[0], alone.logprobs[0], alone.tops[0]) == (batch.ids[row], batch.logprobs[row], batch.tops[row])
    assert sample(logits.flip(0), params[::-1], positions[::-1]).ids == batch.ids[::-1]


def test_a_flat_row_is_settled_over_the_whole_vocabulary() -> None:
    """10,000 equal tokens: the draw reads straight off the unit interval, and every id is a tie until all are ranked."""
    params = [SamplingParams(temperature=1.0, seed=seed, top_logprobs=2) for seed in range(20)]
    got = sample(torch.zeros(20, 10_000), params, [3] * 20)
    assert got.ids == [int(uniform(seed, 3) * 10_000) for seed in range(20)]
    assert max(got.ids) > WIDTHS[-1]
    assert len(got.late) > 10  # what the first width left open
    assert [token for token, _ in got.tops[7]] == [0, 1]


def test_logprobs_are_of_the_raw_logits() -> None:
    logits = torch.randn(3, 40, generator=torch.Generator().manual_seed(4)) * 3
    params = [SamplingParams(temperature=2.0, top_k=5, top_logprobs=3), GREEDY, SamplingParams(top_logprobs=0)]
    got = sample(logits, params, [1, 2, 3])
    expected = logits.log_softmax(-1)
    assert got.logprobs == [expected[0, got.ids[0]].item(), None, expected[2, got.ids[2]].item()]
    values, ids = expected[0].topk(3)
    assert got.tops == [list(zip(ids.tolist(), values.tolist(), strict=True)), [], []]


def test_alternatives_list_ties_by_lower_id_and_fit_the_vocabulary() -> None:
    got = sample(torch.tensor([[1.0, 2.0, 2.0, -0.0, 0.0]]), [SamplingParams(top_logprobs=20)], [0])
    assert [token for token, _ in got.tops[0]] == [1, 2, 0, 3, 4]


@pytest.mark.parametrize("broken", [[math.nan, 1.0, 2.0], [1.0, math.inf, 2.0], [-math.inf] * 3])
@pytest.mark.parametrize("params", [GREEDY, SamplingParams(temperature=1.0, top_k=2, top_p=0.5, min_p=0.1, top_logprobs=2)])
def test_a_row_without_a_finite_maximum_is_reported_and_harms_no_other(broken: list[float], params: SamplingParams) -> None:
    good = [0.0, 9.0, 1.0]
    got = sample(torch.tensor([good, broken, good]), [params] * 3, [0, 0, 0])
    assert got.bad == (1,)
    assert got.ids == [1, -1, 1]


def test_an_empty_batch_is_fine() -> None:
    assert sample(torch.empty(0, 8), [], []) == Sampled([], [], [])


def test_uniform_matches_the_published_generator_and_its_own_vectors() -> None:
    # First outputs of SplitMix64 from states 0 and 1234567 (the generator's reference vectors).
    assert sampling._splitmix64(0) == 0xE220A8397B1DCDAF
    assert sampling._splitmix64(1234567) == 6457827717110365317
    # Written down once: a change would change every seeded answer.
    assert [uniform(0, 0), uniform(0, 1), uniform((1 << 64) - 1, 5)] == [
        0.13870941014555427,
        0.5803592313314876,
        0.9277262799198309,
    ]


@pytest.mark.parametrize("along", ["positions", "seeds"])
def test_uniform_is_uniform_and_uncorrelated(along: str) -> None:
    count = 20_000
    values = torch.tensor([uniform(9, i) if along == "positions" else uniform(i, 9) for i in range(count)], dtype=torch.float64)
    assert 0.0 <= values.min() < values.max() < 1.0
    # Kolmogorov-Smirnov at 1e-6 significance: sqrt(ln(2 / 1e-6) / 2) = 2.69.
    gap = (values.sort().values - (torch.arange(count, dtype=torch.float64) + 0.5) / count).abs().max().item()
    assert gap < 2.7 / math.sqrt(count)
    centred = values - 0.5
    for lag in (1, 2, 7):
        correlation = (centred[lag:] * centred[:-lag]).mean().item() * 12
        assert abs(correlation) < 5 / math.sqrt(count)


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore:Synchronization debug mode")
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_cuda_draws_the_cpus_tokens_and_does_not_wait_to_choose() -> None:
    params = [p if p.top_k == 0 or p.temperature < 2 else GREEDY for p in mixed_params(random.Random(1), 48)]
    logits = torch.randn(48, 1500, generator=torch.Generator().manual_seed(2)) * 8
    expected, there = sample(logits, params, range(48)), logits.cuda()
    landing = torch.zeros(48, dtype=torch.int64, device="cuda"), torch.zeros(48, dtype=torch.int64, pin_memory=True)
    try:
        torch.cuda.set_sync_debug_mode("warn")
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            sampling.choose(there, params, range(48), into=landing)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert not [w for w in caught if "synchroniz" in str(w.message)], [str(w.message) for w in caught]
    got = sample(there, params, range(48))
    assert got.ids == expected.ids
    assert [[token for token, _ in tops] for tops in got.tops] == [[token for token, _ in tops] for tops in expected.tops]
