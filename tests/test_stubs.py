"""The committed stubs are what the protos say."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def test_committed_stubs_equal_generated_ones(tmp_path: Path) -> None:
    # protoc looks for protoc-gen-mypy_grpc on PATH; it lives beside the interpreter.
    environment = {**os.environ, "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}"}
    command = [sys.executable, str(ROOT / "scripts" / "generate_stubs.py"), "--out", str(tmp_path)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stderr
    fresh = {path.name: path.read_bytes() for path in (tmp_path / "forefetch" / "v1").iterdir() if path.is_file()}
    committed = {path.name: path.read_bytes() for path in (ROOT / "forefetch" / "v1").iterdir() if path.is_file()}
    assert sorted(committed) == sorted(fresh)
    stale = [name for name in fresh if fresh[name] != committed[name]]
    assert not stale, f"run scripts/generate_stubs.py: {stale} differ"
