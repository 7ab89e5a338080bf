from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from benchmarks.kv_quality import Kept, rows
from forefetch.kernels.kv_codec import KvFormat
from router_service.quality.cells import Cell
from router_service.quality.measure import Measured
from router_service.quality.setups import setups

SPEC: Any = SimpleNamespace(name="model", layers=8)
NAMES = ("fp4", "kivi4-g64")


def test_windows_are_kept_and_put_together(tmp_path: Path) -> None:
    wanted = setups(NAMES, KvFormat("e2m0", 128), 0, -1, frozenset())
    kept, whole = Kept(tmp_path / "kept.jsonl"), {name: Cell() for name in NAMES}
    for window in range(3):
        for number, setup in enumerate(wanted[: 1 if window == 2 else 2]):  # the last window lacks the baseline
            part = torch.rand(4, 1300, generator=torch.Generator().manual_seed(10 * window + number))
            measured = Measured(setup, {4096: Cell()})
            for cell in (measured.cells[4096], *([whole[setup.name]] if window < 2 else [])):
                cell.add(part[0], part[1], part[2] > 0.1, part[3])
            kept.add("tale", window, measured)
    again = Kept(tmp_path / "kept.jsonl")
    found, count = again.together(wanted)
    assert count == 2
    for measured in found:
        assert measured.cells[4096].divergence == whole[measured.setup.name].divergence
        assert measured.by_text[4096, "tale"].change == whole[measured.setup.name].change
    one, other = (whole[name].divergence.value for name in NAMES)
    by_metric = {row.metric: row.value for row in rows(found, count, SPEC) if "fp4" in row.case}
    assert by_metric["KL beside kivi4-g64 of 4.78 bits"] == pytest.approx(100 * (one / other - 1), abs=1e-3)
    assert by_metric["KL, low end of 95 %"] < by_metric["KL"] < by_metric["KL, high end of 95 %"]
