"""Starts services within milliseconds: all modules are loaded once, then each service is a fork.

python fork_server.py MODULE FLAGS...

A line HOST:PORT on standard input starts one that listens there; {"pid": ...} and the service's ready line come back.
"""

from __future__ import annotations

import importlib
import json
import os
import sys


def main() -> None:
    name = sys.argv[1]
    module = importlib.import_module(f"{name}.__main__")
    for line in sys.stdin:
        pid = os.fork()
        if pid == 0:
            sys.argv = [name, *sys.argv[2:], f"--listen={line.strip()}"]
            os._exit(module.main())
        print(json.dumps({"pid": pid}), flush=True)
        os.waitpid(pid, 0)


if __name__ == "__main__":
    main()
