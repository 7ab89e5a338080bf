"""What Triton 3.6's interpreter lacks: loop bounds that kernels compute under NumPy 2.4; bfloat16 in products, integers."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch


def complete_interpreter() -> None:
    """Patches it, once per process."""
    from triton.runtime import interpreter

    builder = interpreter.InterpreterBuilder
    patch_tensor, dot, to_float = interpreter._patch_lang_tensor, builder.create_dot, builder.create_si_to_fp

    def patch_with_scalars(tensor: Any, scope: Any) -> None:
        patch_tensor(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))  # int() wants no dimension at all

    def widened(handle: Any) -> Any:
        """It keeps bfloat16 as uint16 and would multiply those."""
        if handle.dtype.scalar != interpreter.tl.bfloat16:
            return handle
        wide = (handle.data.astype(np.uint32) << 16).view(np.float32)
        return interpreter.TensorHandle(wide, interpreter.tl.float32)

    def integer_to_float(self: Any, handle: Any, to: Any) -> Any:
        """It would keep an integer's bits as a bfloat16."""
        if to.scalar != interpreter.tl.bfloat16:
            return to_float(self, handle, to)
        bits = torch.from_numpy(np.ascontiguousarray(handle.data)).bfloat16().view(torch.int16).numpy().view(np.uint16)
        return interpreter.TensorHandle(bits, interpreter.tl.bfloat16)

    interpreter._patch_lang_tensor = patch_with_scalars
    builder.create_si_to_fp = integer_to_float
    builder.create_dot = lambda self, a, b, *rest: dot(self, widened(a), widened(b), *rest)
