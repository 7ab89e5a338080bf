"""What of results.csv becomes a curve."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.expert_offload_plot import latest, picture, series
from benchmarks.results import Row, append

CASE = "int4, batch 1, 48 layers, attention 100 us, "


def test_the_latest_rows_become_points(tmp_path: Path) -> None:
    file = tmp_path / "rows.csv"
    steps = {"50% slots, recall 95%": 1.5, "50% slots, no hints": 4.0, "50% slots, on demand, LRU, no host": 2.0}
    append([Row("expert_offload", f"{CASE}50% slots, recall 95%", "x resident", 9.0, "")], file)
    append([Row("expert_offload", CASE + name, "x resident", value, "") for name, value in steps.items()], file)
    append([Row("expert_offload", f"{CASE}50% slots, no hints", "link busy", 75.0, "%")], file)
    append([Row("expert_mlp", f"{CASE}75% slots, recall 95%", "x resident", 7.0, "")], file)
    points, floors, demand = series(latest(file), "int4", 1)
    assert points == {(50, 95): 1.5, (50, 0): 4.0}
    assert floors == {(50, 95): 1.0, (50, 0): 3.0}, "bytes alone, and never less than all resident"
    assert demand == {"no host": 2.0}


def test_the_rows_of_this_tree_can_be_drawn(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    from benchmarks.results import FILE

    picture(FILE, tmp_path / "p.svg")
    assert "bfloat16, batch 1" in (tmp_path / "p.svg").read_text()
