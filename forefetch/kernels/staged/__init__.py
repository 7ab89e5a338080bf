"""A step's rows from the host memory that they were put together in to where kernels read them.

`ref.py` is the definition and what a CPU runs; `triton.py` is one launch that reads pinned memory itself, where a copy engine
would be two trips, and ids that are owed two more. Letters: T rows that there is room for, B of them decode.
"""

from __future__ import annotations

from torch import Tensor

from forefetch.kernels.staged import ref

__all__ = ["LINES", "bring"]

LINES = ("id", "position", "slot", "logit row", "source", "length", "lane", "loaded")
"""What is staged of each row; `source`: its place among `chosen` if the id is not known on the host, else -1."""


def bring(staged: Tensor, chosen: Tensor, rows: Tensor, placed: Tensor, count: int) -> None:
    """staged int64 [8, >= T], on a GPU pinned -> rows int64 [4, T], placed int32 [3, B]: the first `count` of each, ids taken
    from chosen int64 [..] where they are owed. Staged memory is read until the stream is behind this."""
    if rows.is_cuda:
        from forefetch.kernels.staged import triton

        triton.bring(staged, chosen, rows, placed, count)
    else:
        ref.bring(staged, chosen, rows, placed, count)
