"""Expert choice: gate logits -> expert ids and weights."""

from forefetch.kernels.gate.ref import choose

__all__ = ["choose"]
