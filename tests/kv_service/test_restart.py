"""A service that is started again where another one was."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from kv_calls import running

from forefetch.errors import ConfigError
from kv_service import disk as disk_module
from kv_service.disk import take_lock

if TYPE_CHECKING:
    pass

from disk_calls import MIB, config, fill
from waiting import until


def test_a_restart_finds_everything_and_reads_it_from_disk(tmp_path: Path) -> None:
    held = fill(tmp_path)
    with running(config(tmp_path)) as kv:
        keys, blocks = [key for key, _ in held], [block for _, block in held]
        stats = kv.client.stats()
        assert (stats.blocks, stats.disk_blocks, stats.memory_blocks, stats.disk_reads) == (3, 3, 0, 0)
        assert kv.client.locate(keys) == (3, 3)
        assert kv.client.get(keys) == blocks
        assert kv.client.stats().disk_reads == 3
        assert kv.client.get(keys) == blocks
        assert kv.client.stats().disk_reads == 3  # they stayed in memory
        assert kv.client.locate(keys) == (3, 0)
        assert kv.put(keys, 5000) == (3, 0)
        assert kv.client.stats().duplicates == 3


def test_memory_smaller_than_what_is_held(tmp_path: Path) -> None:
    """Blocks come from disk when memory held others meanwhile; writers wait for the disk instead of being refused."""
    with running(config(tmp_path)) as kv:
        keys = kv.keys(*range(20))
        assert kv.put(keys, MIB) == (20, 0)
        assert kv.client.get(keys) == [kv.block(key, MIB) for key in keys]
        stats = kv.client.stats()
        assert (stats.blocks, stats.no_room, stats.evicted) == (20, 0, 0)
        assert stats.memory_bytes <= stats.memory_budget_bytes == 8 * MIB
        assert stats.disk_reads > 0


def test_a_smaller_budget_after_a_restart(tmp_path: Path) -> None:
    fill(tmp_path, tuple(range(30)), MIB)
    with running(config(tmp_path, tenant_share=1.0).__class__(dir=str(tmp_path), disk_gb=0.0101, max_block_mb=2)) as kv:
        keys = kv.keys(*range(30))
        until(lambda: kv.client.stats().disk_blocks <= 10)
        held = kv.client.look_up(keys)
        assert 5 <= held <= 10
        assert kv.client.get(keys) == [kv.block(key, MIB) for key in keys[:held]]


def test_one_service_per_folder(tmp_path: Path) -> None:
    lock = take_lock(tmp_path)
    with pytest.raises(ConfigError, match="another KV service uses it"):
        take_lock(tmp_path)
    lock.close()
    take_lock(tmp_path).close()


def test_the_row_format_is_versioned(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fill(tmp_path)
    monkeypatch.setattr(disk_module, "_VERSION", 2)
    with running(config(tmp_path)) as kv:
        assert (kv.client.stats().damaged_at_start, kv.client.stats().blocks) == (3, 0)
