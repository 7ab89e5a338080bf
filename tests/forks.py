"""One service after the other under one address, each a fork of a process that has loaded everything (`fork_server.py`)."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from forefetch.settings import child_environment


class Forks:
    """`start` returns when the service is ready; `kill` is SIGKILL; `address` stays the same."""

    def __init__(self, module: str, flags: Sequence[str]) -> None:
        command = [sys.executable, "-P", str(Path(__file__).with_name("fork_server.py")), module, *flags]
        environment = child_environment(PYTHONWARNINGS="error", OMP_NUM_THREADS="1")
        self.server = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment)
        self.address, self.pid, self.kills = "127.0.0.1:0", 0, 0

    def start(self) -> str:
        assert self.server.stdin
        assert self.server.stdout
        self.server.stdin.write(f"{self.address}\n")
        self.server.stdin.flush()
        said: dict[str, str] = {}
        while not ("pid" in said and "address" in said):
            line = self.server.stdout.readline()
            assert line, "the service ended"
            said |= json.loads(line)
        self.pid, self.address = int(said["pid"]), said["address"]
        return self.address

    def kill(self) -> None:
        os.kill(self.pid, signal.SIGKILL)
        self.pid = 0
        self.kills += 1

    def close(self) -> None:
        assert self.server.stdin
        assert self.server.stdout
        if self.pid:
            self.kill()
        self.server.stdin.close()
        self.server.wait(10)
        self.server.stdout.close()
