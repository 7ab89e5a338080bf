"""Which KV service holds what: rendezvous hashing over the services a router knows (Thaler and Ravishankar, 1998). Pure.

A chain of blocks is cut into segments of 8, 8, 16, 32, ... blocks. A segment lies on one service, chosen by the digest of its
first block, so that one look-up answers for many blocks, long prompts spread, and what follows a prefix that everybody shares
does not lie where the prefix lies. A service holds a block whether or not it holds the one before.

With one service there is one segment, so that it knows every parent and evicts ends of prefixes first.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kv_service.client import Key

FIRST = 8
"""Blocks of the first two segments."""


def owner(name: bytes, services: Sequence[str]) -> int:
    """Index of the service that holds `name`. Taking one away moves only the names it held."""
    if len(services) == 1:
        return 0
    return max(range(len(services)), key=lambda i: hashlib.sha256(b"%s\0%s" % (services[i].encode(), name)).digest())


def segment_of(block: int, services: int) -> tuple[int, int]:
    """Block of a chain -> (its segment, first block of that segment)."""
    if services == 1 or block < FIRST:
        return 0, 0
    segment = (block // FIRST).bit_length()
    return segment, FIRST << (segment - 1)


def cut(keys: Sequence[Key], services: int) -> list[list[Key]]:
    """A chain from its first block on -> its segments, named as their services know them."""
    runs: list[list[Key]] = []
    for index, key in enumerate(keys):
        if index == segment_of(index, services)[1]:
            runs.append([key])
        else:
            runs[-1].append(key)
    return runs
