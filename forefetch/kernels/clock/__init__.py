"""Time where the work is: a launch that writes the device's clock, so that a captured graph can say where its time went."""

from __future__ import annotations

import time

from torch import Tensor


def stamp(times: Tensor, index: int) -> None:
    """times[index] = now, in nanoseconds of some fixed start; times int64, contiguous. On a GPU: when the stream gets there."""
    if times.is_cuda:
        from forefetch.kernels.clock import triton

        triton.stamp(times, index)
    else:
        times[index] = time.perf_counter_ns()
