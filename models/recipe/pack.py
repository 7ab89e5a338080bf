"""Token files: all documents of a domain in one uint16 stream, with their start positions, in xz-compressed shards."""

from __future__ import annotations

import io
import lzma
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from tokenizers import Tokenizer

from models.recipe.conversation import END_OF_TEXT

BATCH = 512
SHARD_TOKENS = 12_000_000


@dataclass(frozen=True)
class Stream:
    """One domain of one split.

    tokens: [N] uint16, documents one after the other, each closed by the end-of-text token.
    starts: [documents] int64, where each document begins.
    text_bytes: UTF-8 bytes of the documents, for bits per byte.
    """

    tokens: NDArray[np.uint16]
    starts: NDArray[np.int64]
    text_bytes: int


def encode(tokenizer: Tokenizer, texts: list[str]) -> Stream:
    """Tokenize documents in order."""
    end = tokenizer.token_to_id(END_OF_TEXT)
    parts: list[NDArray[np.uint16]] = []
    for first in range(0, len(texts), BATCH):
        for encoding in tokenizer.encode_batch_fast(texts[first : first + BATCH]):
            parts.append(np.asarray([*encoding.ids, end], dtype=np.uint16))
    lengths = np.asarray([len(p) for p in parts], dtype=np.int64)
    starts = np.concatenate([[0], np.cumsum(lengths)[:-1]]).astype(np.int64)
    return Stream(np.concatenate(parts), starts, sum(len(t.encode()) for t in texts))


def save(stream: Stream, folder: Path, name: str) -> list[Path]:
    """Write `name`-00.npz.xz and so on, each of at most about SHARD_TOKENS tokens in whole documents."""
    cuts = np.unique(np.searchsorted(stream.starts, np.arange(0, len(stream.tokens), SHARD_TOKENS)))
    cuts = np.append(cuts[cuts < len(stream.starts)], len(stream.starts))
    edges = np.append(stream.starts, len(stream.tokens))[cuts]
    paths = []
    for index, (first, last) in enumerate(pairwise(edges)):
        starts = stream.starts[cuts[index] : cuts[index + 1]] - first
        buffer = io.BytesIO()
        size = np.asarray(stream.text_bytes if index == 0 else 0)  # the first shard carries the whole stream's
        np.savez(buffer, tokens=stream.tokens[first:last], starts=starts, text_bytes=size)
        paths.append(folder / f"{name}-{index:02}.npz.xz")
        paths[-1].write_bytes(lzma.compress(buffer.getvalue(), preset=6))
    return paths


def load(folder: Path, name: str) -> Stream:
    """Read all shards that `save` wrote, as one stream."""
    tokens, starts, size, total = [], [], 0, 0
    for path in sorted(folder.glob(f"{name}-*.npz.xz")):
        with np.load(io.BytesIO(lzma.decompress(path.read_bytes()))) as arrays:
            tokens.append(arrays["tokens"])
            starts.append(arrays["starts"] + total)
            size += int(arrays["text_bytes"])
        total += len(tokens[-1])
    return Stream(np.concatenate(tokens), np.concatenate(starts), size)
