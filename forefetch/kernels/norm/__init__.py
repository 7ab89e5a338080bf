"""Residual and RMSNorm in one pass: x + alpha y, and its normed form, which is what the next product reads.

y may be what few rows' products leave (shares of K), or what routed experts do (a row for each of a token's): whoever reads
them anyway adds them up.

`ref.py` is the definition; `triton.py` is what a GPU runs, one program per row. Letters: T rows, H hidden.
"""

from __future__ import annotations

from torch import Tensor

from forefetch.kernels.grouped_mlp.unsummed import Unsummed
from forefetch.kernels.norm import ref

__all__ = ["add_rms_norm"]


def add_rms_norm(
    x: Tensor, y: Tensor | Unsummed | None, weight: Tensor, eps: float, alpha: float = 1.0
) -> tuple[Tensor, Tensor]:
    """x, y [T, H], weight [H] -> (s, n): s = x + alpha y rounded to x's type (x itself without y), n = RMSNorm(s) * weight.

    y may be in shares [S, T, H] (`kernels.few_rows`), which are added up first, in their order, or the pairs of T tokens,
    whose weighted sums are rounded to x's type as `grouped_mlp` does it. weight is constant: on a GPU it is read before the
    kernel ahead of this one has ended.
    Source: RMSNorm, arXiv 1910.07467. A row depends on no other row.
    """
    if x.is_cuda:
        from forefetch.kernels.norm import triton

        return triton.add_rms_norm(x, y, weight, eps, alpha)
    return ref.add_rms_norm(x, y, weight, eps, alpha)
