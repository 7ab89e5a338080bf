"""The command line itself: help, usage errors, exit statuses."""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import grpc
import pytest

from forefetch import cli
from forefetch.errors import ConfigError, Overloaded, Unavailable
from forefetch.version import VERSION


def run(*args: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "forefetch.cli", *args]
    return subprocess.run(command, capture_output=True, text=True, timeout=240, check=False)


def test_the_installed_command_prints_its_version() -> None:
    assert run("version").stdout == f"forefetch {VERSION}\n"
    assert run("--version").stdout == f"forefetch {VERSION}\n"


@pytest.mark.parametrize("command", [*cli.COMMANDS, "version"])
def test_every_command_has_a_description_and_an_example(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        cli.parser().parse_args([command, "--help"])
    assert ended.value.code == 0
    text = capsys.readouterr().out
    assert f"usage: forefetch {command}" in text
    assert len(text.splitlines()) > 4
    if command != "version":
        assert f"  forefetch {command}" in text.partition("\n")[2], "an example"


def test_help_lists_the_commands(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        cli.parser().parse_args(["--help"])
    text = capsys.readouterr().out
    assert all(f"    {command} " in text for command in cli.COMMANDS)
    assert "First steps" in text


@pytest.mark.parametrize(
    "args", [[], ["fly"], ["generate", "--temperature", "warm", "x"], ["up", "--workers"], ["up", "--fly"]]
)
def test_wrong_usage_is_status_2_without_a_stack_trace(args: list[str]) -> None:
    done = run(*args)
    assert done.returncode == 2
    assert "Traceback" not in done.stderr
    assert "usage: forefetch" in done.stderr


@pytest.mark.parametrize(
    ("error", "status"),
    [(ConfigError("--model: no"), 2), (Unavailable("gone"), 1), (Overloaded("full", 1.0), 1), (KeyboardInterrupt(), 130)],
)
def test_errors_become_one_line_and_a_status(
    error: BaseException, status: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(_args: argparse.Namespace) -> int:
        raise error

    monkeypatch.setattr(cli.COMMANDS["generate"], "run", fail)
    assert cli.main(["generate", "hello"]) == status
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err == ("" if status == 130 else f"forefetch: error: {error}\n")


@pytest.mark.parametrize(
    "args",
    [
        ["kv", "inspect", "--limit", "5000000000"],
        ["kv", "inspect", "--limit", "0"],
        ["health", "--wait", "nan"],
        ["generate", "--timeout", "-1", "x"],
    ],
)
def test_numbers_that_cannot_be_are_wrong_usage(args: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        cli.main(args)
    assert ended.value.code == 2
    assert "is no" in capsys.readouterr().err


def test_a_file_that_cannot_be_written_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    missing = tmp_path / "none" / "values.yaml"
    assert cli.main(["plan", "olmoe-1b-7b", "--values", str(missing)]) == 1
    assert capsys.readouterr().err == f"forefetch: error: {missing}: No such file or directory\n"


def test_a_disk_that_is_full_under_the_output_is_one_line() -> None:
    with open("/dev/full", "w") as full:
        command = [sys.executable, "-m", "forefetch.cli", "plan", "olmoe-1b-7b"]
        done = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True, timeout=60, check=False)
    assert done.returncode == 1
    assert done.stderr == "forefetch: error: standard output: No space left on device\n"


def test_a_terminal_without_unicode_gets_question_marks() -> None:
    command = [sys.executable, "-m", "forefetch.cli", "plan", "olmoe-1b-7b"]
    environment = {**os.environ, "PYTHONIOENCODING": "ascii"}
    done = subprocess.run(command, capture_output=True, timeout=60, check=False, env=environment)
    assert done.returncode == 0, done.stderr
    assert b"????" in done.stdout


def test_another_service_at_the_address_is_said(capsys: pytest.CaptureFixture[str]) -> None:
    server = grpc.server(ThreadPoolExecutor(1))
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    try:
        assert cli.main(["stats", "--address", f"127.0.0.1:{port}"]) == 1
    finally:
        server.stop(None).wait(10)
    assert "another service" in capsys.readouterr().err


def test_nobody_at_the_address_is_one_line() -> None:
    done = run("generate", "--address", "127.0.0.1:1", "--timeout", "5", "hello")
    assert done.returncode == 1
    assert done.stdout == ""
    assert done.stderr == "forefetch: error: 127.0.0.1:1 does not answer: Connection refused\n"


@pytest.mark.parametrize("address", ["localhost", "a:0", "a:65536", "a:1,b", ":1", "a:1,"])
def test_what_is_no_address_is_wrong_usage(address: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        cli.main(["stats", "--address", address])
    assert ended.value.code == 2
    assert "is not host:port" in capsys.readouterr().err
