from __future__ import annotations

from typing import Any

import pytest

from expert_worker.config import ExpertConfig, spin_ns
from forefetch.errors import ConfigError


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"model": ""}, "--model"),
        ({"shard": 2, "shards": 2}, "--shard 2 and --shards 2"),
        ({"shard": -1}, "--shard"),
        ({"shards": 0}, "--shards"),
        ({"dtype": "int8"}, "--dtype"),
        ({"slots": "many"}, "--slots: 'many'"),
        ({"slots": "inf%"}, "--slots: 'inf%'"),
        ({"slots": "nan%"}, "--slots: 'nan%'"),
        ({"slots": "0"}, "makes 0 slots"),
        ({"slots": "-3"}, "makes -3 slots"),
        ({"slots": "0.5%"}, "0.5% of 100 experts makes 0 slots"),
        ({"max_rows": 0}, "--max-rows"),
        ({"threads": -1}, "--threads"),
        ({"spin_us": -2}, "--spin-us"),
    ],
)
def test_wrong_settings_are_named(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        ExpertConfig(**{"model": "folder", **settings}).validate()


@pytest.mark.parametrize(("slots", "count"), [("100%", 24), ("50%", 12), ("5%", 1), ("7", 7), ("400", 24), ("250%", 24)])
def test_slots_are_a_count_or_a_percentage(slots: str, count: int) -> None:
    assert ExpertConfig(model="folder", slots=slots).slot_count(24) == count


def test_spinning_needs_a_core_to_spare(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.sched_getaffinity", lambda pid: {0, 1})
    assert spin_ns(-1, 1) == 50_000
    assert spin_ns(-1, 2) == 0
    assert spin_ns(7, 2) == 7_000
    assert spin_ns(0, 1) == 0
