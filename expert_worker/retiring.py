"""When an expert that is not named any more may go: once no router's table can still name it. Pure; time is an argument.

Every change of what a worker names has a generation. Routers acknowledge the one that their table goes by. An expert withdrawn
in generation g may go when every router that was heard of lately has acknowledged g or later.
"""

from __future__ import annotations

from collections.abc import Collection

SILENT_S = 5.0
"""A router that has not asked for so long is not waited for: it is gone, or will find out by being refused."""
NEW_S = 1.0
"""Time that a router which has never asked yet has to do so."""


Unit = tuple[int, int]
"""(layer, expert)."""


class Retiring:
    """The withdrawn experts of one worker, and what each router has acknowledged. Not for concurrent use."""

    def __init__(self) -> None:
        self._withdrawn: dict[Unit, tuple[int, float]] = {}  # expert -> generation without it, and since when
        self._heard: dict[str, tuple[int, float]] = {}  # router -> acknowledged generation, and when

    def acknowledge(self, router: str, generation: int, now: float) -> None:
        """A router's table goes by this generation."""
        known, _ = self._heard.get(router, (0, now))
        self._heard[router] = max(known, generation), now

    def withdraw(self, expert: Unit, generation: int, now: float) -> None:
        """From this generation on it is not named. No effect on one that is withdrawn already."""
        self._withdrawn.setdefault(expert, (generation, now))

    def due(self, now: float, wanted: Collection[Unit] = ()) -> list[Unit]:
        """The experts that may go now; those that are wanted again are withdrawn no longer. Neither is remembered."""
        self._withdrawn = {expert: since for expert, since in self._withdrawn.items() if expert not in wanted}
        self._heard = {router: seen for router, seen in self._heard.items() if now - seen[1] < SILENT_S}
        agreed = min((generation for generation, _ in self._heard.values()), default=None)
        free = [
            expert
            for expert, (generation, since) in self._withdrawn.items()
            if now - since >= NEW_S and (agreed is None or agreed >= generation)
        ]
        for expert in free:
            del self._withdrawn[expert]
        return free
