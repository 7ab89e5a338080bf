"""Services as forks of a process that has loaded everything (`fork_server.py`): real processes without seconds of imports."""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from forefetch.process import Process
from forefetch.settings import child_environment

CHILD = ["-P", "-m", "forefetch.child"]


class ForkServer:
    """`launch` stands in for subprocess.Popen where Process starts a service. The server starts with the first one.

    `modules`: to be loaded beside the services' own. `constants`: values of their constants, by module and name.
    `environment`: what libraries read when they are loaded."""

    def __init__(
        self,
        services: Sequence[str],
        modules: Sequence[str] = (),
        constants: Mapping[str, float] | None = None,
        **environment: str,
    ) -> None:
        self._services, self._modules = services, [*(f"{service}.__main__" for service in services), *modules]
        self._modules += [f"{name}={value}" for name, value in (constants or {}).items()]
        self._environment = {"OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "error", **environment}
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._link: socket.socket | None = None

    def launch(self, command: Sequence[str], *, env: Mapping[str, str], errors: str, **how: Any) -> Forked:
        """A service's process. What it is told by its environment is what it reads itself: libraries have read theirs."""
        assert list(command[1:4]) == CHILD
        assert command[4] in self._services
        with self._lock:
            link = self._link or self._start()
            pipes = [os.pipe() for _ in range(4)]  # standard input, output, error, status
            theirs = [pipes[0][0], *(write for _, write in pipes[1:])]
            socket.send_fds(link, [json.dumps([command[4:], dict(env)]).encode()], theirs)
        for file in theirs:
            os.close(file)
        return Forked(command, pipes[0][1], pipes[1][0], pipes[2][0], pipes[3][0], errors)

    def _start(self) -> socket.socket:
        self._link, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        script = str(Path(__file__).with_name("fork_server.py"))
        self._process = subprocess.Popen(
            [sys.executable, "-P", script, str(theirs.fileno()), *self._modules],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            env=child_environment(**self._environment),
            pass_fds=[theirs.fileno()],
        )
        theirs.close()
        return self._link

    def close(self) -> None:
        """Ends the server; services end when their standard input does, as ever."""
        if self._process is not None and self._link is not None:
            self._link.close()
            self._process.wait(60)


class Forked:
    """What Process uses of a subprocess.Popen, for a process that is another one's child."""

    def __init__(self, command: Sequence[str], stdin: int, stdout: int, stderr: int, status: int, errors: str) -> None:
        self.args, self.returncode = command, None
        self.stdin = os.fdopen(stdin, "w")
        self.stdout, self.stderr = os.fdopen(stdout, errors=errors), os.fdopen(stderr, errors=errors)
        self._status, self._lock = os.fdopen(status, "rb", buffering=0), threading.Lock()
        self._told = self._status.readline()
        if not self._told:
            raise RuntimeError("the fork server has ended")
        self.pid = int(self._told)

    returncode: int | None

    def poll(self) -> int | None:
        """Its exit status; None while it runs."""
        with self._lock:
            while self.returncode is None and select.select([self._status], [], [], 0)[0]:
                data = self._status.read(64) or b""
                self._told += data
                lines = self._told.splitlines()
                if len(lines) > 1 or not data:
                    self.returncode = os.waitstatus_to_exitcode(int(lines[1])) if len(lines) > 1 else -signal.SIGKILL
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """Its exit status, when it has ended. Raises subprocess.TimeoutExpired."""
        select.select([self._status], [], [], timeout)
        code = self.poll()
        if code is None:
            raise subprocess.TimeoutExpired(self.args, timeout or 0.0)
        return code

    def __del__(self) -> None:
        with contextlib.suppress(OSError):
            self._status.close()


class Forks:
    """One service after the other under one address. `start` returns when it is ready, `kill` is SIGKILL."""

    def __init__(self, server: ForkServer, module: str, flags: Sequence[str]) -> None:
        self.kills = 0
        self._process = Process(module, module, flags, child_environment())
        self._process.launch = server.launch

    @property
    def address(self) -> str:
        return self._process.address

    def start(self) -> str:
        self._process.spawn()
        self._process.wait_ready(240)
        return self.address

    def kill(self) -> None:
        self._process.signal(signal.SIGKILL)
        self._process.end(60)
        self.kills += 1

    def close(self) -> None:
        self._process.end(0.0)
