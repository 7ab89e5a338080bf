"""Kernels for CPUs, compiled by Numba when they are first used; machine code is kept beside the source or in the user's cache.

PyTorch's products are made for many rows. A decode step has few, and spends its time on reading weights and between operations.
Here a layer is a handful of loops in one call, weights are read once, as bfloat16 where they were stored so (widened in
registers: the same numbers), and the GIL is free meanwhile. Everything is float32, as PyTorch's path is, which remains the
definition and what runs without Numba (the `cpu` extra).

`simd` has the innermost loops in LLVM IR, `toolchain` how things are compiled, `linear` products and packed matrices, `maths`
element-wise functions, `experts` the routed experts, `layer` the rest of a layer, `step` a whole decode step, `crew` who
helps with one.
"""

from __future__ import annotations

from functools import cache
from importlib.util import find_spec


@cache
def available() -> bool:
    """Whether Numba is installed."""
    return find_spec("numba") is not None
