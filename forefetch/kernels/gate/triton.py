"""Expert choice on the device: exact top-k of a row's logits by one program, ties to the lower index.

A logit becomes an integer that orders as the float does, so that equal values, infinities and NaN have a definite place and a
row's ids are always distinct. Choosing by logits is choosing by softmax, except that probabilities which round to the same
value still differ here.
"""

from __future__ import annotations

from typing import Literal

import torch
import triton
import triton.language as tl
from torch import Tensor

LOWEST = tl.constexpr(-0x80000000)
UNIT = tl.constexpr(float(1 << 40))


def choose_into(
    logits: Tensor,
    ids: Tensor,
    weights: Tensor,
    rule: Literal["softmax_topk", "topk_softmax"],
    renormalise: bool,
) -> None:
    """`forefetch.kernels.gate.choose` into ids [T, K] int32 or int64 and weights [T, K] float32; fit for CUDA graphs.

    logits [T, E] of any float type, rows contiguous. ValueError for shapes and types that do not fit.
    """
    tokens, experts = logits.shape
    if ids.shape != weights.shape or len(ids) != tokens or not 0 < ids.shape[1] <= experts:
        raise ValueError(f"logits {tuple(logits.shape)}, ids {tuple(ids.shape)}, weights {tuple(weights.shape)}")
    if weights.dtype != torch.float32 or ids.dtype not in {torch.int32, torch.int64} or logits.stride(1) != 1:
        raise ValueError("weights must be float32, ids integers, and rows of logits contiguous")
    if not (ids.is_contiguous() and weights.is_contiguous()):
        raise ValueError("ids and weights must be contiguous")
    if tokens:
        _choose[(tokens,)](
            *(logits, ids, weights, logits.stride(0)),
            *(experts, ids.shape[1], triton.next_power_of_2(experts), rule == "topk_softmax" or renormalise),
            num_warps=1,
        )


@triton.jit
def _choose(logits, ids, weights, row, E: tl.constexpr, K: tl.constexpr, EP: tl.constexpr, RENORMALISE: tl.constexpr):
    token = tl.program_id(0)
    chosen, place, weight = top_k(logits + token.to(tl.int64) * row, E, K, EP, RENORMALISE)
    tl.store(ids + token * K + place, tl.arange(0, EP), mask=chosen)
    tl.store(weights + token * K + place, weight, mask=chosen)


@triton.jit
def top_k(logits, E: tl.constexpr, K: tl.constexpr, EP: tl.constexpr, RENORMALISE: tl.constexpr):
    """One row [E] -> over EP >= E lanes, an expert each: whether it is chosen, its place among the K, its weight."""
    expert = tl.arange(0, EP)
    stored = tl.load(logits + expert, mask=expert < E, other=-float("inf"))
    value = stored.to(tl.float32)
    place = tl.full([EP], K, tl.int32)
    if stored.dtype.primitive_bitwidth == 16 and EP <= 65536:  # value and index in one integer: half as many reductions
        bits = stored.to(tl.int16, bitcast=True).to(tl.int32)
        key = tl.where(bits < 0, bits ^ 0x7FFF, bits) * 65536 + (65535 - expert)
        key = tl.where(expert < E, key, LOWEST)
        for k in tl.static_range(K):
            winner = key == tl.max(key, 0)
            place = tl.where(winner, k, place)
            key = tl.where(winner, LOWEST, key)
    else:
        bits = value.to(tl.int32, bitcast=True)
        key = tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)
        for k in tl.static_range(K):
            # Chosen ones and padding leave for the lowest key; an expert with a key as low (a NaN) must still go first.
            left = (place == K) & (expert < E)
            best = tl.max(tl.where(left, key, LOWEST), 0)
            winner = tl.min(tl.where(left & (key == best), expert, EP), 0)
            place = tl.where(expert == winner, k, place)
    chosen = place < K
    power = tl.exp(value - tl.max(value, 0))
    power = tl.where(expert < E, power, 0.0)
    total = total_of(tl.where(chosen, power, 0.0) if RENORMALISE else power)
    return chosen, place, power / total


@triton.jit
def total_of(power):
    """The sum of powers in [0, 1], the same bits in every kernel: as integers, whose sum does not depend on the order.

    A float sum follows the layout that a compiler gave the row, which differs from kernel to kernel, and a weight that differs
    in its last bit makes other tokens sooner or later. 2^-40 is far below float32's last bit of a sum that is 1 or more."""
    return tl.sum((power * UNIT).to(tl.int64), 0).to(tl.float32) * (1.0 / UNIT)
