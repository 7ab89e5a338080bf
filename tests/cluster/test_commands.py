"""The commands as a user types them, against real services."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from reference_model import Oracle

CASE = "qwen3"


def forefetch(*args: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "forefetch.cli", *args]
    done = subprocess.run(command, capture_output=True, text=True, timeout=400, check=False)
    assert "Traceback" not in done.stderr
    return done


@pytest.fixture(scope="module")
def up(checkpoint: Callable[[str], Path]) -> Iterator[str]:
    """Address of a router started by `forefetch up`, which is stopped by Ctrl-C at the end."""
    flags = ["--model", str(checkpoint(CASE)), "--port", "0", "--device", "cpu", "--link", "shm"]
    command = [sys.executable, "-m", "forefetch.cli", "up", *flags]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env={**os.environ, "OMP_NUM_THREADS": "1"}
    ) as process:
        assert process.stdout
        line = process.stdout.readline()
        yield line.partition(" at ")[2].split()[0]
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=120)
        assert process.returncode == 0, err
        assert "Traceback" not in err


def test_generate_json_is_the_oracles_answer(
    up: str, oracle: Callable[[str], Oracle], checkpoint: Callable[[str], Path]
) -> None:
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(checkpoint(CASE) / "tokenizer.json"))
    text = "The router keeps the attention"
    done = forefetch("generate", "--address", up, "--json", "--temperature", "0", "--ignore-eos", "--max-tokens", "32", text)
    assert done.returncode == 0, done.stderr
    answer = json.loads(done.stdout)
    expected = oracle(CASE).greedy(tokenizer.encode(text).ids, 32)
    assert answer["token_ids"] == expected
    assert answer["text"] == tokenizer.decode(expected)
    assert answer["finish_reason"] == "length"
    assert answer["tpot_ms_p99"] >= answer["tpot_ms_p50"] > 0
    parts = answer["timings"][-1]
    named = sum(value for name, value in parts.items() if name.endswith("_ms") and name != "total_ms")
    assert 0 < named <= parts["total_ms"] * 1.001


def test_trace_and_stats_show_the_request(up: str, tmp_path: Path) -> None:
    done = forefetch(
        "generate", "--address", up, "--max-tokens", "8", "--ignore-eos", "--request-id", "seen", "--chat", "Hello"
    )
    assert done.returncode == 0, done.stderr
    assert "request seen" in done.stderr
    shown = forefetch("trace", "--address", up, "seen")
    assert shown.returncode == 0, shown.stderr
    assert "seen" in shown.stdout
    page = tmp_path / "trace.html"
    assert forefetch("trace", "--address", up, "seen", "--html", str(page)).returncode == 0
    assert "seen" in page.read_text()
    stats = forefetch("stats", "--address", up, "--json")
    assert stats.returncode == 0, stats.stderr
    assert json.loads(stats.stdout)["requests_ok"] >= 1


def test_errors_are_one_line(up: str) -> None:
    done = forefetch("generate", "--address", up, "--temperature", "-1", "hello")
    assert done.returncode == 1
    assert done.stdout == ""
    assert done.stderr.startswith("forefetch: error: sampling.temperature: ")
    assert done.stderr.count("\n") == 1


def test_demo_shows_answers_and_where_the_time_went(checkpoint: Callable[[str], Path], tmp_path: Path) -> None:
    page = tmp_path / "demo.html"
    done = forefetch(
        "demo", "--model", str(checkpoint("olmoe-clip")), "--device", "cpu", "--max-tokens", "12", "--html", str(page)
    )
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    for word in ("chat", "code", "TTFT", "TPOT p99", "attention", "expert compute", "link", "sampling", " up --model"):
        assert word in done.stdout, word
    assert page.stat().st_size > 10_000
