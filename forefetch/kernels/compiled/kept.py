"""Machine code on disk, so that processes which compile one function at once never take each other's."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from typing import Any

from numba.core.caching import FunctionCache, IndexDataCacheFile


class Files(IndexDataCacheFile):  # type: ignore[misc]
    """Numba numbers a function's files by the index that it has just read, and names a file there before it is written: two
    processes with a signature each would write the same file, and one of them, or whoever comes next, run the other's code.

    Here a file's name follows from its signature and machine, and it is there before the index says so. What two write at
    once is at worst forgotten and compiled again.
    """

    def save(self, key: Any, data: Any) -> None:
        """Keeps the code of one signature."""
        name = self._data_name(int(hashlib.sha256(repr(key).encode()).hexdigest()[:16], 16))
        self._save_data(name, data)
        known = self._load_index()
        if known.get(key) != name:
            self._save_index({**known, key: name})


class Kept(FunctionCache):  # type: ignore[misc]
    """As Numba's, with such files. RuntimeError: there is no folder to keep them in."""

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__(function)
        self._cache_file = Files(
            cache_path=self._cache_path,
            filename_base=self._impl.filename_base,
            source_stamp=self._impl.locator.get_source_stamp(),
        )
