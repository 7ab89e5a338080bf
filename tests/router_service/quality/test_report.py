from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from forefetch.kernels.kv_codec import KvFormat
from router_service.quality import plots, report
from router_service.quality.cells import Cell
from router_service.quality.measure import Measured
from router_service.quality.setups import DEFAULT, MIN_MAX, OWN, setups

SPEC: Any = SimpleNamespace(name="model", layers=8)
CONTEXTS = (512, 1024, 2048, 4096)


def measured(exempt: frozenset[int] = frozenset()) -> list[Measured]:
    """Made up: divergence is halved by a bit."""
    found = []
    for number, setup in enumerate(setups((*OWN, *MIN_MAX), KvFormat("e2m0", 128), 32, -1, exempt)):
        noise = torch.randn(2, 2048, generator=torch.Generator().manual_seed(number)).exp()
        apart = noise[0] * 2.0 ** -(4 + setup.page_bits()) if setup.format else torch.zeros(2048)
        cell = Cell()
        cell.add(2 + 0.1 * noise[1] + apart, 2 + 0.1 * noise[1], noise[0] < 9, apart)
        one = Measured(setup, dict.fromkeys(CONTEXTS, cell))
        one.by_text = {(context, "tale"): cell for context in CONTEXTS}
        found.append(one)
    return found


@pytest.mark.parametrize("context", [*CONTEXTS, 32768])
@pytest.mark.parametrize("exempt", [frozenset[int](), frozenset([3])])
def test_each_format_stands_beside_min_max_in_as_many_bytes(context: int, exempt: frozenset[int]) -> None:
    found = measured(exempt)
    for one in found:
        other = report.twin(one, found, SPEC, context)
        if one.setup.name == "fp16" or one.setup.baseline:
            assert other is None
            continue
        assert other is not None
        assert other.setup.name in MIN_MAX
        assert 1 <= other.setup.page_bits() / one.setup.page_bits() < 1.015
        assert 0.997 <= other.setup.bits(SPEC, context) / one.setup.bits(SPEC, context) < 1.015


def test_no_baseline_of_fewer_bytes_is_a_twin() -> None:
    found = [one for one in measured() if one.setup.name in {"e2m0", "kivi2"}]
    assert report.twin(found[0], found, SPEC, 4096) is None


def test_json_has_one_object_for_each_format_and_context() -> None:
    found = measured()
    rows = report.as_json(found, SPEC)
    assert len({(row["format"], row["context"]) for row in rows}) == len(rows) == len(found) * len(CONTEXTS)
    by_name = {row["format"]: row for row in rows if row["context"] == 4096}
    one, other = by_name["fp4"], by_name["kivi4-g64"]
    assert one["min_max"]["format"] == "kivi4-g64"
    assert one["min_max"]["bits"] == other["bits"] >= one["bits"]
    assert one["min_max"]["divergence"] == pytest.approx(one["divergence"] / other["divergence"] - 1, abs=1e-4)
    low, high = one["divergence_interval"]
    assert low < one["divergence"] < high
    assert one["ppl"] / one["ppl_fp16"] - 1 == pytest.approx(one["change"], abs=1e-5)
    assert one["texts"]["tale"]["divergence"] == one["divergence"]


def test_what_is_printed_takes_100_columns_and_is_never_cut(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "60")
    plots.show(measured(), SPEC, CONTEXTS)
    text = capsys.readouterr().out
    assert "…" not in text
    assert max(map(len, text.splitlines())) <= 100
    chart = text[text.index("KL of predictions") :]
    places = {line.split()[2]: max(line.find("●"), line.find("○")) for line in chart.splitlines()[1:] if line.strip()}
    assert set(places) == {*OWN, *MIN_MAX} - {"fp16"}
    assert places["e2m0"] > places["mixed"] > places["asym3"] > places["fp4"] > 0
    assert ("●" in chart, "○" in chart) == (True, True)


def test_a_chart_of_float16_alone_has_no_lines() -> None:
    assert len(plots.chart(measured()[:1], SPEC, 4096).plain.splitlines()) == 1


def test_the_standard_command_measures_a_twin_for_each_format() -> None:
    assert {*OWN, *MIN_MAX} <= set(DEFAULT)
