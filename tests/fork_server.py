"""Starts services within milliseconds: their modules are loaded once, then each service is a fork.

python fork_server.py SOCKET (MODULE | MODULE.CONSTANT=NUMBER)...

Over the socket (a descriptor's number) come requests: JSON [arguments, environment], and with it four descriptors: the
service's standard input, output and error, and a pipe that is told its process id and, when it has ended, its status. The fork
goes on as `python -m forefetch.child ARGUMENTS` would, in a process group of its own.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import json
import os
import re
import select
import signal
import socket
import sys

from forefetch import child


def serve(link: socket.socket) -> list[str] | None:
    """The arguments, in a fork; None, here, when nobody can ask any more."""
    told: dict[int, int] = {}  # process id -> where its end is told
    woken, wake = os.pipe()
    os.set_blocking(wake, False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.set_wakeup_fd(wake)
    while True:
        ready, _, _ = select.select([link, woken], [], [])
        if woken in ready:
            os.read(woken, 4096)
            _tell_ends(told)
        if link not in ready:
            continue
        message, files, _, _ = socket.recv_fds(link, 1 << 20, 4)
        if not message:
            return None
        arguments, environment = json.loads(message)
        if (pid := os.fork()) == 0:
            signal.set_wakeup_fd(-1)
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            link.close()
            _become(files, environment, [woken, wake, *told.values()])
            return [str(one) for one in arguments]
        told[pid] = files[3]
        _tell(files[3], pid)
        for file in files[:3]:
            os.close(file)


def _tell_ends(told: dict[int, int]) -> None:
    while told:
        pid, status = os.waitpid(-1, os.WNOHANG)
        if not pid:
            return
        _tell(told[pid], status)
        os.close(told.pop(pid))


def _tell(file: int, number: int) -> None:
    with contextlib.suppress(BrokenPipeError):
        os.write(file, b"%d\n" % number)


def _become(files: list[int], environment: dict[str, str], others: list[int]) -> None:
    os.setpgid(0, 0)
    for standard, file in enumerate(files[:3]):
        os.dup2(file, standard)
    for file in (*files, *others):
        os.close(file)
    os.environ.clear()
    os.environ.update(environment)


def main() -> None:
    for name in sys.argv[2:]:
        if "=" in name:
            module, constant, value = re.fullmatch(r"(.*)\.(\w+)=(.*)", name).groups()  # type: ignore[union-attr]
            setattr(importlib.import_module(module), constant, json.loads(value))
            continue
        importlib.import_module(name)
        if name.endswith(".__main__"):
            del sys.modules[name]  # a fork runs it
    gc.freeze()
    with socket.socket(fileno=int(sys.argv[1])) as link:
        arguments = serve(link)
    if arguments is not None:
        sys.argv = ["forefetch.child", *arguments]
        child.main()


if __name__ == "__main__":
    main()
