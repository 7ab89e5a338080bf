"""The greedy choice: each row's first largest value, or the news that it has none.

`ref.py` is the definition; `triton.py` reads logits of any type once. Letters: N rows, V vocabulary.
"""

from __future__ import annotations

from torch import Tensor

from forefetch.kernels.argmax import ref

__all__ = ["argmax"]


def argmax(logits: Tensor) -> Tensor:
    """logits [N, V] of any float type -> int64 [N]: the lowest index of the maximum; -1 where that is not finite (a NaN, +inf,
    or nothing above -inf)."""
    if logits.is_cuda and len(logits):
        from forefetch.kernels.argmax import triton

        return triton.argmax(logits)
    return ref.argmax(logits)
