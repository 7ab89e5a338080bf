"""The device MoE against float64 on the weights that the codes mean; in Triton's interpreter where there is no GPU."""

from __future__ import annotations

import pytest
import torch
from expert_pools import DEVICE, Call, make_call, make_experts, poison, worst

from forefetch.kernels.gate import choose
from forefetch.kernels.gate.triton import choose_into
from forefetch.kernels.grouped_mlp import fragment
from forefetch.kernels.grouped_mlp.formats import ExpertFormat
from forefetch.kernels.grouped_mlp.moe import moe, moe_from_logits, unsummed_from_logits
from forefetch.kernels.grouped_mlp.scratch import MoeScratch, unit_size, units
from forefetch.kernels.norm import triton as norm

pytestmark = pytest.mark.filterwarnings("ignore:invalid value", "ignore:overflow")  # the interpreter computes NaN rows in NumPy

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
# experts, hidden, width, tokens, top_k, kind, type of x
CASES = [
    (6, 64, 32, 5, 2, ExpertFormat("bfloat16"), BF16),
    (6, 64, 32, 5, 6, ExpertFormat("float16"), FP16),
    (5, 96, 64, 7, 3, ExpertFormat("float32"), FP32),
    (5, 96, 160, 1, 1, ExpertFormat("int8", 64), BF16),
    (4, 32, 32, 20, 3, ExpertFormat("int8"), FP16),
    (5, 256, 64, 5, 3, ExpertFormat("int4"), BF16),
    (3, 160, 96, 17, 2, ExpertFormat("int4", 64), FP32),
]


@pytest.mark.parametrize(("experts", "hidden", "width", "tokens", "top_k", "form", "dtype"), CASES, ids=str)
def test_equals_the_definition_and_repeats(
    experts: int, hidden: int, width: int, tokens: int, top_k: int, form: ExpertFormat, dtype: torch.dtype
) -> None:
    pool = make_experts(experts, hidden, width, form)
    call = make_call(tokens, top_k, pool, dtype)
    scratch = pool.scratch(tokens, top_k, dtype)
    out = call.run(pool, scratch)
    assert worst(pool, call, out) <= 1
    assert torch.equal(call.run(pool, poison(scratch)), out)


def test_many_tokens_of_one_expert() -> None:
    """More pairs than one program of the routing takes (256), and nearly all of them for a few experts."""
    pool = make_experts(5, 32, 32, ExpertFormat("int8"))
    call = make_call(100, 3, pool, FP32, skew=3.0)
    assert worst(pool, call, call.run(pool)) <= 1


def test_padding_and_experts_without_a_slot_add_nothing() -> None:
    pool = make_experts(6, 64, 32, ExpertFormat("int8"))
    call = make_call(8, 3, pool, BF16)
    call.ids[2], call.ids[5, 1] = -1, -1
    call.weights[2] = torch.nan
    pool.slot_of[int(call.ids[0, 0])] = -1
    out = call.run(pool)
    assert worst(pool, Call(call.x, call.ids, call.weights.nan_to_num()), out) <= 1
    assert not out[2].any()


def test_scratch_serves_fewer_tokens_and_int32_ids() -> None:
    pool = make_experts(6, 64, 32, ExpertFormat("bfloat16"))
    scratch = pool.scratch(20, 2, BF16)
    for tokens in (20, 3):
        call = make_call(tokens, 2, pool, BF16)
        call.ids = call.ids.int()
        assert worst(pool, call, call.run(pool, scratch)) <= 1


def test_a_nan_row_leaves_its_neighbours_bit_equal() -> None:
    pool = make_experts(3, 64, 32, ExpertFormat("int4"))
    call = make_call(9, 2, pool, BF16)
    clean = call.run(pool)
    call.x[4] = torch.nan
    out = call.run(pool)
    others = torch.arange(9) != 4
    assert torch.equal(out[others], clean[others])
    assert out[4].isnan().all()


def test_a_row_does_not_depend_on_its_batch() -> None:
    """Within one size of units, a row alone has the bits that it has among others."""
    pool = make_experts(8, 64, 32, ExpertFormat("int8"))
    call = make_call(12, 2, pool, BF16)
    whole = call.run(pool)
    for row in (0, 7):
        part = slice(row, row + 1)
        alone = Call(call.x[part], call.ids[part], call.weights[part])
        assert torch.equal(alone.run(pool)[0], whole[row])


@pytest.mark.parametrize("broken", ["nibble", "column", "weight"])
def test_a_broken_kernel_fails(broken: str) -> None:
    """In float32 the bound is tight enough to see an error in one bit of the unpacking, one column, one gate weight."""
    pool = make_experts(6, 128, 64, ExpertFormat("int4"))
    call = make_call(6, 2, pool, FP32)
    out = call.run(pool)
    if broken == "nibble":
        wrong = pool.pool.clone()
        wrong[int(pool.slot_of[call.ids[0, 0]]), 17] ^= 0x10
        pool.pool = wrong
        out = call.run(pool)
    elif broken == "column":
        out[1, 5] = out[1, 6]
    else:
        call.weights[3, 1] *= 1.02
    assert worst(pool, call, out) > 1


@pytest.mark.parametrize("dtype", [BF16, FP32])
@pytest.mark.parametrize(("rule", "renormalise"), [("softmax_topk", True), ("softmax_topk", False), ("topk_softmax", False)])
def test_from_logits(rule: str, renormalise: bool, dtype: torch.dtype) -> None:
    pool = make_experts(6, 64, 32, ExpertFormat("int8"))
    call = make_call(5, 3, pool, BF16)
    logits = torch.randn(5, 6, generator=torch.Generator().manual_seed(1)).to(dtype).to(DEVICE)
    scratch, out = pool.scratch(7, 3, BF16), torch.full(call.x.shape, torch.nan, device=DEVICE)
    moe_from_logits(call.x, logits, rule, renormalise, pool.pool, pool.slot_of, out, scratch)  # type: ignore[arg-type]
    ids, weights = choose(logits, 3, rule, renormalise)  # type: ignore[arg-type]
    assert torch.equal(scratch.ids[:15].view(5, 3).long(), ids)
    assert torch.allclose(scratch.weights[:15].view(5, 3), weights, rtol=1e-6)
    call.ids, call.weights = ids, scratch.weights[:15].view(5, 3)
    assert torch.equal(call.run(pool), out)


@pytest.mark.parametrize("dtype", [BF16, FP32])
def test_the_norm_behind_adds_a_token_up_bit_for_bit(dtype: torch.dtype) -> None:
    pool = make_experts(6, 64, 32, ExpertFormat("int8"))
    call, scratch = make_call(5, 3, pool, dtype), poison(pool.scratch(7, 3, dtype))
    pool.slot_of[4] = -1
    logits = torch.randn(5, 6, generator=torch.Generator().manual_seed(1)).to(DEVICE)
    where, weight = (pool.pool, pool.slot_of), torch.rand(64, dtype=dtype, device=DEVICE)
    out = torch.empty_like(call.x)
    for _ in range(2):  # the counters are left at zero both ways
        moe_from_logits(call.x, logits, "softmax_topk", True, *where, out, scratch)
        expected = norm.add_rms_norm(call.x, out, weight, 1e-6, 0.5)
        pairs = unsummed_from_logits(call.x, logits, "softmax_topk", True, *where, scratch)
        found = norm.add_rms_norm(call.x, pairs, weight, 1e-6, 0.5)
        assert all(torch.equal(*both) for both in zip(found, expected, strict=True))
        assert not scratch.counts.any()
        assert not scratch.ready.any()


def test_what_does_not_fit_is_refused() -> None:
    pool = make_experts(4, 64, 32, ExpertFormat("int8"))
    call = make_call(3, 2, pool, BF16)
    scratch, out = pool.scratch(3, 2, BF16), torch.empty(3, 64, device=DEVICE)
    good = {"x": call.x, "ids": call.ids, "weights": call.weights, "pool": pool.pool, "slot_of": pool.slot_of, "out": out}
    for name, bad in {
        "x": call.x.half(),
        "ids": call.ids[:, :1],
        "weights": call.weights.double(),
        "pool": pool.pool[:, :-2560],
        "slot_of": pool.slot_of.long(),
        "out": out.t(),
    }.items():
        with pytest.raises(ValueError, match=r".+"):
            moe(**{**good, name: bad}, scratch=scratch)
    with pytest.raises(ValueError, match="multiples of 32"):
        MoeScratch(3, 2, 4, 40, 32, ExpertFormat("int8"), device=DEVICE, dtype=BF16)
    moe(**{**good, "x": call.x[:0], "ids": call.ids[:0], "weights": call.weights[:0], "out": out[:0]}, scratch=scratch)


def test_units_never_exceed_their_number() -> None:
    draw = torch.Generator().manual_seed(0)
    for _ in range(200):
        experts, size = int(torch.randint(1, 9, (), generator=draw)), 4
        counts = torch.randint(0, 20, (experts,), generator=draw)
        assert int((counts + size - 1).div(size, rounding_mode="floor").sum()) <= units(int(counts.sum()), experts, size)
    assert [unit_size(8 * tokens, 128) for tokens in (1, 64, 512, 2048)] == [16, 16, 32, 128]


def test_choice_is_exact_with_ties_to_the_lower_index() -> None:
    """Few distinct values, infinities, NaN: as a stable descending sort would choose."""
    draw = torch.Generator().manual_seed(2)
    logits = torch.randint(-2, 3, (8, 37), generator=draw).float()
    logits[3], logits[4, :30], logits[5, 7], logits[6, 2] = torch.nan, -torch.inf, torch.inf, torch.nan
    for dtype in (FP32, BF16, FP16):
        ids = torch.full((8, 9), -7, dtype=torch.int64, device=DEVICE)
        weights = torch.full((8, 9), torch.nan, device=DEVICE)
        choose_into(logits.to(dtype).to(DEVICE), ids, weights, "topk_softmax", False)
        order = logits.sort(dim=1, descending=True, stable=True).indices[:, :9]
        # All NaN has no order; and the interpreter's bfloat16 does not know NaN.
        sane = torch.tensor([row for row in range(8) if row != 3 and (row != 6 or dtype != BF16)])
        assert torch.equal(ids.cpu()[sane], order[sane])
        assert sorted(set(ids[3].tolist())) == sorted(ids[3].tolist())
        finite = torch.tensor([row for row in range(8) if row not in {3, 5, 6}])
        assert torch.allclose(weights.cpu()[finite], logits[finite].gather(1, order[finite]).softmax(1), rtol=1e-5)


@pytest.mark.parametrize("renormalise", [True, False])
def test_weights_are_the_same_bits_whoever_is_added_first(renormalise: bool) -> None:
    """A kernel's layout decides the order in which a row is added up, so experts in another order must not change a bit."""
    logits = torch.randn(16, 100, generator=torch.Generator().manual_seed(7))
    ids = torch.zeros(16, 8, dtype=torch.int64, device=DEVICE)
    weights, others = torch.zeros(16, 8, device=DEVICE), torch.zeros(16, 8, device=DEVICE)
    choose_into(logits.to(DEVICE), ids, weights, "softmax_topk", renormalise)
    for seed in range(4):
        order = torch.randperm(100, generator=torch.Generator().manual_seed(seed))
        choose_into(logits[:, order].contiguous().to(DEVICE), ids, others, "softmax_topk", renormalise)
        assert torch.equal(others, weights)


gpu = [pytest.mark.gpu, pytest.mark.skipif(DEVICE == "cpu", reason="no CUDA device")]
FRAGMENT = [
    pytest.param(ExpertFormat(kind, group, "fragment"), marks=gpu)  # type: ignore[arg-type]
    for kind, group in (("int4", 128), ("int4", 64), ("int8", 128), ("int8", 64))
]
FORMATS = [*(pytest.param(ExpertFormat(kind), marks=gpu) for kind in ("bfloat16", "int8", "int4")), *FRAGMENT]  # type: ignore[arg-type]


@pytest.mark.parametrize("form", [each.values[0] for each in FRAGMENT], ids=str)
def test_prompts_in_fragment_order(form: ExpertFormat, monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernels for many tokens are plain Triton, so they run here too."""
    monkeypatch.setattr(fragment, "DIRECT_TOKENS", 0)
    monkeypatch.setattr(fragment, "PERSISTENT_TOKENS", 0)
    pool = make_experts(2, 128, 128, form)
    call, scratch = make_call(20, 2, pool, BF16), pool.scratch(20, 2, BF16)
    call.ids[7, 0] = -1
    out = call.run(pool, scratch)
    assert worst(pool, call, out) <= 1
    assert torch.equal(call.run(pool, poison(scratch)), out)
    wrong = pool.pool.clone()
    wrong[int(pool.slot_of[call.ids[0, 0]]), 17] ^= 0x80
    pool.pool = wrong
    assert worst(pool, call, call.run(pool)) > 1


@pytest.mark.parametrize("form", FRAGMENT, ids=str)
@pytest.mark.parametrize(
    ("experts", "hidden", "width", "tokens", "top_k", "skew", "dtype"),
    [
        (8, 256, 128, 1, 2, 0.0, BF16),  # the direct kernels, the sum inside
        (8, 512, 384, 4, 3, 0.0, FP16),  # and apart
        (5, 128, 128, 7, 1, 0.0, BF16),  # the persistent one: fewer items than programs
        (40, 256, 128, 64, 6, 0.0, BF16),  # more, each of few steps
        (40, 256, 384, 64, 6, 0.0, FP16),
        (16, 384, 128, 64, 2, 3.0, BF16),  # many more than 8 tokens for one expert
        (32, 2048, 768, 16, 8, 0.0, BF16),
        (8, 256, 128, 700, 2, 0.5, BF16),  # prompts
    ],
)
def test_fragment_order(
    experts: int, hidden: int, width: int, tokens: int, top_k: int, skew: float, dtype: torch.dtype, form: ExpertFormat
) -> None:
    pool = make_experts(experts, hidden, width, form)
    call, scratch = make_call(tokens, top_k, pool, dtype, skew), pool.scratch(tokens, top_k, dtype)
    out = call.run(pool, scratch)
    scratch.check()
    assert worst(pool, call, out) <= 1
    assert torch.equal(call.run(pool, poison(scratch)), out)
    call.ids[tokens // 2] = -1
    pool.slot_of[int(call.ids[0, 0])] = -1
    assert worst(pool, call, call.run(pool, poison(scratch))) <= 1
    if tokens > 1:
        clean = call.run(pool, scratch)
        call.x[1] = torch.nan
        others = torch.arange(tokens) != 1
        assert torch.equal(call.run(pool, poison(scratch))[others], clean[others])


@pytest.mark.parametrize("tokens", [2, 20])
@pytest.mark.parametrize("form", FRAGMENT, ids=str)
def test_fragment_order_from_logits(form: ExpertFormat, tokens: int) -> None:
    pool = make_experts(40, 256, 128, form)
    call, scratch = make_call(tokens, 4, pool, BF16), pool.scratch(tokens, 4, BF16)
    for dtype in (BF16, FP32):
        logits = torch.randint(-9, 10, (tokens, 40), device=DEVICE).to(dtype)
        out = torch.full(call.x.shape, torch.nan, device=DEVICE)
        moe_from_logits(call.x, logits, "softmax_topk", False, pool.pool, pool.slot_of, out, scratch)
        order = logits.float().sort(dim=1, descending=True, stable=True).indices[:, :4].contiguous()
        assert torch.equal(scratch.ids[: 4 * tokens].view(tokens, 4).long(), order)
        weights = scratch.weights[: 4 * tokens].view(tokens, 4).clone()
        assert torch.allclose(weights, logits.float().softmax(1).gather(1, order), rtol=1e-5)
        apart = torch.empty_like(weights)
        choose_into(logits, torch.empty_like(order), apart, "softmax_topk", False)
        assert torch.equal(weights, apart), "slots and lanes have other kernels for the choice"
        assert torch.equal(Call(call.x, order, weights).run(pool), out)
        sums, weight = out.to(BF16), torch.rand(256, dtype=BF16, device=DEVICE)
        pairs = unsummed_from_logits(call.x, logits, "softmax_topk", False, pool.pool, pool.slot_of, scratch)
        both = zip(*(norm.add_rms_norm(call.x, each, weight, 1e-6, 1.0) for each in (pairs, sums)), strict=True)
        assert all(torch.equal(*each) for each in both)
        assert not scratch.counts.any()
        assert not scratch.ready.any()


@pytest.mark.parametrize("form", FORMATS, ids=str)
def test_a_captured_call_follows_its_inputs_and_slots(form: ExpertFormat) -> None:
    pool = make_experts(64, 256, 128, form)
    call, scratch = make_call(16, 8, pool, BF16), pool.scratch(16, 8, BF16)
    out = torch.empty(call.x.shape, device=DEVICE)
    moe(call.x, call.ids, call.weights, pool.pool, pool.slot_of, out, scratch)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        moe(call.x, call.ids, call.weights, pool.pool, pool.slot_of, out, scratch)
    for turn in range(3):
        fresh = make_call(16 + turn, 8, pool, BF16)
        call.x.copy_(fresh.x[:16])
        call.ids.copy_(fresh.ids[:16])
        out.fill_(torch.nan)
        graph.replay()
        assert worst(pool, call, out) <= 1
