"""Every set of example values, and what the chart makes of it."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

import charts


@pytest.fixture(params=["defaults", *charts.EXAMPLES])
def example(request: pytest.FixtureRequest) -> str:
    """Each example's name, and "defaults"."""
    return str(request.param)


@pytest.fixture
def objects(example: str) -> list[charts.Manifest]:
    """That example's objects."""
    return charts.example(example)
