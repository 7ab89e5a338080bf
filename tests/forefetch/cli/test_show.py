"""Parts of a step, as numbers and as a bar."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from forefetch.cli import show


def timings(**fields: int) -> Any:
    zero = {field: 0 for _, field, _ in show.PARTS}
    return SimpleNamespace(**{**zero, "total_ns": sum(fields.values()), **fields})


def test_other_is_what_the_parts_leave() -> None:
    steps = [timings(attention_ns=2_000_000, total_ns=5_000_000), timings(attention_ns=4_000_000, total_ns=7_000_000)]
    parts = show.mean_parts(steps)
    assert parts["attention"] == pytest.approx(3.0)
    assert parts["other"] == pytest.approx(3.0)
    assert list(parts) == [label for label, _, _ in show.PARTS] + ["other"]
    assert show.mean_parts([]) == {}


def test_parts_beyond_the_total_leave_nothing_and_not_less() -> None:
    assert show.mean_parts([timings(link_ns=5, total_ns=3)])["other"] == 0.0


@given(st.lists(st.floats(0, 1e6), min_size=9, max_size=9), st.integers(1, 200))
def test_the_bar_is_exactly_as_wide_as_asked(values: list[float], width: int) -> None:
    parts = dict(zip(show.colours(), values, strict=True))
    bar = show.bar(parts, width)
    assert len(bar) == (width if sum(values) else 0)


def test_each_part_has_its_share_and_colour() -> None:
    bar = show.bar({"attention": 30.0, "link": 10.0}, 40)
    assert [(span.end - span.start, span.style) for span in bar.spans] == [(30, "blue"), (10, "yellow")]
