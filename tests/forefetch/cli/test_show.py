"""Parts of a step, as numbers and as a bar."""

from __future__ import annotations

import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st

from forefetch.cli import show
from forefetch.client import StepTimings


def timings(**fields: float) -> StepTimings:
    zero = {field.name: 0 for field in dataclasses.fields(StepTimings)}
    return StepTimings(**{**zero, "total_ms": sum(fields.values()), **fields})  # type: ignore[arg-type]


def test_other_is_what_the_parts_leave() -> None:
    parts = show.mean_parts([timings(attention_ms=2.0, total_ms=5.0), timings(attention_ms=4.0, total_ms=7.0)])
    assert parts["attention"] == pytest.approx(3.0)
    assert parts["other"] == pytest.approx(3.0)
    assert list(parts) == [label for label, _, _ in show.PARTS] + ["other"]
    assert show.mean_parts([]) == {}


def test_parts_beyond_the_total_leave_nothing_and_not_less() -> None:
    assert show.mean_parts([timings(link_ms=5.0, total_ms=3.0)])["other"] == 0.0


@given(st.lists(st.floats(0, 1e6), min_size=10, max_size=10), st.integers(1, 200))
def test_the_bar_is_exactly_as_wide_as_asked(values: list[float], width: int) -> None:
    parts = dict(zip(show.colours(), values, strict=True))
    bar = show.bar(parts, width)
    assert len(bar) == (width if sum(values) else 0)


def test_each_part_has_its_share_and_colour() -> None:
    bar = show.bar({"attention": 30.0, "link": 10.0}, 40)
    assert [(span.end - span.start, span.style) for span in bar.spans] == [(30, "blue"), (10, "yellow")]
