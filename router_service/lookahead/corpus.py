"""Text files -> documents -> token sequences. A document is what never gets split between training and validation."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from forefetch.errors import ConfigError
from router_service.text import Text

SHORTEST = 8  # tokens; less is not worth a sequence


@dataclass(frozen=True)
class Chunk:
    """Up to a context's worth of consecutive tokens of one document."""

    document: str  # a hash of the whole document's text
    ids: list[int]


def read_documents(path: Path, separator: str) -> list[str]:
    """The file's documents: what stands between lines that end in `separator`, or the whole file. ConfigError without any."""
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        why = error.strerror if isinstance(error, OSError) else error.reason
        raise ConfigError(f"--text {path}: cannot be read as UTF-8 text: {why}") from None
    parts = text.split(separator + "\n") if separator else [text]
    documents = [part for part in parts if part.strip()]
    if not documents:
        raise ConfigError(f"--text {path.name}: has no text")
    return documents


def chunks(text: Text, documents: Sequence[str], length: int, most: int) -> Iterator[Chunk]:
    """Documents as chunks of up to `length` tokens, in order, until `most` tokens are reached."""
    total = 0
    for document in documents:
        name, ids = hashlib.sha256(document.encode()).hexdigest(), text.encode(document)
        for start in range(0, len(ids), length):
            part = ids[start : min(start + length, start + most - total)]
            if len(part) >= SHORTEST:
                yield Chunk(name, part)
                total += len(part)
            if most - total < SHORTEST:
                return


def batches(parts: Sequence[Chunk], sequences: int, rows: int) -> Iterator[list[Chunk]]:
    """Chunks in groups of at most `sequences` and, unless one alone is longer, `rows` tokens."""
    group: list[Chunk] = []
    for part in parts:
        if group and (len(group) == sequences or sum(len(chunk.ids) for chunk in group) + len(part.ids) > rows):
            yield group
            group = []
        group.append(part)
    if group:
        yield group


def kept_aside(parts: Sequence[Chunk]) -> frozenset[str]:
    """A tenth of the documents, at least one, drawn by hash: heads are chosen by them and not trained on them."""
    documents = sorted({chunk.document for chunk in parts})
    if len(documents) < 2:
        raise ConfigError("--text: at least two documents are needed, one of them to choose heads by")
    return frozenset(documents[: -(-len(documents) // 10)])
