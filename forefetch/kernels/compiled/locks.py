"""Whose turn it is: to use more than one thread (Numba's pool of threads serves one caller at a time), and to compile."""

from __future__ import annotations

import fcntl
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import numba
import torch

from forefetch.kernels.compiled.toolchain import FOLDER

numba.config.THREADING_LAYER = "workqueue"  # idle threads sleep: an OpenMP of its own beside PyTorch's would spin against it

_GUARD = threading.Lock()


def helpers(spare: int = 1) -> int:
    """How many threads may help one that computes all the time: see `threads`."""
    return int(min(torch.get_num_threads(), max(1, numba.config.NUMBA_NUM_THREADS - spare))) - 1


@contextmanager
def threads(spare: int = 1) -> Iterator[int | None]:
    """How many threads a kernel may use: PyTorch's, but `spare` cores are left to who computes, sends and receives meanwhile,
    since a kernel is as late as the last of its threads. One while another thread computes on several; None if there never are.
    """
    wanted = min(torch.get_num_threads(), max(1, numba.config.NUMBA_NUM_THREADS - spare))
    if wanted == 1:
        yield None
        return
    if not _GUARD.acquire(blocking=False):
        yield 1
        return
    try:
        numba.set_num_threads(wanted)
        yield wanted
    finally:
        _GUARD.release()


@contextmanager
def compiling() -> Iterator[None]:
    """One process at a time: the others find machine code where this one put it. A cluster's first start compiles once.

    The lock lies beside the code: who keeps theirs elsewhere, or has other sources, does not wait. Where no file can be made,
    as in a container without a folder to write to, each compiles for itself.
    """
    try:
        FOLDER.mkdir(parents=True, exist_ok=True)
        file = os.open(FOLDER / "compiling", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    except OSError:
        yield
        return
    try:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
    finally:
        os.close(file)
