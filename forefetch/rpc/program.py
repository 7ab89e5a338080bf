"""What every service's process does: logs, the ready line, the exit status."""

from __future__ import annotations

import json
import logging
import signal
import sys
from collections.abc import Callable
from typing import Any

from forefetch.errors import ConfigError


class _OneLine(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        return super().format(record).replace("\n", " | ")


def setup_logging(level: str) -> None:
    """Logs to standard error, one line per record, tracebacks included."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(_OneLine("%(asctime)s %(levelname)s %(name)s: %(message)s"))
    logging.basicConfig(level=level.upper(), handlers=[handler], force=True)


def announce(address: str, metrics: str = "", **more: Any) -> None:
    """Prints the line that whoever started this process waits for."""
    print(json.dumps({"event": "ready", "address": address, "metrics": metrics, **more}), flush=True)


def run_main(prog: str, body: Callable[[], None]) -> int:
    """Runs a service's body: a wrong setting ends it with 2 and one line on standard error."""
    try:
        body()
    except ConfigError as error:
        print(f"{prog}: error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 128 + signal.SIGINT
    return 0
