"""A shard's experts in a smaller format, converted once and kept on disk.

The file is named by what it was made from: checkpoint digest, format, and which experts. It is written under another name,
synced and renamed, so that a crash leaves either no file or a whole one; sizes and a SHA-256 per expert are checked when it is
read, and a file that is torn, damaged or not ours is made again. Layout: one line of JSON (`Shard.header`), zeros up to a
multiple of 4096, blobs, 32 bytes of SHA-256 for each.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import secrets
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from expert_worker.host import Host
from forefetch.kernels.grouped_mlp.formats import pack
from forefetch.spec import ModelSpec
from forefetch.weights import Checkpoint, load_expert

log = logging.getLogger("forefetch.expert")

VERSION = 1
SUFFIX = ".experts"
_PAGE = 4096
_HASH = 32

Members = Sequence[tuple[int, int]]  # (layer, expert) of each number
Progress = Callable[[int, int], None]


class Damaged(Exception):
    """A cached file is not what it should be."""


@dataclass(frozen=True)
class Shard:
    """Where experts come from: those of a checkpoint, in the order of their numbers."""

    spec: ModelSpec
    checkpoint: Checkpoint
    members: Members
    device: str | torch.device = "cpu"  # where they are packed

    def only(self, number: int) -> Shard:
        """One of its experts."""
        return replace(self, members=(self.members[number],))

    def packed(self, host: Host) -> Iterator[Tensor]:
        """Each expert's blob in the host's format, straight from the checkpoint."""
        for layer, expert in self.members:
            yield pack(*load_expert(self.checkpoint, self.spec, layer, expert, self.device), host.format)

    def header(self, host: Host) -> dict[str, Any]:
        """What a cached file of it must say of itself."""
        return {
            "forefetch experts": VERSION,
            "model_digest": self.checkpoint.digest,
            "format": [host.format.kind, host.format.group, host.format.order],
            "sizes": [host.hidden, host.width, host.stride],
            "experts": [list(member) for member in self.members],
        }


def fill(host: Host, shard: Shard, folder: Path | None, on_progress: Progress) -> None:
    """Fills the host's memory: from the cache, else from the checkpoint, and then keeps that in the cache.

    Only what is converted is kept, and only if there is a folder. A cache that cannot be written costs a warning.
    """
    if folder is None or not host.format.quantised:
        host.fill(shard.packed(host), on_progress)
        return
    header = shard.header(host)
    path = folder / (hashlib.sha256(_line(header)).hexdigest()[:32] + SUFFIX)
    try:
        read(path, header, host, on_progress)
        return
    except FileNotFoundError:
        pass  # nothing was kept yet: the usual first start, made below
    except (Damaged, OSError) as error:
        log.warning("cached experts are made again: %s", error)
    host.fill(shard.packed(host), on_progress)
    try:
        write(path, header, host)
    except OSError as error:
        log.warning("converted experts could not be kept in %s: %s", folder, error.strerror)


def read(path: Path, header: dict[str, Any], host: Host, on_progress: Progress) -> None:
    """Reads a cached file into the host's memory. FileNotFoundError without one, Damaged when anything differs."""
    first, blobs = _line(header), host.blobs.numpy()
    with path.open("rb") as file:
        if path.stat().st_size != _start(first) + blobs.nbytes + _HASH * len(blobs):
            raise Damaged(f"{path.name} has the wrong size")
        if file.read(len(first)) != first:
            raise Damaged(f"{path.name} is about other experts")
        file.seek(_start(first) + blobs.nbytes)
        sums = [file.read(_HASH) for _ in blobs]
        file.seek(_start(first))
        for number, (blob, expected) in enumerate(zip(blobs, sums, strict=True)):
            if file.readinto(blob.data) != len(blob) or hashlib.sha256(blob.data).digest() != expected:
                raise Damaged(f"{path.name}: expert {number} is damaged")
            on_progress(number + 1, len(blobs))


def write(path: Path, header: dict[str, Any], host: Host) -> None:
    """Writes a cached file so that it is there whole or not at all. OSError when it cannot be."""
    path.parent.mkdir(parents=True, exist_ok=True)
    first = _line(header)
    scratch = path.with_name(f"{path.name}.{os.getpid()}-{secrets.token_hex(4)}.part")
    try:
        with scratch.open("xb") as file:
            file.write(first + bytes(_start(first) - len(first)))
            blobs = host.blobs.numpy()
            for blob in blobs:
                file.write(blob.data)
            for blob in blobs:
                file.write(hashlib.sha256(blob.data).digest())
            file.flush()
            os.fsync(file.fileno())
        scratch.replace(path)
    except BaseException:
        scratch.unlink(missing_ok=True)
        raise
    with suppress(OSError):  # a folder that cannot be synced loses at most the name, and then the file is made again
        descriptor = os.open(path.parent, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def _line(header: dict[str, Any]) -> bytes:
    return json.dumps(header, sort_keys=True).encode() + b"\n"


def _start(first: bytes) -> int:
    return -(-len(first) // _PAGE) * _PAGE
