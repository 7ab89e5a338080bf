"""How work in the background leaves the cores of its host to steps. Linux; elsewhere, and in sandboxes that refuse, a no-op.

A step's threads wake for microseconds at a time and wait for each other, so what holds a core for a millisecond delays the
step by one. Niceness alone hardly helps: it says how much of a core a thread gets, not that a thread that wakes up gets it at
once. Threads of SCHED_BATCH do not interrupt others when they wake, and short slices let others in soon (sched(7);
measured in benchmarks/LOG.md).
"""

from __future__ import annotations

import ctypes
import os
import platform
import struct
import sys
import threading
from contextlib import suppress

SLICE_NS = 100_000
"""The shortest slice that Linux gives (from 6.12 on; before, slices cannot be chosen)."""
_SET_ATTR = {"x86_64": 314, "aarch64": 274}.get(platform.machine())  # glibc has had no function for it until lately
_ATTR = struct.Struct("<IIQiIQQQII")  # struct sched_attr


def give_way(nice: int = 0) -> None:
    """The calling thread, and threads that it makes from now on, interrupt no other. With `nice` (1 to 19, see nice(2)) they
    also get that much less of a core that others want, in slices of SLICE_NS."""
    if sys.platform != "linux":
        return
    if nice and _SET_ATTR is not None:
        attributes = _ATTR.pack(_ATTR.size, os.SCHED_BATCH, 0, nice, 0, SLICE_NS, 0, 0, 0, 0)
        if ctypes.CDLL(None).syscall(_SET_ATTR, 0, attributes, 0) == 0:
            return
    with suppress(OSError):
        os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))
        if nice:
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), nice)
