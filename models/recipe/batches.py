"""Training windows from the token streams, in a fixed mix of domains, drawn on the device."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from models.recipe.pack import Stream


def window_starts(stream: Stream, length: int, align: float, rng: np.random.Generator) -> Iterator[int]:
    """Endless window starts of `length` tokens: each pass covers the stream once, in random order.

    A window moves forward to the next document's start with probability `align`, because what is served begins at a
    document's start and not in the middle of one.
    """
    last = len(stream.tokens) - length
    while True:
        starts = np.minimum(np.arange(rng.integers(length), last + 1, length), last)
        at = np.minimum(np.searchsorted(stream.starts, starts), len(stream.starts) - 1)
        snapped = np.clip(stream.starts[at], starts, np.minimum(starts + length, last))
        starts = np.where(rng.random(len(starts)) < align, snapped, starts)
        yield from (int(s) for s in rng.permutation(starts))


class Mixture:
    """Batches of windows with a fixed number of sequences of each domain."""

    def __init__(self, streams: dict[str, Stream], shares: dict[str, float], device: torch.device, seed: int) -> None:
        """shares: part of each batch by domain, summing to one."""
        self.streams, self.shares, self.device = streams, shares, device
        self.rng = np.random.default_rng(seed)
        self.tokens = {d: torch.from_numpy(s.tokens.astype(np.int32)).to(device) for d, s in streams.items()}

    def batches(self, sequences: int, length: int) -> Iterator[Tensor]:
        """Endless batches [sequences, length + 1] of token ids."""
        sources = {
            domain: window_starts(stream, length + 1, 1.0 if domain == "conversation" else 0.5, self.rng)
            for domain, stream in self.streams.items()
        }
        counts = apportion(self.shares, sequences)
        while True:
            parts = []
            for domain, source in sources.items():
                starts = np.asarray([next(source) for _ in range(counts[domain])], dtype=np.int64)
                parts.append(self._gather(self.tokens[domain], starts, length + 1))
            yield torch.cat(parts)

    def _gather(self, tokens: Tensor, starts: NDArray[np.int64], length: int) -> Tensor:
        first = torch.from_numpy(starts).to(self.device, non_blocking=True)
        return tokens[first[:, None] + torch.arange(length, device=self.device)].long()


def apportion(shares: dict[str, float], total: int) -> dict[str, int]:
    """Whole numbers near shares * total that sum to total (largest remainder)."""
    exact = {d: s * total for d, s in shares.items()}
    counts = {d: int(e) for d, e in exact.items()}
    by_remainder = sorted(exact, key=lambda d: exact[d] - counts[d], reverse=True)
    for domain in by_remainder[: total - sum(counts.values())]:
        counts[domain] += 1
    return counts


def even_windows(stream: Stream, length: int, most: int, device: torch.device) -> Tensor:
    """At most `most` windows [n, length + 1] spread evenly over a stream, for held-out losses."""
    count = min(most, (len(stream.tokens) - 1) // length)
    starts = np.linspace(0, len(stream.tokens) - length - 1, count).astype(np.int64)
    windows = stream.tokens[starts[:, None] + np.arange(length + 1)].astype(np.int64)
    return torch.from_numpy(windows).to(device)
