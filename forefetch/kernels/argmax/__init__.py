"""The greedy choice: each row's first largest value, or the news that it has none.

`ref.py` is the definition; `triton.py` reads logits of any type once. Letters: N rows, V vocabulary.
"""

from __future__ import annotations

from torch import Tensor

from forefetch.kernels.argmax import ref

__all__ = ["argmax"]


def argmax(logits: Tensor, into: tuple[Tensor, Tensor] | None = None) -> Tensor:
    """logits [N, V] of any float type -> int64 [N]: the lowest index of the maximum; -1 where that is not finite (a NaN, +inf,
    or nothing above -inf).

    `into`: two int64 [>= N]. The first, beside the logits, gets the same with 0 for -1; the second, which on a GPU may be
    pinned host memory, is what is returned."""
    if logits.is_cuda and len(logits):
        from forefetch.kernels.argmax import triton

        return triton.argmax(logits, into)
    return ref.argmax(logits, into)
