"""Near-duplicates: MinHash over word shingles with banding, and shingle containment between the two splits."""

from __future__ import annotations

import re
import zlib
from collections import defaultdict

import numpy as np
from numpy.typing import NDArray

Hashes = NDArray[np.uint64]

WORD = re.compile(r"\w+")
PERMUTATIONS, BANDS = 64, 16  # 16 bands of 4 rows: half of the pairs at Jaccard 0.45 meet, nearly all at 0.7
CHUNK = 4096
_RNG = np.random.default_rng(20240229)
_MULTIPLY: Hashes = _RNG.integers(1, 2**63, PERMUTATIONS, dtype=np.uint64) * np.uint64(2) + np.uint64(1)
_ADD: Hashes = _RNG.integers(0, 2**63, PERMUTATIONS, dtype=np.uint64)
_MIX = np.uint64(0x9E3779B97F4A7C15)


def shingles(text: str, width: int) -> Hashes:
    """Distinct hashes of every run of `width` words (of all words when the text is shorter)."""
    words = np.fromiter((zlib.crc32(w.encode()) for w in WORD.findall(text)), dtype=np.uint64)
    if len(words) == 0:
        return words
    width = min(width, len(words))
    hashes = np.zeros(len(words) - width + 1, dtype=np.uint64)
    for offset in range(width):
        hashes = (hashes ^ words[offset : offset + len(hashes)]) * _MIX
        hashes ^= hashes >> np.uint64(29)
    return np.unique(hashes)


def signature(text: str, width: int = 5) -> Hashes:
    """MinHash signature [PERMUTATIONS]; equal entries estimate the Jaccard index of two texts' shingles."""
    values = shingles(text, width)
    smallest = np.full(PERMUTATIONS, np.iinfo(np.uint64).max, dtype=np.uint64)
    for start in range(0, len(values), CHUNK):
        part = values[start : start + CHUNK, None] * _MULTIPLY + _ADD  # [n, PERMUTATIONS], wraps around
        smallest = np.minimum(smallest, part.min(axis=0))
    return smallest


def near_duplicates(texts: list[str], threshold: float = 0.6) -> list[int]:
    """Indices to drop so that no two kept texts are estimated at or above `threshold`; the first of a group stays."""
    buckets: dict[tuple[int, bytes], list[int]] = defaultdict(list)
    kept: dict[int, Hashes] = {}
    dropped = []
    for index, text in enumerate(texts):
        mine = signature(text)
        keys = [(band, part.tobytes()) for band, part in enumerate(mine.reshape(BANDS, -1))]
        rivals = {rival for key in keys for rival in buckets[key]}
        if any(float(np.mean(kept[rival] == mine)) >= threshold for rival in rivals):
            dropped.append(index)
            continue
        kept[index] = mine
        for key in keys:
            buckets[key].append(index)
    return dropped


def contained(candidates: list[str], corpus: list[str], threshold: float = 0.2, width: int = 13) -> list[int]:
    """Indices of candidates that share at least `threshold` of their long shingles with any text of the corpus."""
    known = np.unique(np.concatenate([shingles(text, width) for text in corpus])) if corpus else np.empty(0, np.uint64)
    shared = []
    for index, text in enumerate(candidates):
        mine = shingles(text, width)
        at = np.searchsorted(known, mine)
        hits = known[np.minimum(at, len(known) - 1)] == mine if len(known) else np.zeros(len(mine), dtype=bool)
        if len(mine) and float(hits.mean()) >= threshold:
            shared.append(index)
    return shared
