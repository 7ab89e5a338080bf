"""Technical prose out of documentation pages: HTML or POD in, paragraphs out, navigation and other languages left."""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass, field
from html.parser import HTMLParser

SKIP = {"script", "style", "nav", "header", "footer", "head", "table", "svg", "button", "form", "select", "noscript"}
SKIP_CLASS = re.compile(
    r"sphinxsidebar|\brelated\b|\bfooter\b|\btoc\b|\bnav\w*|sidebar|headerlink|toctree|breadcrumb|copyright"
)
BLOCK = {"p", "li", "dt", "dd", "div", "section", "blockquote", "ul", "ol", "dl", "h1", "h2", "h3", "h4", "h5", "h6"}
HEADING = {"h1", "h2", "h3", "h4", "h5", "h6"}
VOID = {"br", "hr", "img", "meta", "link", "input", "col", "area", "base", "wbr", "source"}
COMMON = {"the", "of", "to", "and", "a", "is", "in", "for", "that", "be", "this", "it", "with", "are", "if"}
WORD = re.compile(r"[A-Za-z]+")
# One way to write quotes and spaces, and no permalink marks.
PLAIN = str.maketrans(
    {"\u2018": "'", "\u2019": "'", "\u201c": '"', "\u201d": '"', "\u00a0": " ", "\u00b6": None, "\u200b": None}
)


@dataclass
class Block:
    """One paragraph, list item, heading or code listing."""

    kind: str
    text: str
    linked: int = 0  # characters inside links


@dataclass
class _Open:
    """The block being read."""

    kind: str = "p"
    parts: list[str] = field(default_factory=list)
    linked: int = 0


class PageReader(HTMLParser):
    """Collects the blocks of one page."""

    def __init__(self) -> None:
        super().__init__(convert_charrefs=True)
        self.blocks: list[Block] = []
        self._open = _Open()
        self._skip_tag = ""
        self._skip_depth = 0
        self._links = 0
        self._pre = 0

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        """Open blocks; leave out menus, tables and scripts."""
        if self._skip_depth:
            self._skip_depth += tag == self._skip_tag
            return
        if tag in VOID:
            self._open.parts.append("\n" if tag == "br" else "")
            return
        if tag in SKIP or SKIP_CLASS.search(" ".join(value or "" for name, value in attrs if name == "class")):
            self._skip_tag, self._skip_depth = tag, 1
            return
        self._links += tag == "a"
        if tag == "pre":
            self._flush("pre")
            self._pre += 1
        elif tag in BLOCK and not self._pre:
            self._flush("h" if tag in HEADING else tag if tag == "li" else "p")

    def handle_endtag(self, tag: str) -> None:
        """Close blocks and what is left out."""
        if self._skip_depth:
            self._skip_depth -= tag == self._skip_tag
            return
        if tag == "a":
            self._links = max(0, self._links - 1)
        elif tag == "pre":
            self._pre = max(0, self._pre - 1)
            self._flush("p")
        elif tag in BLOCK and not self._pre:
            self._flush("p")

    def handle_data(self, data: str) -> None:
        """Keep text, and how much of it is links."""
        if not self._skip_depth:
            self._open.parts.append(data)
            self._open.linked += len(data) if self._links else 0

    def _flush(self, next_kind: str) -> None:
        text = "".join(self._open.parts).translate(PLAIN)
        if self._open.kind == "pre":
            text = re.sub(r"\n{3,}", "\n\n", text.expandtabs(8).strip("\n").rstrip())
        else:
            text = re.sub(r"\s+", " ", text).strip()
        if text:
            self.blocks.append(Block(self._open.kind, text, self._open.linked))
            self._open = _Open(next_kind)
        elif not (self._open.kind == "li" and next_kind == "p"):  # <li><p>: the item keeps its mark
            self._open = _Open(next_kind)


def html_blocks(page: str) -> list[Block]:
    """Blocks of an HTML page without those that are mostly links (menus, indexes)."""
    reader = PageReader()
    reader.feed(page)
    reader.close()
    reader._flush("p")
    return [b for b in reader.blocks if b.kind in {"pre", "h"} or b.linked <= 0.6 * len(b.text)]


def pod_blocks(text: str) -> list[Block]:
    """Blocks of a Perl POD file; formatting codes such as C<x> are reduced to their content."""
    blocks = []
    for chunk in re.split(r"\n\s*\n", text):
        command = re.match(r"=(\w+)\s*(.*)", chunk, re.S)
        if command and not command.group(1).startswith(("head", "item")):
            continue
        kind = "h" if command and command.group(1).startswith("head") else "li" if command else "p"
        kind = "pre" if chunk[:1] in " \t" else kind
        body = command.group(2) if command else chunk
        for _ in range(3):  # codes nest
            body = re.sub(r"[A-Z]<+\s*([^<>|]*?)(?:\|[^<>]*)?\s*>+", r"\1", body)
        body = body.rstrip() if kind == "pre" else " ".join(body.split()).lstrip("* ")
        if body.strip():
            blocks.append(Block(kind, body))
    return blocks


def repeated_blocks(pages: list[list[Block]]) -> set[str]:
    """Texts that stand on many pages of one package: boilerplate, not prose."""
    counts = Counter(text for page in pages for text in {b.text for b in page})
    limit = max(8, len(pages) // 50)
    return {text for text, count in counts.items() if count >= limit}


def render(blocks: list[Block]) -> str:
    """Blocks as plain text: items close together, everything else a blank line apart; empty sections dropped."""
    followed = [b.kind != "h" or (after is not None and after.kind != "h") for b, after in zip_next(blocks)]
    kept = [b for b, keep in zip(blocks, followed, strict=True) if keep]
    pieces = []
    for block, after in zip_next(kept):
        tight = after is not None and block.kind == after.kind == "li"
        pieces.append(("- " if block.kind == "li" else "") + block.text + ("\n" if tight else "\n\n"))
    return "".join(pieces).rstrip() + "\n"


def zip_next(blocks: list[Block]) -> list[tuple[Block, Block | None]]:
    """Each block with the one after it."""
    return [(b, blocks[i + 1] if i + 1 < len(blocks) else None) for i, b in enumerate(blocks)]


def is_prose(blocks: list[Block], text: str) -> bool:
    """English sentences make up enough of the page, and it is long enough to teach something."""
    words = [w.lower() for w in WORD.findall(text[:20000])]
    if len(text) < 600 or not words or sum(c < "\x80" for c in text) < 0.97 * len(text):
        return False
    sentences = sum(len(b.text) for b in blocks if b.kind in {"p", "li"} and len(b.text) > 50 and b.text[-1] in ".:;?!)")
    return sentences >= 0.4 * len(text) and sum(w in COMMON for w in words) >= 0.15 * len(words)
