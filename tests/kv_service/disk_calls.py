"""Services with a folder, and damage to it."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from kv_calls import running

from kv_service.config import KvConfig
from kv_service.keys import Key

if TYPE_CHECKING:
    pass

MIB = 1 << 20
ROOT = bytes(32)


def config(folder: Path, **changes: Any) -> KvConfig:
    return KvConfig(dir=str(folder), budget_mb=8, max_block_mb=2, disk_gb=0.1, **changes)


def fill(folder: Path, tokens: tuple[int, ...] = (1, 2, 3), size: int = 5000) -> list[tuple[Key, bytes]]:
    """A service that held a chain and has ended."""
    with running(config(folder)) as kv:
        keys = kv.keys(*tokens)
        assert kv.put(keys, size) == (len(keys), 0)
        return [(key, kv.block(key, size)) for key in keys]


def overwrite(folder: Path, pattern: bytes, data: bytes) -> None:
    """Writes `data`, and zeros behind it, where `pattern` lies in LMDB's file."""
    file = folder / "data.mdb"
    was = file.read_bytes()
    place = was.index(pattern)
    file.write_bytes(was[:place] + data.ljust(len(pattern), b"\0") + was[place + len(pattern) :])


def flip(folder: Path, pattern: bytes, at: int = 0) -> None:
    """Flips a bit where `pattern` lies in LMDB's file."""
    file = folder / "data.mdb"
    data = bytearray(file.read_bytes())
    place = data.index(pattern) + at
    data[place] ^= 1
    file.write_bytes(data)
