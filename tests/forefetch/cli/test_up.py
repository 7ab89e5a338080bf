"""`forefetch up` as a process: what it prints, and how it ends. The services are stand-ins that load in milliseconds."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path

import pytest
from waiting import until

from forefetch.shapes import synthetic_config

STAND_IN = """
    import json, os, socket, sys, time
    flags = dict(arg.split("=", 1) for arg in sys.argv[1:])
    host, _, port = flags["--listen"].rpartition(":")
    server = socket.socket()
    server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    server.bind((host, int(port)))
    print("a line of log", file=sys.stderr, flush=True)
    print(json.dumps({"event": "ready", "address": f"{host}:{server.getsockname()[1]}", "metrics": ""}), flush=True)
    open(f"{os.environ['STAND_INS']}/pid-{os.getpid()}", "w").close()
    time.sleep(600)
"""


@pytest.fixture
def stand_ins(tmp_path: Path) -> Path:
    for name in ("router_service", "expert_worker", "kv_service"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "__main__.py").write_text(textwrap.dedent(STAND_IN))
    (tmp_path / "config.json").write_text(json.dumps(synthetic_config("synthetic:olmoe-1b-7b")))
    return tmp_path


def pids(folder: Path) -> list[int]:
    return [int(path.name.removeprefix("pid-")) for path in folder.glob("pid-*")]


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


@pytest.fixture
def up(stand_ins: Path) -> Iterator[subprocess.Popen[str]]:
    command = [sys.executable, "-m", "forefetch.cli", "up", "--model", str(stand_ins), "--port", "0", "--workers", "3"]
    environment = {**os.environ, "PYTHONPATH": str(stand_ins), "STAND_INS": str(stand_ins)}
    with subprocess.Popen(
        command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, process_group=0
    ) as process:
        yield process
        process.kill()


def first_lines(up: subprocess.Popen[str]) -> str:
    """What it prints up to the hint about Ctrl-C."""
    assert up.stdout
    lines = []
    for line in up.stdout:
        lines.append(line)
        if line.startswith("Ctrl-C"):
            break
    return "".join(lines)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_says_where_it_serves_and_stops_cleanly(number: int, up: subprocess.Popen[str], stand_ins: Path) -> None:
    text = first_lines(up)
    address = text.partition(" at ")[2].split()[0]
    assert address.startswith("127.0.0.1:")
    assert "3 expert workers, KV service" in text
    assert f' generate --address {address} "' in text
    until(lambda: len(pids(stand_ins)) == 5)
    os.kill(up.pid, number)
    out, err = up.communicate(timeout=60)
    assert up.returncode == 0, err
    assert "Traceback" not in err
    assert "stopping" in err
    assert out == ""
    assert not any(alive(pid) for pid in pids(stand_ins))


def test_reports_a_service_that_died_and_ends_when_the_router_does(up: subprocess.Popen[str], stand_ins: Path) -> None:
    first_lines(up)
    until(lambda: len(pids(stand_ins)) == 5)
    commands = {pid: Path(f"/proc/{pid}/cmdline").read_text() for pid in pids(stand_ins)}
    kv = next(pid for pid, command in commands.items() if "kv_service" in command)
    router = next(pid for pid, command in commands.items() if "router_service" in command)
    os.kill(kv, signal.SIGKILL)
    until(lambda: len(pids(stand_ins)) == 6)
    os.kill(router, signal.SIGKILL)
    _, err = up.communicate(timeout=60)
    assert up.returncode == 1
    assert "kv was ended by SIGKILL: a line of log; starting it again in 0.5 s" in err
    assert "forefetch: error: the router was ended by SIGKILL: a line of log\n" in err
    assert not any(alive(pid) for pid in pids(stand_ins))


def test_a_missing_model_is_status_2() -> None:
    command = [sys.executable, "-m", "forefetch.cli", "up", "--model", "/nowhere"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 2
    assert done.stderr == "forefetch: error: --model: /nowhere holds no config.json\n"
