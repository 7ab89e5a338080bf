"""Programmatic dependent launch: a kernel is brought to the processors while the one before it still ends.

What such a kernel reads and writes is only safe behind `released`, which waits until the kernel before is done. Hopper and
later; elsewhere kernels follow one another as always. Source: CUDA C++ Programming Guide, "Programmatic Dependent Launch".
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor


def early(like: Tensor) -> dict[str, Any]:
    """Launch options, and the kernel's PDL flag, for a kernel on the device of `like`."""
    return {"PDL": True, "launch_pdl": True} if like.is_cuda and _capable(like.device) else {"PDL": False}


@cache
def _capable(device: torch.device) -> bool:
    return torch.cuda.get_device_capability(device)[0] >= 9


@triton.jit
def awaited(PDL: tl.constexpr):
    """Begins a kernel: what the one before wrote is there when this returns. The next one is brought up when all programs have
    come to `let_go`."""
    if PDL:
        tl.extra.cuda.gdc_wait()


@triton.jit
def let_go(PDL: tl.constexpr):
    """For a kernel that `awaited` began, at its end. A next kernel that fills the machine in one wave of equal programs has
    to find it empty: placed beside what still runs, some processors get more of them than others."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()


@triton.jit
def released(PDL: tl.constexpr):
    """Begins a kernel: the next one may be brought up, and what the one before wrote is there when this returns."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
