"""Which KV page belongs to whom. Pure: numbers in, numbers out.

Page 0 is scratch: padded rows of a batch bucket write there, nobody reads it, and it is never handed out. Runs of
consecutive pages are preferred because attention on a CPU then reads a request's K and V in place instead of gathering.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

SCRATCH = 0


class PagePool:
    """`total` pages, the scratch page included. Not thread-safe: one thread owns it."""

    def __init__(self, total: int) -> None:
        if total < 2:
            raise ValueError("a pool needs the scratch page and at least one more")
        self.total = total
        self._free = bytearray(b"\1") * total  # 1 = free; a bytearray finds runs at C speed
        self._free[SCRATCH] = 0
        self._pins: Counter[int] = Counter()
        self._leaving: set[int] = set()  # released while pinned
        self.free = total - 1

    @property
    def used(self) -> int:
        """Pages in use or pinned, without the scratch page."""
        return self.total - 1 - self.free

    def allocate(self, count: int) -> tuple[int, ...] | None:
        """`count` pages, consecutive if any run is long enough; None (and nothing changed) when fewer are free."""
        if count > self.free:
            return None
        start = self._free.find(b"\1" * count) if count else 0
        pages = tuple(range(start, start + count)) if start >= 0 else self._scattered(count)
        for page in pages:
            self._free[page] = 0
        self.free -= count
        return pages

    def _scattered(self, count: int) -> tuple[int, ...]:
        pages, at = [], -1
        for _ in range(count):
            at = self._free.find(1, at + 1)
            pages.append(at)
        return tuple(pages)

    def release(self, pages: Iterable[int]) -> None:
        """Gives pages back; a pinned one becomes free when its last pin goes."""
        for page in pages:
            if self._free[page] or page in self._leaving or page == SCRATCH:
                raise ValueError(f"page {page} is not in use")
            if self._pins[page]:
                self._leaving.add(page)
            else:
                self._give(page)

    def pin(self, page: int) -> None:
        """Keeps a page's content until `unpin`, whatever happens to its owner."""
        if self._free[page]:
            raise ValueError(f"page {page} is free")
        self._pins[page] += 1

    def unpin(self, page: int) -> None:
        """Takes one pin off."""
        if not self._pins[page]:
            raise ValueError(f"page {page} is not pinned")
        self._pins[page] -= 1
        if not self._pins[page]:
            del self._pins[page]
            if page in self._leaving:
                self._leaving.discard(page)
                self._give(page)

    def _give(self, page: int) -> None:
        self._free[page] = 1
        self.free += 1
