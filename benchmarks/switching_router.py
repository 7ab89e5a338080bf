"""A router that turns its hints on and off while it decodes, for `benchmarks.slot_hints`; run as services are.

Its flags are those of a router, behind `--steps FILE --window N`: the file gets what steps took and what the worker counted.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from time import perf_counter_ns
from typing import Any

from router_service import __main__ as router
from router_service import build
from router_service.hints import OFF, PLAIN, Hints

WAYS = "off", "hints", "after", "after", "off", "placebo", "after", "after"
"""What windows are called, in turn. A placebo's hints are off, as are those of windows "after", which are compared with
nothing: slots still hold what hints brought, and in a run's first window, which is one too, what its prompts brought."""


class Switching:
    """In the place of `Hints.begin`: a step's way by its number since the last step with a prompt, when notes are kept."""

    def __init__(self, hints: Hints, file: Path, window: int) -> None:
        self._begin, self._hints, self._file, self._window = hints.begin, hints, file, window
        self._notes = list[tuple[int, str, tuple[int, ...]]]()  # ns, way, what the worker has counted
        self._runs = 0

    def begin(self, batch: Any, stamps: Any) -> Any:
        """See Hints."""
        if batch.prefills:
            self._keep()
            return self._begin(batch, stamps)
        turn = len(self._notes) // self._window - 1 + len(WAYS) // 2 * (self._runs % 2)  # hints or the placebo first, in turn
        way = WAYS[turn % len(WAYS)]
        self._hints.setting = PLAIN if way == "hints" else OFF
        core = self._hints._workers.rows[0].link.core  # type: ignore[union-attr]
        self._notes.append((perf_counter_ns(), way, (*core.verified, core.copy_wait_ns)))
        return self._begin(batch, stamps)

    def _keep(self) -> None:
        if self._notes:
            with self._file.open("a") as out:
                out.write(json.dumps(self._notes) + "\n")
            self._notes, self._runs = [], self._runs + 1


def main() -> int:
    """Entry point of the process."""
    file, window = Path(sys.argv[2]), int(sys.argv[4])
    del sys.argv[1:5]
    made = build.hints

    def hints(*parts: Any) -> Hints | None:
        found = made(*parts)
        assert found is not None
        found.begin = Switching(found, file, window).begin  # type: ignore[method-assign]
        return found

    build.hints = hints
    return router.main()


if __name__ == "__main__":
    sys.exit(main())
