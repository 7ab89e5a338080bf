"""`forefetch plan`: what it prints, and that the chart takes the values that it proposes."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import helm_python as helm
import pytest
import yaml

from forefetch.cli import plan
from forefetch.errors import ConfigError, UnsupportedModel
from forefetch.shapes import SHAPES

ROOT = Path(__file__).resolve().parents[3]


def run(*argv: str) -> int:
    parser = argparse.ArgumentParser()
    plan.add_parser(parser.add_subparsers())
    return plan.run(parser.parse_args(["plan", *argv]))


def test_a_known_shape(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "160")
    assert run("qwen3-30b-a3b", "--batch", "64", "--kv-format", "e2m0", "--expert-format", "int4") == 0
    out = capsys.readouterr().out
    shown = ("6144 of 6144 experts, 128.0 per layer", "ms per token", "limited by expert weights", "measured on one H200")
    for text in (*shown, "kv_memory_mb:"):
        assert text in out, text


def test_what_does_not_fit_is_status_1_with_the_arithmetic(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("qwen3-30b-a3b", "--memory-gib", "4") == 1
    out = capsys.readouterr().out
    assert "does not fit: trunk 2.9 GiB + KV" in out
    assert "ms per token" not in out


@pytest.mark.parametrize("name", SHAPES)
@pytest.mark.parametrize(
    "more",
    [
        (),
        ("--workers", "4", "--link", "grpc"),
        ("--workers", "2", "--link", "shm", "--slots", "50%"),
        ("--workers", "7", "--link", "p2p"),
    ],
)
def test_the_chart_takes_what_is_proposed(name: str, more: tuple[str, ...], tmp_path: Path) -> None:
    target = tmp_path / "values.yaml"
    assert run(name, "--batch", "8", "--values", str(target), *more) == 0
    values = yaml.safe_load(target.read_text())
    chart = helm.Chart.load(ROOT / "deploy" / "chart")
    chart.validate_schema(values)
    assert chart.render(values, name="demo", namespace="llm")


def test_json_agrees_with_itself(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(str(ROOT / "models" / "reference"), "--hardware", "cpu", "--batch", "4", "--context", "256", "--json") == 0
    shown = json.loads(capsys.readouterr().out)
    assert shown["fits"] is True
    assert shown["speed"]["token_ms"] == pytest.approx(sum(shown["speed"]["terms_ms"].values()))
    assert shown["values"]["router"]["settings"]["device"] == "cpu"


def test_values_alone_are_yaml(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("olmoe-1b-7b", "--values", "-") == 0
    assert yaml.safe_load(capsys.readouterr().out)["router"]["gpus"] == 1


@pytest.mark.parametrize(
    ("argv", "error"),
    [
        (("nowhere",), UnsupportedModel),
        (("qwen3-30b-a3b", "--slots", "some"), ConfigError),
        (("qwen3-30b-a3b", "--hbm-gbs", "0"), ConfigError),
        (("qwen3-30b-a3b", "--memory-gib", "nan"), ConfigError),
        (("qwen3-30b-a3b", "--workers", "2", "--link", "pigeon"), ConfigError),
    ],
)
def test_nonsense_is_refused(argv: tuple[str, ...], error: type[Exception]) -> None:
    with pytest.raises(error):
        run(*argv)
