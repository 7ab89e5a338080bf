"""How functions of this package are compiled, and when work is worth a second thread."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeVar, cast

import numba
from numba import njit

from forefetch.kernels.compiled.kept import Kept
from forefetch.kernels.compiled.parts import Whole

F = TypeVar("F", bound=Callable[..., Any])

SPLIT_NS = 60_000
"""Estimated time from which work is split among threads: waking them takes some 20 us."""
BYTES_PER_NS, FLOPS_PER_NS = 12, 100
"""What one core reads of cold memory and multiplies (benchmarks/LOG.md); only the split is decided by it."""


def _folder() -> Path:
    """Where machine code is kept: a folder for this package as it is now, in NUMBA_CACHE_DIR or the user's cache.

    Numba compares a function's own file alone with what it kept, and would go on with old code of what that one calls.
    """
    sources = sorted(Path(__file__).parent.glob("*.py"))
    digest = hashlib.sha256(b"".join(source.read_bytes() for source in sources)).hexdigest()
    base = numba.config.CACHE_DIR or Path.home() / ".cache" / "forefetch"
    return Path(base) / f"kernels-{digest[:16]}"


FOLDER = _folder()
numba.config.CACHE_DIR = str(FOLDER)


def compiled(**options: Any) -> Callable[[F], F]:
    """A part, for compiled functions to call: Numba's njit without the GIL and with numpy's division by zero. See `parts`.

    Multiplications and additions may be fused. `reassociate`: sums may be formed in any (but always the same) order.
    """
    flags = {"contract", "nsz"} | ({"reassoc"} if options.pop("reassociate", False) else set())
    fixed = {"nogil": True, "error_model": "numpy", "fastmath": flags, **options}

    def decorate(function: F) -> F:
        made: F = njit(no_cpython_wrapper=True, no_cfunc_wrapper=True, **fixed)(function)
        return made

    return decorate


def entry(part: F) -> F:
    """A part for Python to call: with all that it calls one module of machine code, kept where a folder can be written.

    Compiled code calls the part itself, never this.
    """
    numba_part: Any = part
    options = {name: numba_part.targetoptions[name] for name in ("nogil", "error_model", "fastmath")}
    how = {**options, "no_cfunc_wrapper": True, "pipeline_class": Whole}
    made: Any = njit(**how)(numba_part.py_func)
    with suppress(RuntimeError):  # no folder to keep machine code in
        made._cache = Kept(numba_part.py_func)
    return cast(F, made)


@compiled()
def takes_ns(size, flops):
    """About how long one core reads `size` bytes or does `flops` multiplications and additions."""
    return max(size / BYTES_PER_NS, flops / FLOPS_PER_NS)


@compiled()
def worth_splitting(size, flops):
    """Whether that is long enough."""
    return takes_ns(size, flops) > SPLIT_NS
