"""`python -m forefetch.child MODULE FLAGS...`: runs a service that ends when its parent does, even if that was killed.

The parent holds the other end of standard input and never writes to it. When it is gone, for whatever reason, the read
here returns and this process asks itself to stop. (Linux's PR_SET_PDEATHSIG would not do: it fires when the *thread* that
started the child ends, and restarts come from whichever thread is watching.)
"""

from __future__ import annotations

import contextlib
import os
import runpy
import signal
import sys
import threading
import time

LEAVE_S = 5.0
"""Seconds between the polite request and the end, once nobody is left who could want an answer."""


def _follow_parent() -> None:
    with contextlib.suppress(OSError):  # standard input that was never open ends the wait like one that was closed
        while os.read(0, 4096):
            pass
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(LEAVE_S)
    os._exit(1)


def main() -> None:
    """Runs sys.argv[1] as `python -m` would, with the arguments after it."""
    module = sys.argv[1]
    sys.argv = sys.argv[1:]
    threading.Thread(target=_follow_parent, name="lifeline", daemon=True).start()
    runpy.run_module(module, run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
