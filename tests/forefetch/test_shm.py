from __future__ import annotations

import os
import secrets
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from waiting import until

from forefetch import shm
from forefetch.errors import Mismatch

pytestmark = pytest.mark.skipif(bool(shm.unsupported()), reason=shm.unsupported())


@pytest.fixture
def segment() -> Iterator[shm.Segment]:
    made = shm.Segment.create(5000, 100)
    yield made
    made.unlink()


def child(code: str) -> subprocess.Popen[str]:
    return subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, stdin=subprocess.PIPE, text=True)


def test_both_sides_see_the_same_bytes(segment: shm.Segment) -> None:
    other = shm.Segment.open(segment.name, segment.nonce)
    assert (len(other.request), len(other.reply)) == (5000, 100)
    segment.request[:5] = b"hello"
    other.reply[-3:] = b"bye"
    assert other.request[:5] == b"hello"
    assert segment.reply[-3:] == b"bye"
    segment.unlink()
    segment.request[:5] = b"after"
    assert other.request[:5] == b"after"
    with pytest.raises(Mismatch, match="cannot be opened"):
        shm.Segment.open(segment.name, segment.nonce)


def test_views_outlive_the_segment() -> None:
    segment = shm.Segment.create(10, 10)
    segment.unlink()
    request = segment.request
    del segment
    request[:2] = b"ok"
    assert request[:2] == b"ok"


@pytest.mark.parametrize("name", ["", "/etc/passwd", "forefetch-x", "forefetch-" + "0" * 32 + "/../x", "forefetch-" + "0" * 32])
def test_names_of_others_are_refused(name: str) -> None:
    with pytest.raises(Mismatch, match="segment"):
        shm.Segment.open(name, bytes(16))


def test_a_segment_of_other_memory_is_refused(segment: shm.Segment) -> None:
    with pytest.raises(Mismatch, match="same memory"):
        shm.Segment.open(segment.name, bytes(16))
    path = shm.FOLDER / segment.name
    os.truncate(path, 4096)  # the header page only
    with pytest.raises(Mismatch, match="shorter"):
        shm.Segment.open(segment.name, segment.nonce)
    os.truncate(path, 10)
    with pytest.raises(Mismatch, match="not a segment"):
        shm.Segment.open(segment.name, segment.nonce)


def test_no_room_is_said_with_the_size_and_leaves_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    name = secrets.token_hex(16)
    monkeypatch.setattr(shm.secrets, "token_hex", lambda _: name)
    with pytest.raises(Mismatch, match=f"no room .* {2**50 + 8192} bytes"):
        shm.Segment.create(2**50, 10)
    assert not (shm.FOLDER / (shm.PREFIX + name)).exists()


def test_reclaim_takes_the_dead_and_leaves_the_living(segment: shm.Segment) -> None:
    code = "from forefetch.shm import Segment\ns = Segment.create(10, 10)\nprint(s.name, flush=True)\ninput()"
    with child(code) as owner:
        assert owner.stdout
        stale = owner.stdout.readline().strip()
        assert stale not in shm.reclaim()
        assert (shm.FOLDER / stale).exists()
        owner.send_signal(signal.SIGKILL)
        owner.wait()
        removed = shm.reclaim()
        # Another test's router may have reclaimed it first.
        assert not (shm.FOLDER / stale).exists()
        assert segment.name not in removed
        assert (shm.FOLDER / segment.name).exists()


def test_reclaim_ignores_files_that_are_not_ours() -> None:
    path = shm.FOLDER / f"forefetch-not-a-segment-{os.getpid()}"
    path.touch()
    try:
        shm.reclaim()
        assert path.exists()
    finally:
        path.unlink()


def test_a_bell_wakes_a_sleeper_of_another_process(segment: shm.Segment) -> None:
    code = f"""
from forefetch.shm import Segment
other = Segment.open({segment.name!r}, {segment.nonce!r})
print("mapped", flush=True)
while not other.request_bell.wait(0, 0):
    pass
other.reply_bell.ring(other.request_bell.value + 1)
"""
    with child(code) as process:
        assert process.stdout
        assert process.stdout.readline() == "mapped\n"
        time.sleep(0.12)  # longer than a slice: it sleeps again
        segment.request_bell.ring(41)
        until(lambda: segment.reply_bell.wait(0, 20_000))
        assert segment.reply_bell.value == 42
        assert process.wait(60) == 0


def test_waiting_ends_after_a_slice_or_a_nudge(segment: shm.Segment) -> None:
    bell = segment.request_bell
    began = time.monotonic()
    assert bell.wait(0, 0) is False
    assert time.monotonic() - began > 0.8 * shm.SLICE_S
    threading.Timer(0.01, bell.nudge).start()
    assert bell.wait(0, 0) is False
    bell.ring(2**32 - 1)
    assert bell.wait(0, 0) is True
    assert bell.value == 2**32 - 1


def test_unsupported_hosts_say_why(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert shm.domain()
    assert shm.domain() == shm.domain()
    monkeypatch.setattr(shm.platform, "machine", lambda: "aarch64")
    assert "x86-64" in shm.unsupported()
    assert shm.domain() == ""
    assert shm.reclaim() == []
    monkeypatch.undo()
    monkeypatch.setattr(shm, "FOLDER", tmp_path / "none")
    assert "no shared-memory folder" in shm.unsupported()
