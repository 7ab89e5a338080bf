from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from reference_model import CASES

from forefetch.errors import Mismatch
from forefetch.spec import ModelSpec
from forefetch.weights import Checkpoint
from router_service.lookahead import store
from router_service.lookahead.estimate import Network
from router_service.lookahead.foresight import Foresight
from router_service.lookahead.heads import Head
from router_service.lookahead.runner import Runner
from router_service.lookahead.sketch import Sketch
from router_service.lookahead.store import Trained


@pytest.fixture
def trained(runner: Callable[[str], Runner], untrained: Callable[[Runner], Trained]) -> Trained:
    draw = torch.Generator().manual_seed(8)
    found = untrained(runner("qwen3"))

    def network(*shapes: tuple[int, ...]) -> Network:
        return Network(*(torch.randn(shape, generator=draw) for shape in shapes))

    found.heads = {(0, 1): Head(network((4, 136), (4,), (8, 4), (8,)), 1.5, -0.25), (0, 12): Head(None, 0.5, 0.125)}
    shapes = ((12, 64), (12,), (6, 8), (6,), (64, 6), (64,))
    found.sketches = {1: Sketch(*(torch.randn(shape, generator=draw) for shape in shapes))}
    found.recall = {(0, 1): 0.75, (0, 12): 0.5}
    found.foresight = Foresight(torch.randn(128, 24, generator=draw), torch.randn(24, generator=draw), 0.625)
    return found


def test_what_is_saved_comes_back(trained: Trained, tmp_path: Path) -> None:
    store.save(trained, tmp_path, "d" * 64)
    back = store.load(tmp_path, "d" * 64, (0, 1, 2))
    assert back.recall == trained.recall
    assert back.heads[0, 12] == trained.heads[0, 12]
    mine, other = trained.heads[0, 1], back.heads[0, 1]
    assert (mine.scale, mine.shift) == (other.scale, other.shift)
    assert mine.correction is not None
    assert other.correction is not None
    for part in store.PARTS:
        close(getattr(mine.correction, part), getattr(other.correction, part), bits=4)
    for part in store.SKETCH_PARTS:
        close(getattr(trained.sketches[1], part), getattr(back.sketches[1], part), bits=4)
    assert list(back.sketches) == [1]
    assert trained.foresight is not None
    assert back.foresight is not None
    close(trained.foresight.weight, back.foresight.weight, bits=8)
    close(trained.foresight.offset, back.foresight.offset, bits=8)
    assert back.foresight.recall == 0.625
    for layer in (0, 1, 2):
        close(trained.load[layer], back.load[layer], bits=8)
    for layer in (0, 1):  # nothing looks ahead from the last
        close(trained.outputs[layer], back.outputs[layer], bits=8)


def close(mine: torch.Tensor, other: torch.Tensor, bits: int) -> None:
    """A vector is rounded to float16; a matrix in 8 bits to half of a step, its row's largest value over 127; in 4 bits
    no worse in sum than by a step of a group's largest value over 7, which is one of the scales that are tried."""
    assert mine.shape == other.shape
    if mine.dim() == 1:
        assert torch.equal(mine.half().float(), other)
    elif bits == 8:
        steps = mine.abs().amax(1, keepdim=True) / 127
        assert bool(((mine - other).abs() <= 0.51 * steps + 127 * 2**-11 * steps).all())
    else:
        for one, two in zip(mine.split(64, dim=1), other.split(64, dim=1), strict=True):
            scale = (one.abs().amax(1, keepdim=True) / 7).half().float()
            rounded = (one / scale).round().clamp(-8, 7) * scale
            assert bool(((two - one).square().sum(1) <= (rounded - one).square().sum(1) + 1e-6).all())


def test_a_file_of_another_model_is_refused_by_name(trained: Trained, tmp_path: Path) -> None:
    store.save(trained, tmp_path, "a" * 64)
    with pytest.raises(Mismatch, match=r"lookahead\.safetensors: made for model aaaaaaaaaaaa, but this one is bbbbbbbbbbbb"):
        store.load(tmp_path, "b" * 64, (0, 1, 2))


def test_missing_damaged_and_foreign_files_are_refused(trained: Trained, tmp_path: Path) -> None:
    with pytest.raises(Mismatch, match="not found"):
        store.load(tmp_path, "a", (0,))
    path = store.save(trained, tmp_path, "a")
    with pytest.raises(Mismatch, match="cannot be read"):
        store.load(tmp_path, "a", (0, 9))  # it knows no layer 9
    path.write_bytes(path.read_bytes()[:100])
    with pytest.raises(Mismatch, match="cannot be read"):
        store.load(tmp_path, "a", (0,))


TEXT = "".join(f"Document {i} says that {i} times {i} is {i * i}, and more of it.<|endoftext|>\n" for i in range(24))


def test_train_then_eval_from_the_command_line(
    checkpoint: Callable[[str], Path], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    from forefetch import cli

    folder = tmp_path / "model"
    shutil.copytree(checkpoint("qwen2-shared"), folder)
    files = [tmp_path / "code.txt", tmp_path / "prose.txt"]
    for file in files:
        file.write_text(TEXT)
    shared = ["--model", str(folder), "--text", *map(str, files), "--context", "64", "--threads", "1"]
    options = ["--tokens", "1500", "--generate", "300", "--epochs", "1", "--rank", "4", "--distilled", "8"]
    assert cli.main(["lookahead", "train", *shared, *options]) == 0
    assert "slots@k+2 on documents kept aside" in capfd.readouterr().out
    shared += ["--tokens", "200"]
    assert cli.main(["lookahead", "eval", *shared, "--json"]) == 0
    answer = json.loads(capfd.readouterr().out)
    assert list(answer) == ["code", "prose"]
    for found in answer.values():
        for distance in ("L+1", "L+2"):
            assert set(found[distance]) == {"slots@k", "slots@k+2", "whole_set"}
            assert all(0.0 <= share <= 1.0 for share in found[distance].values())
            assert found["layers"][distance]
        assert found["control"] == 1.0
    assert cli.main(["lookahead", "eval", *shared]) == 0
    assert "previous token" in capfd.readouterr().out


FAMILIES = {case.family: name for name, case in reversed(CASES.items())}


@pytest.mark.parametrize("name", FAMILIES.values(), ids=FAMILIES)
def test_every_family_can_be_trained_and_measured(
    name: str, checkpoint: Callable[[str], Path], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    from router_service.lookahead.__main__ import main

    folder = tmp_path / "model"
    shutil.copytree(checkpoint(name), folder)
    text = tmp_path / "all.txt"
    text.write_text(TEXT)
    shared = ["--model", str(folder), "--text", str(text), "--context", "48", "--threads", "1", "--device", "cpu"]
    options = ["--tokens", "600", "--generate", "64", "--epochs", "1", "--head-epochs", "1", "--rank", "4", "--distilled", "8"]
    assert main(["train", *shared, *options]) == 0
    shown = capfd.readouterr()
    spec = ModelSpec.load(folder)
    for stage in ("generating", "recording", "sketching experts", "training heads", "calibrating"):
        assert stage in shown.err, "every stage has a bar"
    trained = store.load(folder, Checkpoint(folder).digest, spec.moe_layers)
    pairs = sum(min(2, len(spec.moe_layers) - place - 1) for place in range(len(spec.moe_layers)))
    refined = len(spec.moe_layers) - 1
    assert len(trained.heads) == 2 * pairs + refined, "both distances with and without attention"
    assert set(trained.sketches) == set(spec.moe_layers[:-1])
    assert main(["eval", *shared, "--tokens", "96", "--json"]) == 0
    found = json.loads(capfd.readouterr().out)["all"]
    assert found["control"] == 1.0
    assert set(found["layers"]["L+1"]) == {str(layer) for layer in spec.moe_layers[1:]}


def test_wrong_input_is_one_line_and_a_status(
    checkpoint: Callable[[str], Path], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    from router_service.lookahead.__main__ import main

    text = tmp_path / "t.txt"
    model = ["--model", str(checkpoint("qwen3")), "--text", str(text)]
    assert main(["eval", *model]) == 1  # no heads yet
    assert "lookahead.safetensors: not found" in capfd.readouterr().err
    assert main(["train", *model]) == 2
    assert f"--text {text}: cannot be read as UTF-8 text: No such file" in capfd.readouterr().err
    text.write_text("One document alone, which cannot be split into two.")
    assert main(["train", *model, "--generate", "0"]) == 2
    assert "at least two documents" in capfd.readouterr().err
