"""Machine code on disk: what two processes keep at once is never taken for each other's."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("numba")

import numpy as np
from numba import njit
from numba.core.caching import IndexDataCacheFile

from forefetch.kernels.compiled.kept import Files, Kept


def two_at_once(make: Callable[..., Any], folder: Path, monkeypatch: pytest.MonkeyPatch) -> list[str | None]:
    """What is read of two signatures that two processes kept when neither saw the other's index."""
    one, other = (make(cache_path=str(folder), filename_base="f", source_stamp=1) for _ in range(2))
    with monkeypatch.context() as blind:
        blind.setattr(IndexDataCacheFile, "_load_index", lambda self: {})
        one.save("int", "code of int")
    early = make(cache_path=str(folder), filename_base="f", source_stamp=1)._load_index()  # whoever reads between the two
    with monkeypatch.context() as blind:
        blind.setattr(IndexDataCacheFile, "_load_index", lambda self: {})
        other.save("float", "code of float")
    late = one._load_index()
    return [one._load_data(index[key]) if key in index else None for index in (early, late) for key in ("int", "float")]


def test_two_that_keep_at_once_lose_code_at_worst(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert two_at_once(Files, tmp_path, monkeypatch) == ["code of int", None, None, "code of float"]


def test_numba_by_itself_would_run_the_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Once this fails, Numba has mended it and `kept` can go."""
    assert two_at_once(IndexDataCacheFile, tmp_path, monkeypatch)[0] == "code of float"


def test_code_is_found_again_by_its_signature(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("numba.config.CACHE_DIR", str(tmp_path))

    def twice(x: Any) -> Any:
        return x + x

    def made() -> Any:
        function = njit(twice)
        function._cache = Kept(twice)
        return function

    first, again = made(), made()
    assert (first(2), first(0.5)) == (4, 1.0)
    assert (again(2), again(0.5)) == (4, 1.0)
    assert not first.stats.cache_hits
    assert sum(again.stats.cache_hits.values()) == 2
    assert first(np.float32(0.5)) == again(np.float32(0.5)) == 1.0
    assert len(list(tmp_path.rglob("*.nbc"))) == 3
