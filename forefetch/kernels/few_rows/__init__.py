"""Products of few rows with a large weight: reading the weight once is all the time there is to spend.

The inner dimension is cut into shares, so that the whole machine reads; shares are left as they are, float32, and added up in
their order by the kernel that reads the product anyway (`kernels.qkv.enter`, `kernels.norm.add_rms_norm`). So a product is one
launch and a result repeats bit for bit. Letters: T rows, K inner, N outer dimension, S shares.
"""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["few_rows", "logits", "shared"]


def few_rows(x: Tensor, weight: Tensor) -> Tensor:
    """x [T, K], weight [K, N] -> [S, T, N] float32, whose sum over S is the product; or the product itself, [T, N] of x's type,
    where no kernel of ours is faster (or made: they are for 16-bit types)."""
    if x.is_cuda and x.element_size() == 2:
        from forefetch.kernels.few_rows import triton

        if (plan := triton.plan(len(x), *weight.shape)) is not None:
            return triton.product(x, weight, plan)
    return x @ weight


def logits(x: Tensor, weight: Tensor) -> Tensor:
    """x [T, K], weight [N, K] -> [T, N] of x's type, for a gate: few columns."""
    if x.is_cuda and x.element_size() == 2:
        from forefetch.kernels.few_rows import triton

        if (plan := triton.gate_plan(len(x), *weight.shape)) is not None:
            return triton.gate(x, weight, plan)
    return torch.nn.functional.linear(x, weight)


def shared(product: Tensor, dtype: torch.dtype) -> Tensor:
    """What `few_rows` gave -> [T, N] of `dtype`."""
    return product.sum(0).to(dtype) if product.ndim == 3 else product
