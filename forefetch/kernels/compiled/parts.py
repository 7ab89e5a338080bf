"""How Numba compiles this package: what Python calls becomes one module with all that it calls, optimised once.

Left to itself, Numba optimises each function together with everything that it calls, makes machine code of that, and a wrapper
with which Python could call it. So a function that lies n calls deep is compiled n times and more, and the wrappers take apart
arguments that nobody will hand over.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from numba.core.codegen import CPUCodegen, JITCodeLibrary
from numba.core.compiler import Compiler

_REFUSAL = ctypes.cast(ctypes.pythonapi.PyErr_BadArgument, ctypes.c_void_p).value


class Part(JITCodeLibrary):  # type: ignore[misc]
    """A function's LLVM IR, for the modules of those who call it. Python cannot: TypeError."""

    def _optimize_final_module(self) -> None:
        pass

    def _finalize_final_module(self) -> None:
        self._finalize_dynamic_globals()
        self._finalized = True

    def get_pointer_to_function(self, name: str) -> int | None:
        """Of what Python would call."""
        return _REFUSAL

    @property
    def codegen(self) -> Part:
        """Who would be told of the function's environment, which only the interpreter needs."""
        return self

    def set_env(self, name: str, env: object) -> None:
        """Nobody needs to be told."""


class Whole(Compiler):  # type: ignore[misc]
    """Compiles one that Python calls; what it calls is compiled to parts meanwhile, also Numba's own functions."""

    def compile_extra(self, func: Callable[..., Any]) -> Any:
        """As Numba's."""
        codegen = self.state.targetctx.codegen()
        self.state.library = JITCodeLibrary(codegen, func.__qualname__)
        self.state.library.enable_object_caching()
        with _parts(codegen):
            return super().compile_extra(func)


@contextmanager
def _parts(codegen: CPUCodegen) -> Iterator[None]:
    """Numba's lock is held by who compiles, so that this is nobody else's."""
    codegen._library_class = Part
    try:
        yield
    finally:
        del codegen._library_class
