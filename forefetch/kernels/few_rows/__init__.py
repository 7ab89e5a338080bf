"""Products of few rows with a large weight: reading the weight once is all the time there is to spend.

The inner dimension is cut into shares, so that the whole machine reads; shares are left as they are, float32, and added up in
their order by the kernel that reads the product anyway (`kernels.qkv.enter`, `kernels.norm.add_rms_norm`). So a product is one
launch and a result repeats bit for bit. A weight may be kept in 8 bits (`Rounded`), which halves what there is to read.
Letters: T rows, K inner, N outer dimension, S shares.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from forefetch.kernels.few_rows import plans
from forefetch.kernels.few_rows.rounded import Rounded

__all__ = ["Matrix", "Rounded", "few_rows", "logits", "projection", "shared", "times"]

Matrix = Tensor | Rounded
"""A weight [K, N] in the type that products are made in, or in 8 bits."""


def few_rows(x: Tensor, weight: Matrix) -> Tensor:
    """x [T, K], weight [K, N] -> [S, T, N] float32, whose sum over S is the product; or the product itself, [T, N] of x's type,
    where no kernel of ours is faster (or made: they are for 16-bit types)."""
    if x.is_cuda and x.element_size() == 2:
        if isinstance(weight, Tensor):
            found = _waiting(x, weight)
            found = _planned(x, weight, plans.plain) if found is None else found
        else:
            found = _fragments(x, weight) if weight.fragments else _planned(x, weight, plans.rounded)
        if found is not None:
            return found
    return times(x, weight)


def times(x: Tensor, weight: Matrix) -> Tensor:
    """x [T, K], weight [K, N] -> [T, N] of x's type."""
    if isinstance(weight, Tensor):
        return x @ weight
    if not x.is_cuda or x.element_size() != 2:
        return x @ weight.dense(x.dtype)
    found = _fragments(x, weight) if weight.fragments else _planned(x, weight, plans.undivided)
    if found is not None:
        return shared(found, x.dtype)
    from forefetch.kernels.few_rows import opened

    return x @ opened.dense(weight, x.dtype)


def _planned(x: Tensor, weight: Matrix, plan_of: Callable[[int, int, int], plans.Plan | None]) -> Tensor | None:
    from forefetch.kernels.few_rows import triton

    plan = plan_of(len(x), *weight.shape)
    return None if plan is None else triton.product(x.contiguous(), weight, plan)


def _waiting(x: Tensor, weight: Tensor) -> Tensor | None:
    plan = plans.waiting(len(x), *weight.shape) if _hopper(x.device) else None
    if plan is None or not weight.is_contiguous():
        return None
    from forefetch.kernels.few_rows import waiting

    return waiting.product(x.contiguous(), weight, plan)


def _fragments(x: Tensor, weight: Rounded) -> Tensor | None:
    from forefetch.kernels.few_rows import held, streamed

    if (wide := plans.streamed(len(x), *weight.shape)) is not None:
        return streamed.product(x.contiguous(), weight, wide)
    plan = plans.held(len(x), *weight.shape) if weight.shape[1] < plans.LEAST_STREAMED else None
    return None if plan is None else held.product(x.contiguous(), weight, plan)


def projection(weight: Rounded, dtype: torch.dtype) -> Rounded:
    """A weight as it is best kept for products of up to 64 rows of `dtype`: a projection's, whose shares the next kernel adds
    up, or a head's."""
    inner, outer = weight.shape
    fits = weight.codes.is_cuda and dtype == torch.bfloat16 and inner % 512 == 0 and outer % 64 == 0
    return weight.arranged() if fits and _hopper(weight.codes.device) else weight


def _hopper(device: torch.device) -> bool:
    """Whether it has `wgmma`."""
    return torch.cuda.get_device_capability(device)[0] == 9


def logits(x: Tensor, weight: Tensor) -> Tensor:
    """x [T, K], weight [N, K] -> [T, N] of x's type, for a gate: few columns."""
    if x.is_cuda and x.element_size() == 2:
        from forefetch.kernels.few_rows import triton

        if (plan := plans.gate(len(x), *weight.shape)) is not None:
            return triton.gate(x, weight, plan)
    return torch.nn.functional.linear(x, weight)


def shared(product: Tensor, dtype: torch.dtype) -> Tensor:
    """What `few_rows` gave -> [T, N] of `dtype`."""
    return product.sum(0).to(dtype) if product.ndim == 3 else product
