"""buf's STANDARD rules over protos/, plus comments on every message, field and rpc."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent


# A oneof's name says it all; its message and its fields carry the comments.
COMMENTS = '{"version":"v2","lint":{"use":["COMMENTS"],"except":["COMMENT_ONEOF"]}}'


@pytest.mark.parametrize("config", [[], ["--config", COMMENTS]], ids=["standard", "comments"])
def test_buf_lint_is_clean(config: list[str]) -> None:
    buf = Path(sys.executable).parent / "buf"
    command = [str(buf), "lint", str(ROOT / "protos"), *config]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
