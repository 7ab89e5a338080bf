"""Paged pools full of NaN but for what requests wrote, and the error that float arithmetic may make over them."""

from __future__ import annotations

import dataclasses
import random

import torch
from torch import Tensor

PAGE = 16
AWKWARD = [1, PAGE - 1, PAGE, PAGE + 1, 2 * PAGE, 97, 150, 5 * PAGE - 1]


@dataclasses.dataclass
class Pool:
    """A pool full of NaN in which only the given requests' positions are written."""

    k: Tensor
    v: Tensor
    pages: list[list[int]]

    @property
    def table(self) -> Tensor:
        """Unused entries point far outside the pool."""
        width = max(map(len, self.pages))
        return torch.tensor([pages + [10_000_000] * (width - len(pages)) for pages in self.pages], dtype=torch.int32)


def make_pool(lengths: list[int], kv_heads: int, dim: int, *, scattered: bool, dtype: torch.dtype = torch.float32) -> Pool:
    needed = [-(-length // PAGE) for length in lengths]
    free = list(range(1, 1 + sum(needed)))
    if scattered:
        random.Random(0).shuffle(free)
    k, v = torch.full((2, kv_heads, 1 + sum(needed), PAGE, dim), torch.nan, dtype=dtype).unbind()
    pool = Pool(k, v, pages=[])
    generator = torch.Generator().manual_seed(1)
    for length, count in zip(lengths, needed, strict=True):
        pages, free = free[:count], free[count:]
        pool.pages.append(pages)
        for position in range(length):
            for tensor in (pool.k, pool.v):
                values = torch.randn(kv_heads, dim, generator=generator)
                tensor[:, pages[position // PAGE], position % PAGE] = values.to(dtype)
    return pool


def queries(rows: int, heads: int, dim: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(rows, heads, dim, generator=torch.Generator().manual_seed(2)).to(dtype)


def assert_exact(got: Tensor, q: Tensor, pool: Pool, truth: Tensor, scale: float) -> None:
    """Error bound for float32 arithmetic with unit roundoff u, plus one rounding to the output's type.

    A score is a sum of D products: its error is under e = (D + 2) u scale max|q| max|k|. Weights are exp(score): relative error
    under 2 e + O(u) for numerator and denominator. The output adds L weighted values: under (2 e + (L + 4) u) max|v|.
    """
    unit = torch.finfo(torch.float32).eps / 2
    longest = max(map(len, pool.pages)) * PAGE
    k, v = (tensor.double().nan_to_num(0) for tensor in (pool.k, pool.v))
    score = (q.shape[-1] + 2) * unit * scale * q.double().norm(dim=-1).max().item() * k.norm(dim=-1).max().item()
    rounding = torch.finfo(q.dtype).eps / 2 if q.dtype != torch.float32 else 0.0
    if rounding:  # the kernel may also round the weights to this type before they meet V
        rounding *= 2
    bound = (2 * score + (longest + 4) * unit + rounding) * v.abs().max().item()
    error = (got.double() - truth).abs().max().item()
    assert error <= bound, f"error {error:.3g} > bound {bound:.3g}"
