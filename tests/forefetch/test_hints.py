from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest

from forefetch.hints import FIRST, ExpertHint

GOOD = ExpertHint(3, 0, 1, FIRST, np.array([4, 2], dtype=np.int32), np.array([1.0, 0.25], dtype=np.float32), 100)


def test_a_sound_hint_has_no_flaw() -> None:
    assert GOOD.flaw == ""
    nothing = dataclasses.replace(GOOD, experts=np.empty(0, np.int32), probabilities=np.empty(0, np.float32))
    assert nothing.flaw == ""


@pytest.mark.parametrize(
    ("changes", "flaw"),
    [
        ({"probabilities": np.array([1.0], dtype=np.float32)}, "experts with"),
        ({"experts": np.zeros((1, 2), np.int32), "probabilities": np.zeros((1, 2), np.float32)}, "experts with"),
        ({"experts": np.array([4, 4], dtype=np.int32)}, "twice"),
        ({"probabilities": np.array([0.5, np.nan], dtype=np.float32)}, "probability"),
        ({"probabilities": np.array([0.5, 1.5], dtype=np.float32)}, "probability"),
        ({"probabilities": np.array([-0.5, 0.5], dtype=np.float32)}, "probability"),
        ({"phase": 2}, "range"),
        ({"window_ns": -1}, "range"),
        ({"layer": -1}, "range"),
    ],
)
def test_what_makes_no_sense_is_said(changes: dict[str, Any], flaw: str) -> None:
    assert flaw in dataclasses.replace(GOOD, **changes).flaw
