"""Slices out of safetensors files: what is read, what is counted, what is refused, and what the digest depends on."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from forefetch.errors import UnsupportedModel
from forefetch.spec import ModelSpec, Slice
from forefetch.weights import Checkpoint, load_expert


@pytest.fixture
def folder(tmp_path: Path, checkpoint: Callable[[str], Path]) -> Path:
    """A copy of a checkpoint in several files, to be damaged."""
    return shutil.copytree(checkpoint("granite-plain"), tmp_path / "copy")


def files(folder: Path) -> list[Path]:
    return sorted(folder.glob("*.safetensors"))


def test_a_stacked_expert_is_sliced_without_reading_the_others(folder: Path) -> None:
    spec, opened = ModelSpec.load(folder), Checkpoint(folder)
    w13, w2 = load_expert(opened, spec, 0, 5)
    stacked = {name: tensor for file in files(folder) for name, tensor in load_file(file).items()}
    prefix = spec.layer_prefix(0)
    assert torch.equal(w13, stacked[prefix + spec.expert_names.gate_up][5])
    assert torch.equal(w2, stacked[prefix + spec.expert_names.down][5])
    assert sum(opened.read_log.values()) == w13.nbytes + w2.nbytes


def test_rows_dtype_and_whole_tensors(folder: Path) -> None:
    opened = Checkpoint(folder)
    whole = opened.read("model.norm.weight")
    assert torch.equal(opened.read(Slice("model.norm.weight", rows=(3, 7))), whole[3:7])
    assert opened.read("model.norm.weight", dtype=torch.bfloat16).dtype is torch.bfloat16


def test_a_missing_tensor_is_named(folder: Path) -> None:
    with pytest.raises(UnsupportedModel, match=r"model\.nothing"):
        Checkpoint(folder).read("model.nothing")


def test_files_that_are_missing_damaged_or_elsewhere_are_refused(folder: Path, tmp_path: Path) -> None:
    index = folder / "model.safetensors.index.json"
    names = json.loads(index.read_text())
    name = next(iter(names["weight_map"]))
    index.write_text(json.dumps({"weight_map": {name: "../elsewhere.safetensors"}}))
    with pytest.raises(UnsupportedModel, match=r"elsewhere\.safetensors.*not in the folder"):
        Checkpoint(folder)
    index.unlink()
    with pytest.raises(UnsupportedModel, match=r"model\.safetensors: not found"):
        Checkpoint(folder)
    (folder / "model.safetensors").write_bytes(b"\xff" * 64)
    with pytest.raises(UnsupportedModel, match="not a safetensors file") as damaged:
        Checkpoint(folder)
    assert str(tmp_path) not in str(damaged.value)


def test_the_digest_follows_weights_and_rules_but_not_the_writer(folder: Path) -> None:
    before = Checkpoint(folder).digest
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "transformers_version": "0.0.0"}))
    assert Checkpoint(folder).digest == before
    (folder / "config.json").write_text(json.dumps({**config, "rms_norm_eps": 1e-3}))
    assert Checkpoint(folder).digest != before
    (folder / "config.json").write_text(json.dumps(config))
    tensors = load_file(files(folder)[0])
    name = max(tensors, key=lambda n: tensors[n].numel())
    tensors[name] += 0.5
    save_file(tensors, files(folder)[0])
    assert Checkpoint(folder).digest != before
