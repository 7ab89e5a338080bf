"""One command from package names to training tokens: `python -m models.recipe.prepare --out DIR`.

Reads the packages of `sources.py`, cleans them, drops near-duplicates, splits by document, trains the tokenizer and
writes `{training,heldout}-{domain}-*.npz.xz`, the tokenizer's files, held-out excerpts and `manifest.json` under DIR.
The same packages give the same bytes.
"""

from __future__ import annotations

import argparse
import json
import random
import time
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from models.recipe import corpus, fetch, pack, tokens
from models.recipe.conversation import END_OF_TEXT
from models.recipe.corpus import DOMAINS, Document
from models.recipe.sources import CODE, PROSE

CONTEXT = 4096
# Characters at most per domain: what one training run reads a few times.
CHARACTERS = {"conversation": 30_000_000, "code": 340_000_000, "prose": 200_000_000}
TOKENIZER_CHARACTERS = {"conversation": 10_000_000, "code": 24_000_000, "prose": 20_000_000}
EXCERPT_BYTES = 48_000
PERMISSIVE = {s.name for s in (*CODE, *PROSE) if s.permissive} | {"chitchat-dataset"}


def shuffled(documents: list[Document], limit: int) -> list[Document]:
    """A fixed random order, cut at `limit` characters."""
    order = list(documents)
    random.Random(7).shuffle(order)
    kept, size = [], 0
    for document in order:
        if size + len(document.text) <= limit:
            kept.append(document)
            size += len(document.text)
    return kept


def excerpt(documents: list[Document]) -> str:
    """Whole held-out documents of moderate length whose licence lets them ship, up to EXCERPT_BYTES."""
    kept: list[str] = []
    for document in documents:
        size = len(document.text.encode())
        fits = sum(len(t.encode()) for t in kept) + size <= EXCERPT_BYTES
        if document.source in PERMISSIVE and 800 <= size <= 8000 and fits:
            kept.append(document.text + END_OF_TEXT + "\n")
    return "".join(kept)


def build(out: Path, cache: Path, workers: int, tokenizer_path: Path | None) -> dict[str, Any]:
    """Run every stage; returns the manifest."""
    out.mkdir(parents=True, exist_ok=True)
    began = time.monotonic()

    def note(text: str) -> None:
        print(f"[{time.monotonic() - began:6.1f} s] {text}", flush=True)

    packages = corpus.download(cache)
    note("packages fetched")
    documents = corpus.read(packages, workers)
    training: dict[str, list[Document]] = {}
    heldout: dict[str, list[Document]] = {}
    for domain in DOMAINS:
        unique = corpus.deduplicate(documents[domain])
        train_docs, heldout[domain] = corpus.split(unique)
        training[domain] = shuffled(train_docs, CHARACTERS[domain])
        heldout[domain] = shuffled(heldout[domain], CHARACTERS[domain])
        note(f"{domain}: {len(documents[domain])} documents, {len(unique)} distinct, {len(training[domain])} train")
    tokenizer = Tokenizer.from_file(str(tokenizer_path)) if tokenizer_path else train_tokenizer(training)
    tokens.save(tokenizer, out, CONTEXT)
    note("tokenizer ready")
    statistics = write_streams(out, tokenizer, {"training": training, "heldout": heldout})
    for domain in DOMAINS:
        (out / f"{domain}.txt").write_text(excerpt(heldout[domain]))
    manifest = {"packages": describe(packages), "splits": statistics}
    (out / "manifest.json").write_text(json.dumps(manifest, indent=1) + "\n")
    note("done")
    return manifest


def train_tokenizer(training: dict[str, list[Document]]) -> Tokenizer:
    """Train on a balanced part of the training split."""
    return tokens.train(d.text for domain in DOMAINS for d in shuffled(training[domain], TOKENIZER_CHARACTERS[domain]))


def write_streams(out: Path, tokenizer: Tokenizer, splits: dict[str, dict[str, list[Document]]]) -> dict[str, Any]:
    """Tokenize and write each split and domain; returns counts."""
    statistics: dict[str, Any] = {}
    for split, domains in splits.items():
        for domain, documents in domains.items():
            stream = pack.encode(tokenizer, [d.text for d in documents])
            pack.save(stream, out, f"{split}-{domain}")
            counts = {"documents": len(documents), "tokens": len(stream.tokens), "bytes": stream.text_bytes}
            statistics.setdefault(split, {})[domain] = counts
            print(f"  {split} {domain}: {counts}", flush=True)
    return statistics


def describe(packages: dict[str, list[corpus.Package]]) -> list[dict[str, str]]:
    """Name, file, licence and hash of everything read."""
    return [
        {
            "domain": domain,
            "name": package.source.name,
            "file": package.path.name,
            "licence": package.source.licence,
            "sha256": fetch.sha256(package.path),
        }
        for domain, found in packages.items()
        for package in found
    ]


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="folder for tokens, tokenizer and manifest")
    parser.add_argument("--cache", type=Path, default=None, help="where packages are kept (default: OUT/packages)")
    parser.add_argument("--workers", type=int, default=2, help="processes that read packages")
    parser.add_argument("--tokenizer", type=Path, default=None, help="use this tokenizer.json instead of training one")
    arguments = parser.parse_args()
    build(arguments.out, arguments.cache or arguments.out / "packages", arguments.workers, arguments.tokenizer)


if __name__ == "__main__":
    main()
