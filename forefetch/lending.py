"""Memory of a process that others of the same user and host may read where it is.

It is an anonymous file (memfd) whose size is sealed, so that whoever maps it never reads beyond its end, found under /proc by
process and descriptor, and known by random bytes at its beginning. Whoever cannot see that process (another host, another PID
namespace, another user) gets Mismatch. Pages are taken when they are first written to, as for any memory.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import secrets
import stat
import struct
import sys
import weakref
from typing import NamedTuple

from forefetch.errors import Mismatch

HEAD = 4096
"""Bytes before the memory itself."""
_HEAD = struct.Struct("<Q16s")
_SEALS = ("F_SEAL_SHRINK", "F_SEAL_GROW", "F_SEAL_SEAL")


class Name(NamedTuple):
    """Where a process finds another's memory: process, descriptor, and the random bytes that must be there."""

    pid: int
    file: int
    nonce: bytes


class Lent:
    """`size` bytes of zeros in `memory`, which others find by `name` as long as this object lives."""

    def __init__(self, size: int) -> None:
        """Raises Mismatch where there is no such memory."""
        if sys.platform != "linux":
            raise Mismatch("memory can be lent on Linux only")
        try:
            file = os.memfd_create("forefetch", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
            weakref.finalize(self, os.close, file)
            os.ftruncate(file, HEAD + size)
            fcntl.fcntl(file, fcntl.F_ADD_SEALS, _seals())
            whole = mmap.mmap(file, HEAD + size)
        except OSError as error:
            raise Mismatch(f"memory cannot be lent: {error.strerror}") from None
        self.name = Name(os.getpid(), file, secrets.token_bytes(16))
        _HEAD.pack_into(whole, 0, size, self.name.nonce)
        self.memory = memoryview(whole)[HEAD:]


def borrow(name: Name) -> memoryview:
    """The memory of a `Lent`, to be read; it stays as long as anybody refers to it. Raises Mismatch if it cannot be reached or
    is not the one meant."""
    try:
        # Not waiting: the name may be wrong, and lead to a pipe.
        file = os.open(f"/proc/{name.pid}/fd/{name.file}", os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except OSError as error:
        raise Mismatch(f"lent memory cannot be reached here: {error.strerror}") from None
    try:
        status = os.fstat(file)
        if not stat.S_ISREG(status.st_mode) or fcntl.fcntl(file, fcntl.F_GET_SEALS) & _seals() != _seals():
            raise Mismatch("what should be lent memory is something else")
        whole = memoryview(mmap.mmap(file, status.st_size, prot=mmap.PROT_READ))
    except (OSError, ValueError):
        raise Mismatch("what should be lent memory is something else") from None
    finally:
        os.close(file)
    if len(whole) < HEAD or _HEAD.unpack_from(whole) != (len(whole) - HEAD, name.nonce):
        raise Mismatch("what should be lent memory is something else")
    return whole[HEAD:]


def _seals() -> int:
    seals = 0
    for name in _SEALS:
        seals |= getattr(fcntl, name)
    return seals
