"""Pools of experts for the device kernels' tests: random weights in random slots among poison, the exact result, the bound."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from forefetch.kernels.grouped_mlp.formats import ExpertFormat, blob_bytes, pack, unpack
from forefetch.kernels.grouped_mlp.moe import moe
from forefetch.kernels.grouped_mlp.scratch import MoeScratch

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"  # the CPU means Triton's interpreter


@dataclass
class Experts:
    """E experts in slots of a pool whose every other byte is 0xFF, which is NaN in each float type."""

    format: ExpertFormat
    hidden: int
    width: int
    pool: Tensor  # uint8 [S, stride]
    slot_of: Tensor  # int32 [E]
    w13: Tensor  # float64 [E, 2I, H], what the codes mean
    w2: Tensor  # float64 [E, H, I]

    def scratch(self, tokens: int, top_k: int, dtype: torch.dtype) -> MoeScratch:
        return poison(
            MoeScratch(tokens, top_k, len(self.slot_of), self.hidden, self.width, self.format, device=DEVICE, dtype=dtype)
        )


@dataclass
class Call:
    x: Tensor  # [T, H]
    ids: Tensor  # int64 [T, K]
    weights: Tensor  # float32 [T, K]

    def run(self, experts: Experts, scratch: MoeScratch | None = None) -> Tensor:
        scratch = scratch or experts.scratch(len(self.x), self.ids.shape[1], self.x.dtype)
        out = torch.full(self.x.shape, torch.nan, dtype=torch.float32, device=DEVICE)
        moe(self.x, self.ids, self.weights, experts.pool, experts.slot_of, out, scratch)
        return out


def make_experts(experts: int, hidden: int, width: int, format: ExpertFormat, spare: int = 3) -> Experts:
    draw = torch.Generator(DEVICE).manual_seed(experts * 7 + hidden + width)
    size = blob_bytes(hidden, width, format)
    slots = torch.randperm(experts + spare, generator=draw, device=DEVICE)[:experts]
    pool = torch.full((experts + spare + 1, size + 2048), 0xFF, dtype=torch.uint8, device=DEVICE)[1:]
    means = []
    for slot in slots.tolist():  # packed where there is a GPU on it: test processes that share a CPU take a minute for a pool
        w13 = torch.randn(2 * width, hidden, generator=draw, device=DEVICE) * hidden**-0.5
        w2 = torch.randn(hidden, width, generator=draw, device=DEVICE) * width**-0.5
        pool[slot, :size] = pack(w13, w2, format)
        means.append(unpack(pool[slot], hidden, width, format, torch.float64))
    w13s, w2s = (torch.stack(each) for each in zip(*means, strict=True))
    return Experts(format, hidden, width, pool, slots.int(), w13s, w2s)


def make_call(tokens: int, top_k: int, experts: Experts, dtype: torch.dtype, skew: float = 0.0) -> Call:
    """skew 0: every expert alike; the larger, the more tokens choose the same few."""
    draw = torch.Generator().manual_seed(tokens * 100 + top_k)
    count = len(experts.slot_of)
    liking = torch.randn(tokens, count, generator=draw) - skew * torch.arange(count)
    return Call(
        torch.randn(tokens, experts.hidden, generator=draw).to(dtype).to(DEVICE),
        liking.topk(top_k, dim=1).indices.to(DEVICE),
        torch.rand(tokens, top_k, generator=draw).to(DEVICE),
    )


def poison(scratch: MoeScratch) -> MoeScratch:
    for values in (scratch.h, scratch.y, scratch.x_half, scratch.weights):
        values.fill_(torch.nan)
    for integers in (scratch.table, scratch.live, scratch.ids):
        integers.fill_(12345)
    return scratch


def exact_and_bound(experts: Experts, call: Call) -> tuple[Tensor, Tensor]:
    """The float64 result [T, H], and how far a correct one may be from it.

    Sums of n terms in float32, in any order, with a scale per group applied to partial sums: |error| <= 2 n u |a| |b| with
    u = 2^-24. h is rounded to the arithmetic's type: r |value|. silu' is within
    [-0.1, 1.1] and its evaluation costs a few u. All passes through the second product and the weighted sum in absolute
    value; times two for the second-order terms dropped.
    """
    half = experts.format.order == "fragment"
    u, r = 2.0**-24, 2.0**-11 if half else torch.finfo(call.x.dtype).eps / 2
    held = (call.ids >= 0) & (experts.slot_of[call.ids.clamp_min(0)] >= 0)
    total = torch.zeros(call.x.shape, dtype=torch.float64, device=call.x.device)
    bound = torch.zeros_like(total)
    for expert in call.ids[held].unique().tolist():
        token, place = ((call.ids == expert) & held).nonzero(as_tuple=True)
        x, weight = call.x[token].double(), call.weights[token, place, None].double()
        w13, w2 = experts.w13[expert], experts.w2[expert]
        (gate, up), size = (x @ w13.T).chunk(2, 1), x.abs() @ w13.abs().T
        # Half precision holds 16-bit inputs exactly but for the smallest: down to 2^-24, and some are divided by 16 first.
        error = size * (2 * experts.hidden * u) + half * 2.0**-20 * w13.abs().sum(1)
        dgate, dup = error.chunk(2, 1)
        active = functional.silu(gate) * up
        dactive = 1.1 * dgate * up.abs() + functional.silu(gate).abs() * dup + (r + 16 * u) * active.abs() + half * 2.0**-20
        dactive += 8 * u * gate.abs() * up.abs()
        y = active @ w2.T
        dy = dactive @ w2.abs().T + 2 * experts.width * u * (active.abs() @ w2.abs().T)
        total.index_add_(0, token, weight * y)
        bound.index_add_(0, token, weight * (dy + 16 * u * y.abs()))
    return total, 2 * bound + 1e-30


def worst(experts: Experts, call: Call, out: Tensor) -> float:
    """Largest error as a share of what is allowed: above 1 is wrong. NaN counts as infinite."""
    exact, bound = exact_and_bound(experts, call)
    return float(((out.double() - exact).abs() / bound).nan_to_num(nan=torch.inf).max())
