"""From packages to documents: read, clean, drop near-duplicates, split by document."""

from __future__ import annotations

import hashlib
import json
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from models.recipe import code, fetch, prose
from models.recipe.conversation import chat_document
from models.recipe.dedup import contained, near_duplicates
from models.recipe.sources import CODE, CONVERSATION, PROSE, Source

DOMAINS = ("conversation", "code", "prose")
HELD_OUT_SHARE = {"conversation": 0.04, "code": 0.01, "prose": 0.015}


@dataclass(frozen=True)
class Document:
    """One text of one package: the unit that is deduplicated, split and packed."""

    domain: str
    source: str
    name: str
    text: str

    @property
    def key(self) -> str:
        """Unique and stable name, from which the split is drawn."""
        return f"{self.domain}/{self.source}/{self.name}"


@dataclass(frozen=True)
class Package:
    """A source together with the file that was read for it."""

    source: Source
    path: Path


def download(cache: Path) -> dict[str, list[Package]]:
    """Fetch every package of every domain."""
    cache.mkdir(parents=True, exist_ok=True)
    return {
        "conversation": [Package(s, fetch.fetch_python(s, cache)) for s in CONVERSATION],
        "code": [Package(s, fetch.fetch_python(s, cache)) for s in CODE],
        "prose": [Package(s, fetch.fetch_debian(s, cache)) for s in PROSE],
    }


def read_conversation(package: Package) -> list[Document]:
    """One document a conversation."""
    documents = []
    for _, raw in fetch.wheel_files(package.source, package.path, ("/dataset.json",)):
        for name, conversation in sorted(json.loads(raw).items()):
            if text := chat_document(conversation):
                documents.append(Document("conversation", package.source.name, name, text))
    return documents


def read_code(package: Package) -> list[Document]:
    """One document a Python file."""
    files = fetch.wheel_files(package.source, package.path, (".py",))
    cleaned = ((name, code.clean(text)) for name, text in files)
    return [Document("code", package.source.name, name, text) for name, text in cleaned if text]


def read_prose(package: Package) -> list[Document]:
    """One document a page, without the blocks that the package's pages share."""
    files = list(fetch.debian_files(package.source, package.path, (".html", ".xhtml", ".htm", ".pod")))
    pages = [prose.pod_blocks(text) if name.endswith(".pod") else prose.html_blocks(text) for name, text in files]
    boilerplate = prose.repeated_blocks(pages)
    documents = []
    for (name, _), page in zip(files, pages, strict=True):
        blocks = [b for b in page if b.text not in boilerplate]
        text = prose.render(blocks)
        if prose.is_prose(blocks, text):
            documents.append(Document("prose", package.source.name, name, text))
    return documents


READERS = {"conversation": read_conversation, "code": read_code, "prose": read_prose}


def read(packages: dict[str, list[Package]], workers: int) -> dict[str, list[Document]]:
    """Documents of each domain, in package and path order whatever the number of workers."""
    with ProcessPoolExecutor(workers) as pool:
        return {
            domain: [document for batch in pool.map(READERS[domain], packages[domain]) for document in batch]
            for domain in DOMAINS
        }


def deduplicate(documents: list[Document]) -> list[Document]:
    """Drop near-duplicates, keeping the first of each group."""
    dropped = set(near_duplicates([d.text for d in documents]))
    return [d for i, d in enumerate(documents) if i not in dropped]


def is_held_out(document: Document) -> bool:
    """A fixed draw from the document's name alone, so that a document never changes sides."""
    draw = int.from_bytes(hashlib.sha256(document.key.encode()).digest()[:8], "big") / 2**64
    return draw < HELD_OUT_SHARE[document.domain]


def split(documents: list[Document]) -> tuple[list[Document], list[Document]]:
    """(training, held out); a held-out text that shares long passages with training is left out of both."""
    training = [d for d in documents if not is_held_out(d)]
    held_out = [d for d in documents if is_held_out(d)]
    shared = set(contained([d.text for d in held_out], [d.text for d in training]))
    return training, [d for i, d in enumerate(held_out) if i not in shared]
