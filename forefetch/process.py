"""A service as a child process: start, ready line, last words, signals, restart on the same port."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import IO, Any

from forefetch.errors import Unavailable

TAIL_LINES = 30


class Process:
    """One service of a cluster. `address`, `metrics` and `health` are host:port once it is ready; a restart keeps the address.

    on_line(name, line) sees every line of standard error, on_loading(name, done, total) how far loading has come:
    (0, 0) at the start, (1, 1) when it is ready. Both are called on a thread of this object. All methods may be called from
    any thread.
    """

    launch: Callable[..., Any] = subprocess.Popen
    """How the process is made, with that one's arguments; tests make it a fork."""

    def __init__(
        self,
        name: str,
        module: str,
        flags: Sequence[str],
        environment: Mapping[str, str],
        *,
        listen: str = "127.0.0.1:0",
        on_line: Callable[[str, str], None] | None = None,
        on_loading: Callable[[str, int, int], None] | None = None,
    ) -> None:
        self.name = name
        self.address = ""
        self.metrics = self.health = ""
        self.tail: deque[str] = deque(maxlen=TAIL_LINES)
        self._module, self._flags, self._environment, self._listen = module, list(flags), dict(environment), listen
        self._on_line, self._on_loading = on_line, on_loading
        self._ready = threading.Event()
        self._popen: subprocess.Popen[str] | None = None
        self._readers: list[threading.Thread] = []

    def spawn(self) -> None:
        """Starts the process and returns at once. It has its own process group, so that a terminal's Ctrl-C reaches only us."""
        self._ready = threading.Event()
        self.tail.clear()
        self._report(0, 0)
        # -P: a folder of the same name in the working directory is not the service.
        command = [sys.executable, "-P", "-m", "forefetch.child", self._module, *self._flags]
        command.append(f"--listen={self.address or self._listen}")
        self._popen = self.launch(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            errors="replace",
            env=self._environment,
            process_group=0,
        )
        assert self._popen.stdout
        assert self._popen.stderr
        self._readers = [
            threading.Thread(target=self._read_stdout, args=(self._popen.stdout, self._ready), daemon=True),
            threading.Thread(target=self._read_stderr, args=(self._popen.stderr,), daemon=True),
        ]
        for reader in self._readers:
            reader.start()

    def _read_stdout(self, stream: IO[str], ready: threading.Event) -> None:
        for line in stream:
            message = _event(line)
            if message.get("event") == "ready":
                self.address = message["address"]
                self.metrics, self.health = message.get("metrics", ""), message.get("health", "")
                self._report(1, 1)
                ready.set()
            elif message.get("event") == "loading":
                self._report(message["done"], message["total"])

    def _report(self, done: int, total: int) -> None:
        if self._on_loading:
            self._on_loading(self.name, done, total)

    def _read_stderr(self, stream: IO[str]) -> None:
        for line in stream:
            text = line.rstrip()
            self.tail.append(text)
            if self._on_line and text:
                self._on_line(self.name, text)

    @property
    def pid(self) -> int:
        """Process id of the latest start."""
        assert self._popen is not None
        return self._popen.pid

    @property
    def running(self) -> bool:
        """Started and not ended."""
        return self._popen is not None and self._popen.poll() is None

    @property
    def ready(self) -> bool:
        """Running and has said that it can serve."""
        return self.running and self._ready.is_set()

    def wait_ready(self, timeout_s: float) -> None:
        """Raises Unavailable with the process's last words if it ends first or `timeout_s` passes."""
        until = time.monotonic() + timeout_s
        while not self._ready.wait(0.02):
            if not self.running:
                raise Unavailable(f"{self.name} {self.ending()}")
            if time.monotonic() > until:
                raise Unavailable(f"{self.name} was not ready within {timeout_s:g} s{self.last_words()}")

    def ending(self) -> str:
        """How the process ended, for a person."""
        for reader in self._readers:
            reader.join(1.0)
        code = self._popen.poll() if self._popen else None
        if code is not None and code < 0:
            return f"was ended by {signal.Signals(-code).name}{self.last_words()}"
        return f"ended with status {code}{self.last_words()}"

    def last_words(self) -> str:
        """The end of its standard error, led by ": ", or nothing. Of a refused setting it is the refusal alone: the usage
        before it is that of a command which the user did not type."""
        lines = [line for line in self.tail if line]
        if lines and ": error: " in lines[-1]:
            return ": " + lines[-1].partition(": error: ")[2]
        return ": " + "\n  ".join(lines[-8:]) if lines else ""

    def signal(self, number: int) -> None:
        """Sends a signal to the process, if it is still there."""
        if self.running:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, number)

    def wait(self, timeout_s: float) -> bool:
        """True when the process has ended within `timeout_s`."""
        if self._popen is None:
            return True
        try:
            self._popen.wait(timeout_s)
        except subprocess.TimeoutExpired:
            return False
        return True

    def end(self, grace_s: float) -> None:
        """SIGTERM, up to `grace_s` of patience, then SIGKILL to all of its group. Frees pipes and threads."""
        if self._popen is None:
            return
        self.signal(signal.SIGTERM)
        if not self.wait(grace_s):
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.pid, signal.SIGKILL)
            self._popen.wait()
        for reader in self._readers:
            reader.join(1.0)
        for stream in (self._popen.stdin, self._popen.stdout, self._popen.stderr):
            if stream:
                stream.close()


def _event(line: str) -> dict[str, Any]:
    """A line of a service's standard output as the event it announces; {} for anything else."""
    with contextlib.suppress(ValueError):
        message = json.loads(line)
        return message if isinstance(message, dict) else {}
    return {}
