"""Converted experts on disk: made once, found again, and never trusted."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from expert_worker import convert
from expert_worker.convert import Shard
from expert_worker.host import Host
from forefetch.kernels.grouped_mlp.formats import ExpertFormat, pack
from forefetch.spec import ModelSpec
from forefetch.weights import Checkpoint, load_expert

INT8 = ExpertFormat("int8")


@pytest.fixture
def shard(checkpoint: Callable[[str], Path]) -> Shard:
    folder = checkpoint("qwen3")
    spec = ModelSpec.load(folder)
    return Shard(spec, Checkpoint(folder), [(layer, expert) for layer in spec.moe_layers for expert in (1, 4)])


def filled(shard: Shard, folder: Path | None, format: ExpertFormat = INT8) -> Host:
    host = Host(len(shard.members), shard.spec.hidden_size, shard.spec.expert_width, format, pinned=False)
    host.blobs.fill_(255)
    seen: list[tuple[int, int]] = []
    convert.fill(host, shard, folder, lambda done, total: seen.append((done, total)))
    assert seen[-1] == (len(shard.members), len(shard.members))
    return host


def reads(shard: Shard) -> int:
    """Bytes that were read from the checkpoint so far."""
    return sum(shard.checkpoint.read_log.values())


def test_what_is_made_is_found_again(shard: Shard, tmp_path: Path) -> None:
    first = filled(shard, tmp_path)
    layer, expert = shard.members[3]
    assert torch.equal(first.blobs[3], pack(*load_expert(shard.checkpoint, shard.spec, layer, expert), INT8))
    before = reads(shard)
    second = filled(shard, tmp_path)
    assert reads(shard) == before, "the checkpoint was read again"
    assert torch.equal(first.blobs, second.blobs)
    assert [path.suffix for path in tmp_path.iterdir()] == [convert.SUFFIX]


def test_another_shard_format_or_model_is_another_file(shard: Shard, tmp_path: Path) -> None:
    filled(shard, tmp_path)
    filled(replace(shard, members=shard.members[:-1]), tmp_path)
    filled(shard, tmp_path, ExpertFormat("int4"))
    filled(shard, tmp_path, ExpertFormat("int8", group=64))
    shard.checkpoint._digest = "0" * 64
    filled(shard, tmp_path)
    assert len(list(tmp_path.iterdir())) == 5


def test_what_is_not_converted_is_not_kept(shard: Shard, tmp_path: Path) -> None:
    filled(shard, tmp_path, ExpertFormat("float32"))
    filled(shard, None)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("damage", ["torn", "empty", "longer", "flipped", "sum", "foreign"])
def test_a_damaged_file_is_made_again(damage: str, shard: Shard, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    right = filled(shard, tmp_path)
    path = next(tmp_path.iterdir())
    content = bytearray(path.read_bytes())
    if damage == "torn":
        del content[len(content) // 2 :]
    elif damage == "empty":
        content.clear()
    elif damage == "longer":
        content += b"x"
    elif damage == "flipped":
        content[8192] ^= 1
    elif damage == "sum":
        content[-1] ^= 1
    else:
        content[3] ^= 1
    path.write_bytes(content)
    with caplog.at_level(logging.WARNING):
        assert torch.equal(filled(shard, tmp_path).blobs, right.blobs)
    assert "made again" in caplog.text
    before = reads(shard)
    filled(shard, tmp_path)
    assert reads(shard) == before


def test_a_folder_that_cannot_be_written_costs_a_warning(
    shard: Shard, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").write_text("no folder")
    right = filled(shard, None)
    with caplog.at_level(logging.WARNING):
        assert torch.equal(filled(shard, tmp_path / "file").blobs, right.blobs)
    assert "could not be kept" in caplog.text


KILLED = """
import os, sys
from pathlib import Path
from expert_worker import convert
from expert_worker.host import Host
from forefetch.kernels.grouped_mlp.formats import ExpertFormat
from forefetch.spec import ModelSpec
from forefetch.weights import Checkpoint
model, folder = Path(sys.argv[1]), Path(sys.argv[2])
spec = ModelSpec.load(model)
shard = convert.Shard(spec, Checkpoint(model), [(layer, expert) for layer in spec.moe_layers for expert in (1, 4)])
host = Host(len(shard.members), spec.hidden_size, spec.expert_width, ExpertFormat("int8"), pinned=False)
os.fsync = lambda _: os._exit(9)  # the bytes are written, the name is not
convert.fill(host, shard, folder, lambda done, total: None)
"""


def test_a_process_killed_while_writing_leaves_no_file_to_be_trusted(
    shard: Shard, tmp_path: Path, checkpoint: Callable[[str], Path]
) -> None:
    command = [sys.executable, "-c", KILLED, str(checkpoint("qwen3")), str(tmp_path)]
    assert subprocess.run(command, timeout=240, check=False, env=dict(os.environ)).returncode == 9
    assert [path for path in tmp_path.iterdir() if path.suffix == convert.SUFFIX] == []
    right = filled(shard, None)
    assert torch.equal(filled(shard, tmp_path).blobs, right.blobs)


def test_two_workers_that_convert_at_once_do_not_harm_each_other(shard: Shard, tmp_path: Path) -> None:
    right = filled(shard, None)
    header: dict[str, Any] = shard.header(right)
    path = tmp_path / "x.experts"
    convert.write(path, header, right)
    convert.write(path, header, right)
    again = Host(len(shard.members), shard.spec.hidden_size, shard.spec.expert_width, INT8, pinned=False)
    convert.read(path, header, again, lambda done, total: None)
    assert torch.equal(again.blobs, right.blobs)
    assert list(tmp_path.iterdir()) == [path]
