"""Turns of those who choose copies, where they are several: lanes, calls over a wire, hints. Nobody waits for one."""

from __future__ import annotations

import triton
import triton.language as tl

from forefetch.kernels.residency.state import Mover, Residents


def grant(state: Residents, mover: Mover) -> None:
    """A turn to choose and copy begins, if nobody else has one: else the launches up to `release` do nothing."""
    _grant[(1,)](state.moving, mover.granted, num_warps=1)


def release(state: Residents, mover: Mover) -> None:
    """The end of a turn, behind all its launches; of none, if it was refused."""
    _release[(1,)](state.moving, mover.granted, num_warps=1)


@triton.jit
def _grant(moving, granted):
    held = tl.atomic_cas(moving, 0, 1, sem="acquire")
    tl.store(granted, (held == 0).to(tl.int32))


@triton.jit
def _release(moving, granted):
    if tl.load(granted) != 0:
        tl.atomic_xchg(moving, 0, sem="release")
