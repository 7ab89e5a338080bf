"""One thread reads the GPU's global timer."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra import cuda


def stamp(times: Tensor, index: int) -> None:
    """See the package."""
    _stamp[(1,)](times, index, num_warps=1)


@triton.jit(do_not_specialize=["index"])
def _stamp(times, index):
    tl.store(times + index, cuda.globaltimer())
