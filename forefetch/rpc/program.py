"""What every service's process does: logs, the ready line, the exit status."""

from __future__ import annotations

import gc
import json
import logging
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
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


def settle() -> None:
    """What is loaded stays: a full collection would walk some 200,000 objects, 80 to 200 ms in which no call is answered."""
    gc.collect()
    gc.freeze()


@contextmanager
def loading(what: str) -> Iterator[Callable[[int, int], None]]:
    """Gives a function (done, total) that shows how far loading `what` has come.

    A bar on standard error if that is a terminal; else lines {"event": "loading", "what", "done", "total"} on standard output,
    twenty at most, for whoever started this process."""
    if not sys.stderr.isatty():
        yield _loading_lines(what)
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    columns = TextColumn(f"loading {what}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn()
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("", total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)


def _loading_lines(what: str) -> Callable[[int, int], None]:
    said = 0

    def say(done: int, total: int) -> None:
        nonlocal said
        if total and done * 20 // total > said:
            said = done * 20 // total
            print(json.dumps({"event": "loading", "what": what, "done": done, "total": total}), flush=True)

    return say


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
