"""Memory that two processes of one host share: a segment for frames, doorbells to wake the other side, reclaiming.

A segment is a plain file in the host's shared-memory folder. Its maker holds a lock (flock) on it while it has a name; the
kernel drops the lock with the process, however that ends, so a named segment whose lock is free is dead and may be removed:
this works across PID namespaces, where process ids mean nothing. The name goes as soon as both sides have mapped it.

Doorbells are u32 counters in the segment. Whoever waits spins for a moment, then sleeps in the kernel (futex, the form that
works between processes). Python cannot issue memory fences: that a frame is seen before the bell that announces it rests on
x86-64 making stores visible in program order, and loads likewise. Elsewhere `unsupported()` says so and links use gRPC.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import mmap
import os
import platform
import re
import secrets
import stat
import struct
import sys
from pathlib import Path
from time import perf_counter_ns
from typing import Any

from forefetch.errors import Mismatch

FOLDER = Path("/dev/shm")
PREFIX = "forefetch-"
SLICE_S = 0.05
"""Longest sleep without a look around: what ends a wait (a dead peer, a deadline) is noticed within this."""

_NAME = re.compile(PREFIX + r"[0-9a-f]{32}")
_HEADER = struct.Struct("<IIQQ16s")  # magic, version, request bytes, reply bytes, nonce
_MAGIC, _VERSION = 0x53464646, 1
_PAGE = 4096
_REQUEST_BELL, _REPLY_BELL = 64, 128  # each on a cache line of its own
_SYS_FUTEX, _FUTEX_WAIT, _FUTEX_WAKE = 202, 0, 1


class _Timespec(ctypes.Structure):
    _fields_ = (("seconds", ctypes.c_long), ("nanoseconds", ctypes.c_long))


_SLICE = ctypes.byref(_Timespec(0, int(SLICE_S * 1e9)))


def _slice(seconds: float) -> Any:
    if seconds == SLICE_S:
        return _SLICE
    whole = int(seconds)
    return ctypes.byref(_Timespec(whole, int((seconds - whole) * 1e9)))


def unsupported() -> str:
    """Why this host cannot have shm links, or ""."""
    if sys.platform != "linux" or platform.machine() not in ("x86_64", "AMD64"):
        return f"shared-memory links need Linux on x86-64, this is {sys.platform} on {platform.machine()}"
    if not FOLDER.is_dir():
        return "this host has no shared-memory folder"
    return ""


def domain() -> str:
    """Equal in two processes when one can map the other's segments; "" when this one can have none.

    The boot id tells hosts apart, the device number tells the mounts of one host's containers apart.
    """
    if unsupported():
        return ""
    with contextlib.suppress(OSError):
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
        return f"{boot}:{FOLDER.stat().st_dev}"
    return ""


class Bell:
    """A u32 in shared memory that one side sets and the other waits on."""

    def __init__(self, memory: mmap.mmap, offset: int) -> None:
        self._word = memoryview(memory)[offset : offset + 4].cast("I")
        self._address = ctypes.c_void_p(ctypes.addressof(ctypes.c_uint32.from_buffer(memory, offset)))
        libc = ctypes.CDLL(None)  # releases the GIL during a call, as a sleeper must
        self._sleep = libc.syscall
        self._wake = ctypes.PyDLL(None).syscall  # does not: waking is quick, and giving the GIL away is not

    @property
    def value(self) -> int:
        """The number now."""
        return self._word[0]

    def ring(self, value: int) -> None:
        """Sets the number and wakes the sleeper."""
        self._word[0] = value
        self.nudge()

    def nudge(self) -> None:
        """Wakes the sleeper, so that it looks around."""
        self._wake(_SYS_FUTEX, self._address, _FUTEX_WAKE, 1, None, None, 0)

    def wait(self, seen: int, spin_ns: int, slice_s: float = SLICE_S) -> bool:
        """Waits until the number is not `seen`: spins for `spin_ns`, then sleeps for `slice_s` at most. False: still `seen`."""
        word = self._word
        if spin_ns:
            until = perf_counter_ns() + spin_ns
            while word[0] == seen and perf_counter_ns() < until:
                pass
        if word[0] == seen:
            self._sleep(_SYS_FUTEX, self._address, _FUTEX_WAIT, ctypes.c_uint32(seen), _slice(slice_s), None, 0)
        return word[0] != seen


class Segment:
    """Two areas for frames and a bell for each. The memory stays valid until the last view of it is gone."""

    def __init__(self, name: str, lock: int | None, memory: mmap.mmap) -> None:
        _, _, request, reply, self.nonce = _HEADER.unpack_from(memory)
        self.name, self._lock = name, lock
        whole = memoryview(memory)
        start = _PAGE + _rounded(request)
        self.request, self.reply = whole[_PAGE : _PAGE + request], whole[start : start + reply]
        self.request_bell, self.reply_bell = Bell(memory, _REQUEST_BELL), Bell(memory, _REPLY_BELL)

    @staticmethod
    def create(request: int, reply: int) -> Segment:
        """A new segment with so many bytes for requests and replies. Raises Mismatch when there is no room for it."""
        size = _PAGE + _rounded(request) + _rounded(reply)
        name, lock = _claim()
        try:
            # Taken now: pages of a full shared-memory folder would otherwise fail one by one, each killing the process.
            os.posix_fallocate(lock, 0, size)
            memory = mmap.mmap(lock, size, flags=mmap.MAP_SHARED | mmap.MAP_POPULATE)
        except OSError as error:
            _unlink(name)
            os.close(lock)
            raise Mismatch(f"the host's shared memory has no room for a segment of {size} bytes: {error.strerror}") from None
        _HEADER.pack_into(memory, 0, _MAGIC, _VERSION, request, reply, secrets.token_bytes(16))
        return Segment(name, lock, memory)

    @staticmethod
    def open(name: str, nonce: bytes) -> Segment:
        """Maps a segment that another process made. Raises Mismatch when it cannot be reached or is not the one meant."""
        if not _NAME.fullmatch(name):
            raise Mismatch("segment: not a name that Forefetch gives")
        try:
            file = os.open(FOLDER / name, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
        except OSError as error:
            raise Mismatch(f"segment: cannot be opened here: {error.strerror}") from None
        try:
            return Segment(name, None, _map_checked(file, nonce))
        finally:
            os.close(file)

    def unlink(self) -> None:
        """Takes the name away: from now on only the processes that have mapped the segment can reach it."""
        if self._lock is not None:
            _unlink(self.name)
            os.close(self._lock)
            self._lock = None


def reclaim() -> list[str]:
    """Removes named segments whose maker is dead; returns their names."""
    removed = []
    for name in os.listdir(FOLDER) if not unsupported() else ():
        if not _NAME.fullmatch(name):
            continue
        with contextlib.suppress(OSError):  # another user's, or gone already
            file = os.open(FOLDER / name, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                _unlink(name)
                removed.append(name)
            finally:
                os.close(file)
    return removed


def _claim() -> tuple[str, int]:
    """A new name and the locked file behind it. A reclaimer may get between making and locking, and takes the file away."""
    while True:
        name = PREFIX + secrets.token_hex(16)
        file = os.open(FOLDER / name, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        fcntl.flock(file, fcntl.LOCK_EX)
        if os.fstat(file).st_nlink:
            return name, file
        os.close(file)


def _map_checked(file: int, nonce: bytes) -> mmap.mmap:
    status = os.fstat(file)
    if not stat.S_ISREG(status.st_mode) or status.st_size < _PAGE:
        raise Mismatch("segment: is not a segment")
    memory = mmap.mmap(file, status.st_size, flags=mmap.MAP_SHARED | mmap.MAP_POPULATE)
    magic, version, request, reply, found = _HEADER.unpack_from(memory)
    if magic != _MAGIC or version != _VERSION or found != nonce:
        raise Mismatch("segment: the two sides do not see the same memory, or have different versions")
    if _PAGE + _rounded(request) + _rounded(reply) > status.st_size:
        raise Mismatch("segment: is shorter than it says")
    return memory


def _rounded(size: int) -> int:
    return -(-size // _PAGE) * _PAGE


def _unlink(name: str) -> None:
    with contextlib.suppress(OSError):
        (FOLDER / name).unlink()
