"""Shards that come and go while a worker runs: takes the planner's commands, loads and unloads in the background."""

from __future__ import annotations

import logging
import threading
from collections.abc import Sequence
from dataclasses import replace

from expert_worker.composite import Composite, Evaluator
from expert_worker.core import Core
from expert_worker.loading import Loader
from forefetch.errors import BadRequest, Mismatch, StaleEpoch

log = logging.getLogger("forefetch.expert")

RETRY_S = 5.0
"""Pause after a shard that could not be loaded."""


class Placer:
    """Moves a core towards what the latest command of the highest epoch names. Commands may come from any thread."""

    def __init__(self, core: Core, loader: Loader) -> None:
        self._core, self._loader = core, loader
        self._wanted: frozenset[int] = frozenset()
        self._epoch = 0
        self._changed = threading.Condition()
        self._closed = False
        threading.Thread(target=self._work, name="placer", daemon=True).start()

    def command(self, epoch: int, planner: str, shards: Sequence[int]) -> Sequence[int]:
        """Takes a command; the shards served now. StaleEpoch for an earlier planner's, BadRequest for what cannot be."""
        info = self._core.info
        wanted = frozenset(shards)
        if len(wanted) > info.capacity:
            raise BadRequest("shards", f"{len(wanted)} shards; this worker holds {info.capacity} at most (--max-shards)")
        if wanted and max(wanted) >= info.shards:
            raise BadRequest("shards", f"shard {max(wanted)} of {info.shards}")
        with self._changed:
            if epoch < self._epoch:
                raise StaleEpoch(f"epoch {epoch} of {planner} is over; epoch {self._epoch} commands here")
            if (epoch, wanted) != (self._epoch, self._wanted):
                log.info("epoch %d (%s): to hold shards %s", epoch, planner, sorted(wanted))
            self._epoch, self._wanted = epoch, wanted
            self._changed.notify()
        return self._core.info.held_shards

    def close(self) -> None:
        """Ends the thread after what it is loading."""
        with self._changed:
            self._closed = True
            self._changed.notify()

    def _work(self) -> None:
        while True:
            with self._changed:
                while not self._closed and self._wanted == frozenset(self._core.info.held_shards):
                    self._changed.wait()
                if self._closed:
                    return
                wanted = self._wanted
            try:
                self._step(wanted)
            except Exception:
                log.exception("a shard could not be loaded; trying again in %g s", RETRY_S)
                with self._changed:
                    self._changed.wait(RETRY_S)

    def _step(self, wanted: frozenset[int]) -> None:
        """One change: what is not wanted goes first, since its memory may be needed; then the lowest shard that is missing."""
        held = _parts(self._core)
        kept = {shard: part for shard, part in held.items() if shard in wanted}
        if len(kept) < len(held):
            self._serve(kept)
            return
        shard = min(wanted - set(kept))
        self._serve({**kept, shard: self._loader.shard(shard)})
        log.info("shard %d is served", shard)

    def _serve(self, parts: dict[int, Evaluator]) -> None:
        made = self._loader.composite(parts)
        layers = made.held if parts else {}
        info = self._core.info
        self._core.replace(replace(info, layers=layers, held_shards=tuple(made.parts), generation=info.generation + 1), made)


def _parts(core: Core) -> dict[int, Evaluator]:
    if not isinstance(core.experts, Composite):
        raise Mismatch("this worker holds a fixed shard")
    return dict(core.experts.parts)
