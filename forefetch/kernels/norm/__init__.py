"""Residual and RMSNorm in one pass: x + alpha y, and its normed form, which is what the next product reads.

`ref.py` is the definition; `triton.py` is what a GPU runs, one program per row. Letters: T rows, H hidden.
"""

from __future__ import annotations

from torch import Tensor

from forefetch.kernels.norm import ref

__all__ = ["add_rms_norm"]


def add_rms_norm(x: Tensor, y: Tensor | None, weight: Tensor, eps: float, alpha: float = 1.0) -> tuple[Tensor, Tensor]:
    """x, y [T, H], weight [H] -> (s, n): s = x + alpha y rounded to x's type (x itself without y), n = RMSNorm(s) * weight.

    y may be in shares [S, T, H] (`kernels.few_rows`), which are added up first, in their order. weight is constant: on a GPU it
    is read before the kernel ahead of this one has ended.
    Source: RMSNorm, arXiv 1910.07467. A row depends on no other row.
    """
    if x.is_cuda:
        from forefetch.kernels.norm import triton

        return triton.add_rms_norm(x, y, weight, eps, alpha)
    return ref.add_rms_norm(x, y, weight, eps, alpha)
